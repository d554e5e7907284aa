"""`driftfilter bench` on every kind of data: what it measures, against the files read by hand, and
what it says of data and models that do not fit.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

import small_models
from driftfilter.app.bench.options import BenchOptions
from driftfilter.app.bench.prepare import prepare
from driftfilter.app.cli import main
from driftfilter.app.corruptions import CORRUPTIONS, EXTRA
from small_data import (
    WNIDS,
    make_table,
    make_tokens,
    save_classes,
    save_corruptions,
    save_picture,
    write_csv,
    write_lines,
    write_table,
    write_tokens,
    write_windows,
)

PICTURES = "small_models:pictures"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def bench(*options: str) -> list[dict[str, Any]]:
    """The documents of a run of the bench that ends well."""
    assert main(["bench", "--quiet", "--device", "cpu", "--out", "out", *options]) == 0
    return [json.loads(path.read_text()) for path in sorted(Path("out").glob("*.json"))]


def accuracies(document: dict[str, Any]) -> dict[str, float]:
    return {row["corruption"]: row["accuracy"] for row in document["result"]["domains"]}


def judge(logits: Tensor, labels: NDArray[np.int64]) -> float:
    """Accuracy, by hand."""
    return float((logits.argmax(-1).numpy() == labels).mean())


def read(paths: list[Path]) -> Tensor:
    """Pictures as a model takes them, by hand."""
    rows = [np.asarray(Image.open(path).convert("RGB")) for path in paths]
    return torch.from_numpy(np.stack(rows)).permute(0, 3, 1, 2).float() / 255


@torch.no_grad()
def expect(model: nn.Module, root: Path, domains: list[str]) -> dict[str, float]:
    """Accuracy on domains of class folders, by hand."""
    found = {}
    for name in domains:
        paths = sorted((root / name).rglob("*.JPEG"))
        classes = sorted({path.parent.name for path in paths})
        labels = np.array([classes.index(path.parent.name) for path in paths])
        found[name] = judge(model(read(paths)), labels)
    return found


def test_folders_of_corruptions() -> None:
    """ImageNet-C, two presets; what the frozen network gets is counted by hand."""
    save_corruptions(Path("c/noise"), ("gaussian_noise", "shot_noise"), (1, 5), count=4)
    first, second = bench(
        *("--data", "c", "--models", "small_models:pictures", "--presets", "source,tent"),
        *("--corruptions", "gaussian_noise,shot_noise", "--batch", "6"),
    )
    names = ["gaussian_noise", "shot_noise"]
    expected = expect(small_models.pictures(), Path("c/noise"), [f"{name}/5" for name in names])
    assert accuracies(first) == pytest.approx({name: expected[f"{name}/5"] for name in names})
    assert (first["settings"]["data"]["kind"], first["settings"]["outputs"]) == ("folders", "all")
    assert [row["n"] for row in second["result"]["domains"]] == [12, 12]


def test_folders_of_the_four_for_tuning_alone() -> None:
    """ImageNet-C's extra.tar: nothing has to be named."""
    save_corruptions(Path("c"), tuple(EXTRA), count=1)
    made, _ = prepare(BenchOptions(data="c", models=PICTURES, device="cpu"))
    assert set(made.stream.corruptions) == {*EXTRA}


def test_folders_of_domains_whose_name_has_a_space() -> None:
    """Office-Home, adapted one after the other."""
    for seed, name in enumerate(("Art", "Real World")):
        save_classes(Path("home") / name, seed, ("Bed", "Pen", "Sink"), count=3 + seed)
    (document,) = bench(
        *("--data", "home", "--models", "small_models:pictures", "--presets", "source"),
        *("--corruptions", "Real World, Art", "--protocols", "continual", "--batch", "5"),
    )
    expected = expect(small_models.pictures(), Path("home"), ["Real World", "Art"])
    assert accuracies(document) == pytest.approx(expected)
    assert [row["n"] for row in document["result"]["domains"]] == [12, 9]


