"""Ways to change a file: its bytes, or what stands in it, as a format has it."""

import copy
import io
import json
import random
import re
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy
from safetensors.torch import load as read_tensors
from torch import Tensor

from crafting import CHANGES, header_of, reseal, resum

Rng = random.Random

ODD: list[Any] = [None, True, -1, 0, 2**70, 1e308, "", "x", "\ufeff", [], [[]], {}, {"a": {}}, "1"]


def mutate_sealed(data: bytes, rng: Rng) -> bytes:
    """Other tensors or another header, mostly under a checksum that is right."""
    way = rng.randrange(8)
    if way == 0:
        return mutate_bytes(data, rng)
    if way == 1:  # the bytes of the header, and a checksum that is right
        length = 8 + int.from_bytes(data[:8], "little")
        return resum(mutate_bytes(data[8:length], rng), data[length:])
    if way == 2:
        return reseal(data, **mutate_header(header_of(data), rng))
    tensors = read_tensors(data)
    name = rng.choice(sorted(tensors))
    return reseal(data, mutate_tensor(name, tensors, rng))


def mutate_header(header: dict[str, Any], rng: Rng) -> dict[str, Any]:
    return {
        key: value for key, value in mutate_data(header, rng).items() if key not in ("sha256",)
    } or {"format": rng.choice(ODD)}


