"""Small folders of the shapes in which published data lie."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from small_models import CHANNELS, CLASSES, COLUMNS, WORDS

WNIDS = ("n01443537", "n01629819", "n01641577")


def pixels(seed: int, size: int | tuple[int, int] = 32) -> NDArray[np.uint8]:
    """A picture [h, w, 3] whose values differ from those of other seeds."""
    height, width = (size, size) if isinstance(size, int) else size
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def save_picture(path: Path, seed: int, size: int | tuple[int, int] = 32) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels(seed, size)).save(path, format="PNG")  # lossless, whatever its name


def save_classes(
    root: Path,
    seed: int,
    classes: Sequence[str] = WNIDS,
    count: int = 2,
    name: str = "{}.JPEG",
    size: int = 32,
) -> None:
    """``root``/<class>/<name>, picture i of class c made by seed 100 ``seed`` + 10 c + i."""
    for number, each in enumerate(classes):
        for i in range(count):
            save_picture(root / each / name.format(i), 100 * seed + 10 * number + i, size)


def save_corruptions(
    root: Path, names: Sequence[str], severities: Sequence[int] = (5,), **rest: Any
) -> None:
    """``root``/<corruption>/<severity>/<wnid>/*.JPEG; corruption k and severity s have seed
    10 k + s.
    """
    for number, name in enumerate(names):
        for severity in severities:
            save_classes(root / name / str(severity), 10 * number + severity, **rest)


def save_tiny_val(root: Path, count: int = 2) -> None:
    """tiny-imagenet-200's val: picture i of class i mod 3 in images, classes in a file."""
    lines = []
    for number in range(count * len(WNIDS)):
        save_picture(root / "images" / f"val_{number}.JPEG", number, 64)
        box = "0\t32\t44\t62"
        lines.append(f"val_{number}.JPEG\t{WNIDS[number % 3]}\t{box}\n")
    (root / "val_annotations.txt").write_text("".join(lines))


def make_table(n: int = 24) -> tuple[NDArray[np.float32], NDArray[np.int64], list[str]]:
    """Numbers [n, columns], labels [n] and domains [n]."""
    random = np.random.default_rng(0)
    values = random.normal(size=(n, COLUMNS)).astype(np.float32)
    return values, random.integers(0, CLASSES, n), [f"plant{i % 3}" for i in range(n)]


def write_csv(path: Path, header: str, rows: Sequence[Sequence[object]]) -> None:
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")


def write_table(path: Path, n: int = 24) -> None:
    values, labels, domains = make_table(n)
    rows = [[*row, label, where] for row, label, where in zip(values, labels, domains, strict=True)]
    write_csv(path, "a,b,c,d,label,domain", rows)


def make_tokens(n: int = 24) -> tuple[list[list[int]], NDArray[np.int64], list[str]]:
    """Texts as numbers of words, labels [n] and domains [n]."""
    random = np.random.default_rng(1)
    texts = [random.integers(1, WORDS, 3 + i % 4).tolist() for i in range(n)]
    return texts, random.integers(0, CLASSES, n), [("books", "kitchen")[i % 2] for i in range(n)]


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_tokens(path: Path) -> None:
    texts, labels, domains = make_tokens()
    write_lines(
        path,
        [
            {
                "input_ids": text,
                "attention_mask": [1] * len(text),
                "label": int(label),
                "domain": where,
            }
            for text, label, where in zip(texts, labels, domains, strict=True)
        ],
    )


def write_windows(root: Path, domains: int = 2, n: int = 12) -> None:
    """A folder for each domain with inputs [n, channels, 8] and labels [n]."""
    for number in range(domains):
        random, folder = np.random.default_rng(number), root / str(number + 1)
        folder.mkdir(parents=True)
        np.save(folder / "inputs.npy", random.normal(size=(n, CHANNELS, 8)).astype(np.float32))
        np.save(folder / "labels.npy", random.integers(0, CLASSES, n))