def test_some_of_a_models_classes() -> None:
    """ImageNet-R: 3 of 6 classes; the logits of the other 3 do not compete."""
    save_classes(Path("r"), 0, count=6)
    names = ["n9", WNIDS[2], "n8", WNIDS[0], "n7", WNIDS[1]]
    Path("wnids.txt").write_text("\n".join(names))
    named = ("--data", "r", "--models", "small_models:six_classes", "--classes", "wnids.txt")
    options = (*named, "--protocols", "clean", "--presets", "source,tent", "--batch", "9")
    paths = sorted(Path("r").rglob("*.JPEG"))
    labels = np.array([names.index(path.parent.name) for path in paths])
    with torch.no_grad():
        logits = small_models.six_classes()(read(paths))
    every = bench(*options)
    assert accuracies(every[0])["clean"] == pytest.approx(judge(logits, labels))
    kept = [1, 3, 5]
    among = np.array(kept)[logits[:, kept].argmax(-1).numpy()]
    assert not np.array_equal(among, logits.argmax(-1).numpy())  # or the test would show nothing
    documents = [each for each in bench(*options, "--subset") if each not in every]
    source, tent = sorted(documents, key=lambda each: str(each["settings"]["preset"]))
    assert accuracies(source)["clean"] == pytest.approx(float((among == labels).mean()))
    assert source["settings"]["outputs"] == "3 of 6: [1, 3, 5]"
    assert len(source["result"]["bins"]["confidence"]) > 0
    assert tent["result"]["domains"][0]["n"] == 18


def test_a_table_in_the_order_of_time() -> None:
    write_table(Path("t.csv"))
    values, labels, domains = make_table()
    (document,) = bench(
        *("--data", "t.csv", "--models", "small_models:table", "--presets", "source"),
        *("--protocols", "continual", "--batch", "3"),
    )
    with torch.no_grad():
        logits = small_models.table()(torch.from_numpy(values))
    for number in range(3):
        here = np.array([each == f"plant{number}" for each in domains])
        expected = judge(logits[here], labels[here])
        assert accuracies(document)[f"plant{number}"] == pytest.approx(expected)
    assert document["settings"]["data"]["read"] == "label=label,domain=domain"


def test_a_file_of_texts_as_tokens() -> None:
    """Arrays by the names of the model's inputs, from lines of JSON, mixed over domains."""
    write_tokens(Path("t.jsonl"))
    texts, labels, domains = make_tokens()
    options = ("--data", "t.jsonl", "--models", "small_models:tokens", "--presets", "source,tent")
    source, tent = bench(*options, "--protocols", "mixed", "--batch", "5")
    model = small_models.tokens()
    with torch.no_grad():
        logits = torch.cat(
            [model(torch.tensor([text]), torch.ones(1, len(text))) for text in texts]
        )
    for name in ("books", "kitchen"):
        here = np.array([each == name for each in domains])
        assert accuracies(source)[name] == pytest.approx(judge(logits[here], labels[here]))
    assert tent["result"]["pooled"]["n"] == 24


def make_transformers() -> Any:
    """A stand-in for the package: words are numbered by their length."""

    class Labelled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = small_models.tokens()

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
            return SimpleNamespace(logits=self.own(input_ids, attention_mask))

    def encode(texts: list[str], **options: Any) -> dict[str, NDArray[np.int64]]:
        assert options["padding"]
        rows = [[len(word) for word in text.split()] for text in texts]
        longest = max(map(len, rows))
        return {
            "input_ids": np.array([[*row, *[0] * (longest - len(row))] for row in rows]),
            "attention_mask": np.array(
                [[1] * len(row) + [0] * (longest - len(row)) for row in rows]
            ),
        }

    encode.model_max_length = 512  # type: ignore[attr-defined]
    report: dict[str, list[str]] = {"missing_keys": [], "mismatched_keys": []}
    model = SimpleNamespace(from_pretrained=lambda *_, **__: (Labelled(), report))
    tokenizer = SimpleNamespace(from_pretrained=lambda *_, **__: encode)
    return SimpleNamespace(AutoModelForSequenceClassification=model, AutoTokenizer=tokenizer)