def mutate_tensor(name: str, tensors: Mapping[str, Tensor], rng: Rng) -> dict[str, Tensor | None]:
    value, way = tensors[name], rng.randrange(6)
    if way == 0:
        return {name: None}
    if way == 1:
        return {name: None, f"{name}x": value}
    if way == 2:  # another one's
        return {name: tensors[rng.choice(sorted(tensors))]}
    if way == 3 and value.numel():
        raw = bytearray(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for _ in range(rng.randint(1, 4)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        other = torch.frombuffer(raw, dtype=torch.uint8).clone().view(value.dtype)
        return {name: other.reshape(value.shape)}
    if way == 4 and value.numel() and value.dtype not in (torch.uint8, torch.bool):
        numbers = [0, -1, 1e-30, 1e10, 1e18] if value.is_floating_point() else [-1, 7, 2**40]
        other = value.clone()
        other.view(-1)[rng.randrange(value.numel())] = rng.choice(numbers)
        return {name: other}
    return {name: CHANGES[rng.choice(sorted(CHANGES))](value)}


# Any bytes, and any JSON data


def mutate_bytes(data: bytes, rng: Rng) -> bytes:
    """Bits changed, pieces removed, repeated or put in."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 4])):
        place, length = rng.randrange(len(changed) + 1), rng.choice([1, 2, 8, 60])
        way = rng.randrange(6)
        if way == 0 and place < len(changed):
            changed[place] ^= 1 << rng.randrange(8)
        elif way == 1:
            del changed[place:]
        elif way == 2:
            del changed[place : place + length]
        elif way == 3:
            changed[place:place] = changed[place : place + length]
        elif way == 4:
            changed[place:place] = rng.randbytes(length)
        else:
            changed[place:place] = rng.choice(
                [b"\xef\xbb\xbf", b"[" * 3000, b"{}", b"1e999", b"null", b"-", b'"', b"\0", b"NaN"]
            )
    return bytes(changed)


def mutate_data(data: Any, rng: Rng) -> Any:
    """JSON data with something else at one place."""
    places = list(walk(data))
    if not places:
        return rng.choice(ODD)
    path = rng.choice(places)
    other = copy.deepcopy(data)
    part = other
    for key in path[:-1]:
        part = part[key]
    way = rng.randrange(4)
    if way == 0:
        del part[path[-1]]
    elif way == 1 and isinstance(part[path[-1]], (int, float)):
        part[path[-1]] = str(part[path[-1]])
    elif way == 2:
        part[path[-1]] = [part[path[-1]]]
    else:
        part[path[-1]] = rng.choice(ODD)
    return other


def walk(data: Any, path: tuple[Any, ...] = ()) -> Iterable[tuple[Any, ...]]:
    """The paths of all parts of JSON data."""
    keys = data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    for key in keys:
        yield (*path, key)
        yield from walk(data[key], (*path, key))


# Arrays and archives


def arrays() -> list[bytes]:
    found = []
    for array in (
        np.arange(24, dtype=np.float32).reshape(6, 4),
        np.asfortranarray(np.arange(24.0).reshape(4, 6)),
        np.arange(96, dtype=np.uint8).reshape(2, 4, 4, 3),
        np.arange(7),
    ):
        file = io.BytesIO()
        np.save(file, array)
        found.append(file.getvalue())
    return found


KINDS = "<f8 >f4 <i8 |b1 |u1 |O |V3 |V0 <U5 <U0 |S2 <M8[s] <m8[ns] <c8 <f2 <f16 q X"
SIZES = (0, 1, 3, 6, 24, -1, -6, 2**31, 2**62, 2**70)


def mutate_array(data: bytes, rng: Rng) -> bytes:
    """Another header, or other bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(data, rng)
    length = 10 + int.from_bytes(data[8:10], "little")
    shape, fortran, dtype = npy.read_array_header_1_0(io.BytesIO(data[8:]))
    header: dict[str, Any] = {"descr": dtype.str, "fortran_order": fortran, "shape": shape}
    other = {
        "descr": rng.choice(KINDS.split(" ")),
        "fortran_order": rng.choice([True, False, 1, None]),
        "shape": tuple(rng.choice(SIZES) for _ in range(rng.randrange(4))),
    }
    changed = rng.choice(sorted(header))
    text = repr({**header, changed: other[changed]})
    if rng.random() < 0.1:
        text = rng.choice(["(" * 500, "{}", "[1]", text[:-1], text.replace("'", "")])
    encoded = text.encode().ljust(length - 11) + b"\n"
    version = rng.choice([1, 1, 1, 2, 3, 9])
    size = len(encoded).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + size + encoded + data[length:]


def mutate_archive(data: bytes, rng: Rng) -> bytes:
    """Other bytes, or an archive of other members."""
    if rng.random() < 0.4:
        return mutate_bytes(data, rng)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    place, way = rng.randrange(len(members)), rng.randrange(6)
    name, held = members[place]
    if way == 0:
        members[place] = name, mutate_array(held, rng)
    elif way == 1:
        members[place] = rng.choice(["x", "x.npy/", "../x.npy", "labels.txt", "y.npy"]), held
    elif way == 2:
        members.append((name, held))
    elif way == 3:
        members[place] = name, mutate_bytes(held, rng)
    elif way == 4:
        members[place] = name, rng.choice(arrays())
    else:
        members = members[:place]
    file, kinds = io.BytesIO(), [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with zipfile.ZipFile(file, "w", rng.choice([*kinds, zipfile.ZIP_BZIP2])) as archive:
            for each in members:
                archive.writestr(*each)
    written = bytearray(file.getvalue())
    if rng.random() < 0.3:  # lies of the directory: sizes, flags, methods
        at = written.find(b"PK\x01\x02")
        if at >= 0:
            written[at + rng.choice([8, 10, 16, 20, 24, 42])] ^= 1 << rng.randrange(8)
    return bytes(written)


# Text


def mutate_text(data: bytes, rng: Rng) -> bytes:
    """Other values, or other bytes."""
    if rng.random() < 0.4:
        return mutate_bytes(data, rng)
    words = data.decode().split(" ")
    numbers = [place for place, word in enumerate(words) if re.fullmatch(r"-?\d[\d.e-]*,?", word)]
    if numbers and rng.random() < 0.5:  # another number, perhaps one that is allowed
        place = rng.choice(numbers)
        comma = "," if words[place].endswith(",") else ""
        words[place] = rng.choice(["0", "0.0", "0.5", "1", "2", "7.5", "-0.5", "1e300"]) + comma
        return " ".join(words).encode()
    place = rng.randrange(len(words))
    deep = rng.choice([30, 5000])
    nested = ["[" * deep + "]" * deep, "{ a = " * deep + "1" + " }" * deep, ".".join("a" * deep)]
    values = [
        "1e999",
        "-1",
        "nan",
        "true",
        '""',
        "[]",
        "1979-05-27",
        '"Recipe"',
        "0.5",
        "2",
        "1e-3",
    ]
    words[place] = rng.choice([*nested, *values, *values, "9" * 5000, words[-1]])
    return " ".join(words).encode()


def mutate_document(data: bytes, rng: Rng) -> bytes:
    name, _, text = data.partition(b"\n")
    if name.endswith(b".npz"):
        return name + b"\n" + mutate_archive(text, rng)
    if rng.random() < 0.3:
        return name + b"\n" + mutate_bytes(text, rng)
    if name.endswith(b".jsonl"):
        lines = text.splitlines()
        place = rng.randrange(len(lines))
        lines[place] = json.dumps(mutate_data(json.loads(lines[place]), rng)).encode()
        return name + b"\n" + b"\n".join(lines)
    return name + b"\n" + json.dumps(mutate_data(json.loads(text), rng)).encode()