def test_a_file_of_texts_for_a_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of all lengths in one batch, over two domains."""
    monkeypatch.setitem(sys.modules, "transformers", make_transformers())
    Path("minilm").mkdir()
    Path("minilm/config.json").write_text(
        '{"architectures": ["BertForSequenceClassification"], "max_position_embeddings": 8}'
    )
    for name in ("model.safetensors", "tokenizer.json"):
        Path("minilm", name).write_bytes(b"{}")
    tokens, labels, domains = make_tokens()
    rows = [
        {"text": " ".join("x" * each for each in row), "label": int(label), "domain": where}
        for row, label, where in zip(tokens, labels, domains, strict=True)
    ]
    write_lines(Path("t.jsonl"), rows)
    (document,) = bench(
        *("--data", "t.jsonl", "--models", "hf:minilm", "--presets", "source"),
        *("--corruptions", "kitchen", "--batch", "5"),
    )
    model, here = small_models.tokens(), [i for i, each in enumerate(domains) if each == "kitchen"]
    with torch.no_grad():
        logits = torch.cat(
            [model(torch.tensor([tokens[i]]), torch.ones(1, len(tokens[i]))) for i in here]
        )
    assert accuracies(document) == {"kitchen": pytest.approx(judge(logits, labels[here]))}
    assert document["settings"]["transform"] == "texts by its own tokenizer"


def test_windows_of_sensors() -> None:
    write_windows(Path("w"))
    first, second = bench(
        *("--data", "w", "--models", "small_models:windows", "--presets", "source,driftfilter"),
        *("--batch", "4"),
    )
    source, other = sorted((first, second), key=lambda each: each["settings"]["preset"] != "source")
    for name in ("1", "2"):
        inputs, labels = (np.load(f"w/{name}/{part}.npy") for part in ("inputs", "labels"))
        with torch.no_grad():
            expected = judge(small_models.windows()(torch.from_numpy(inputs)), labels)
        assert accuracies(source)[name] == pytest.approx(expected)
    assert [row["n"] for row in other["result"]["domains"]] == [12, 12]


# What does not fit


def save_domains(root: str = "d") -> None:
    for seed, name in enumerate(("photo", "sketch")):
        save_classes(Path(root) / name, seed)


def cut(path: Path, at: int) -> None:
    path.write_bytes(path.read_bytes()[:at])


def of_a_table(text: str) -> Callable[[], None]:
    def make() -> None:
        Path("d.csv").write_text(text)

    return make


def save_all_but_frost() -> None:
    save_corruptions(Path("d"), [name for name in CORRUPTIONS if name != "frost"], count=1, size=8)


def save_unlike() -> None:
    save_domains()
    save_picture(Path("d/photo") / WNIDS[0] / "0.JPEG", 0, (20, 30))


def save_broken_header() -> None:
    save_domains()
    (Path("d/photo") / WNIDS[0] / "0.JPEG").write_bytes(b"no picture")


def save_two_names() -> None:
    save_domains()
    Path("c.txt").write_text("n1\nn2")


def save_empty_class() -> None:
    save_classes(Path("d/art"), 1)
    (Path("d") / "photo" / "cat").mkdir(parents=True)


def save_short_labels() -> None:
    write_windows(Path("d"))
    np.save("d/2/labels.npy", np.zeros(5, int))


def save_source() -> None:
    save_domains()
    np.savez("s.npz", images=np.full((2, 32, 32, 3), 9, np.uint8), labels=np.arange(2))


def save_parquet() -> None:
    Path("d.parquet").write_bytes(b"PAR1")


def save_lines(**row: Any) -> Callable[[], None]:
    return lambda: write_lines(Path("d.jsonl"), [row])


# How data are made, the options, and what is said.
UNFIT: dict[str, tuple[Callable[[], None], str, str]] = {
    "no corruption of that name": (
        lambda: save_corruptions(Path("d"), ("fog",)),
        f"--data d --corruptions fog,frost --models {PICTURES}",
        "shift must be one of fog in d (did you mean 'fog'?), got 'frost'",
    ),
    "a missing corruption": (
        save_all_but_frost,
        f"--data d --models {PICTURES}",
        "corruptions of d must be the 15, or named: --corruptions brightness,contrast,",
    ),
    "a missing severity": (
        lambda: save_corruptions(Path("d"), ("fog",), (3,)),
        f"--data d --corruptions fog --models {PICTURES}",
        "severity must be one of 3 for 'fog' in d, got 5",
    ),
    "a severity that the protocol needs": (
        lambda: save_corruptions(Path("d"), ("fog",), (5,)),
        f"--data d --corruptions fog --protocols gradual --models {PICTURES}",
        "severity must be one of 5 for 'fog' in d, got 1",
    ),
    "more classes by name than the model has": (
        lambda: save_classes(Path("d/photo"), 0, "abcde"),
        f"--data d --models {PICTURES}",
        "labels of data d must be below 3, the classes of model 'small_models:pictures', got 'up "
        "to 4'",
    ),
    "fewer classes by name": (
        save_domains,
        "--data d --models small_models:ten_classes",
        "which have names but no numbers, must be as many as the 10 of model",
    ),
    "labels beyond the model": (
        of_a_table("a,b,c,d,label\n1,2,3,4,7\n1,2,3,4,0\n"),
        "--data d.csv --models small_models:table",
        "labels of data d.csv must be below 3",
    ),
    "a class without a number": (
        save_two_names,
        f"--data d --classes c.txt --models {PICTURES}",
        "class of d must be one of the 2 of --classes",
    ),
    "a corrupt picture": (
        save_broken_header,
        f"--data d --models {PICTURES}",
        "0.JPEG must be a picture that can be read",
    ),
    "pictures of unlike sizes": (
        save_unlike,
        f"--data d --models {PICTURES}",
        "pixels, as d/photo/n01443537/0.JPEG is",
    ),
    "an empty folder": (
        lambda: Path("d").mkdir(),
        f"--data d --models {PICTURES}",
        "d must be a folder of <corruption>.npy (CIFAR-10-C)",
    ),
    "an empty class": (
        save_empty_class,
        f"--data d --models {PICTURES}",
        "cat must be a class folder of pictures",
    ),
    "ragged rows": (
        of_a_table("a,b,c,d,label\n1,2,3,4,0\n1,2\n"),
        "--data d.csv --models small_models:table",
        "got 2 cells in line 3 under 5 columns",
    ),
    "text among numbers": (
        of_a_table("a,b,c,d,label\n1,2,high,4,0\n"),
        "--data d.csv --models small_models:table",
        "column 'c' must hold finite numbers, got 'high' in row 2",
    ),
    "no label": (
        of_a_table("a,b,c,d,class\n1,2,3,4,0\n"),
        "--data d.csv --models small_models:table",
        "(--columns label=COLUMN)",
    ),
    "a column too many": (
        of_a_table("a,b,c,d,e,label\n1,2,3,4,5,0\n"),
        "--data d.csv --models small_models:table",
        "model 'small_models:table' must take the samples of the data (torch.float32 [1, 5]), got "
        "RuntimeError",
    ),
    "Parquet that cannot be read": (
        save_parquet,
        "--data d.parquet --models small_models:table",
        "arquet",
    ),
    "other names than the model's inputs": (
        save_lines(words=[1, 2], label=0),
        "--data d.jsonl --models small_models:tokens",
        "got TypeError",
    ),
    "texts without a tokenizer": (
        save_lines(text="good", label=0),
        "--data d.jsonl --models small_models:tokens",
        "a model with a tokenizer: hf:FOLDER",
    ),
    "labels that do not fit": (
        save_short_labels,
        "--data d --models small_models:windows",
        "labels must be 12 integer labels",
    ),
    "windows for a model of pictures": (
        lambda: write_windows(Path("d")),
        f"--data d --models {PICTURES}",
        "must take the samples of the data (torch.float32 [2, 2, 8])",
    ),
    "classes instead of logits": (
        save_domains,
        "--data d --models small_models:flat",
        "output of model 'small_models:flat' for 2 samples must be logits [2, classes], got [2]",
    ),
    "logits by class": (
        save_domains,
        "--data d --models small_models:transposed",
        "must be logits [2, classes], got [3, 2]",
    ),
    "logits of all samples together": (
        save_domains,
        "--data d --models small_models:averaged",
        "must be logits [2, classes], got [1, 3]",
    ),
    "logits that are no numbers": (
        save_domains,
        "--data d --models small_models:unknown",
        "for 2 samples must be finite, got 'NaN or infinity'",
    ),
    "outputs by name": (
        save_domains,
        "--data d --models small_models:named",
        "must be logits [2, classes], got 'dict'",
    ),
    "a subset of labelled sources": (
        save_source,
        f"--data d --subset --source s.npz --models {PICTURES}",
        "subset must be left out if the source has labels",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_what_does_not_fit_is_one_line(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    make, options, message = UNFIT[case]
    make()
    status = main(["bench", "--presets", "source,tent", "--device", "cpu", *options.split()])
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert message in err
    assert err.startswith("driftfilter bench: error: ")
    assert len(err.splitlines()) == 1
    assert not Path("runs").exists()


def test_a_picture_that_is_cut_short_ends_its_task_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its header is whole: nobody knows before it is read. Nothing is written but what happened."""
    save_domains()
    cut(Path("d/sketch") / WNIDS[2] / "1.JPEG", 1000)
    options = ("--data", "d", "--models", PICTURES, "--presets", "source", "--device", "cpu")
    assert main(["bench", "--out", "out", "--quiet", *options]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "1.JPEG must be a whole picture" in line
    assert len(list(Path("out").glob("source_*.failed.txt"))) == 1
    assert not list(Path("out").glob("*.json"))
    assert main(["bench", "--out", "out", "--quiet", *options, "--corruptions", "photo"]) == 0


def test_a_model_that_fails_later_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers that overflow in the second batch."""
    rows = [[1, 2, 3, 4, 0]] * 4 + [[3e38, 3e38, 3e38, 3e38, 1]] * 4
    write_csv(Path("t.csv"), "a,b,c,d,label", rows)
    options = ("--data", "t.csv", "--models", "small_models:table", "--presets", "tent")
    assert main(["bench", "--quiet", "--batch", "4", "--device", "cpu", *options]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("failed: tent: ")
    assert "finite" in line
    assert not list(Path("runs/bench").glob("*.json"))
