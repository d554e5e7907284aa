"""The search that decided the memory of domains (``Domains``).

    python benchmarks/search_domains.py signatures --clean CIFAR10_TEST.npz
    python benchmarks/search_domains.py streams --models resnet20=WEIGHTS --clean CIFAR10_TEST.npz \
        [--near 0 .3 100] [--images 100] [--json FILE]

Nothing here sees the fifteen corruptions that are reported: domains are clean images and speckle
noise, Gaussian blur, saturation and spatter at severities 3 and 5.

signatures: how far samples are from a domain by ``Domains``' own rule: others of it, those of one
class, and those of other domains (``limit`` lies between); and the smallest kurtosis of one domain
and of several mixed, 24 samples a dimension (``kurtosis`` lies between). streams: accuracy if
domains return (two rounds of visits) and if severities come and go (1, 2, …, 5, …, 1), by
``near``; "forgetful" is without a memory.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.app.corruptions import EXTRA, corrupt
from driftfilter.app.streams import open_cifar10
from driftfilter.model.appearance import describe
from driftfilter.model.clusters import distance, find_clusters, find_moments, regularize
from figures import write
from search_default import Row, open_models

KNOWN, NEW = 400, 200  # samples of a domain that is known, and of those that are held to it
MIXED = (("clean", "gaussian_blur 5"), ("clean", "saturate 5"), ("clean", "speckle_noise 3"))


def open_domains(images: Tensor, severities: tuple[int, ...]) -> dict[str, Tensor]:
    pairs = itertools.product(EXTRA, severities)
    found = {f"{name} {each}": corrupt(images, name, each, seed=0) for name, each in pairs}
    return {"clean": images, **found}


def sign(images: Tensor) -> Tensor:
    signatures = describe(images)
    assert signatures is not None
    return signatures


def hold(samples: Tensor, domain: Tensor) -> float:
    """How far samples [n, D] are from a domain's [N, D]."""
    mean, covariance = find_moments(domain)
    count = torch.tensor(float(len(domain)), dtype=torch.float64)
    return round(distance(find_moments(samples), (mean, regularize(covariance, count))), 3)


def search_signatures(arguments: argparse.Namespace) -> list[Row]:
    data = open_cifar10(arguments.clean)
    images, labels = data.images[:2000], data.labels[:2000]
    signed = {name: sign(part) for name, part in open_domains(images, (3, 5)).items()}
    later = labels[KNOWN:]
    rows: list[Row] = []
    for name, own in signed.items():
        rest, domain = own[KNOWN:], own[:KNOWN]
        classes = [hold(rest[later == label][:NEW], domain) for label in labels.unique()]
        others = {other: hold(each[KNOWN:][:NEW], domain) for other, each in signed.items()}
        row: Row = {"domain": name, "itself": others.pop(name), "classes": max(classes)}
        rows.append({**row, "others": others})
    sets = [(name,) for name in signed] + [*MIXED, tuple(signed)]
    for names in sets:
        pool = torch.cat([signed[name] for name in names])
        order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(0))
        kurtosis = find_clusters(pool[order[: 24 * pool.shape[1]]])[0]
        rows.append({"mixed": " + ".join(names), "kurtosis": round(kurtosis, 3)})
    for row in rows:
        print(row, flush=True)
    return rows


def follow(model: nn.Module, rule: df.Domains | None, stream: list[Tensor], labels: Any) -> float:
    adapter = df.adapt(model, domains=rule)
    pairs = zip(stream, labels, strict=True)
    right = [(adapter(batch).argmax(-1) == own).double().mean() for batch, own in pairs]
    return round(float(torch.stack(right).mean()), 4)


def search_streams(arguments: argparse.Namespace) -> list[Row]:
    data, size = open_cifar10(arguments.clean), arguments.images
    images, labels = data.images[: 10 * size], data.labels[: 10 * size].split(size)
    domains = open_domains(images, (1, 2, 3, 4, 5))
    stages = [*range(1, 6), *range(4, 0, -1)]
    gradual = [(f"{name} {each}", at) for name in EXTRA for at, each in enumerate(stages)]
    chosen = [name for name in domains if name[-1] in "n35"]
    returning = [(name, at) for at in range(2) for name in chosen]
    rules: dict[str, df.Domains | None] = {"forgetful": None}
    rules |= {f"near {near:g}": df.Domains(near=near) for near in arguments.near}
    rows: list[Row] = []
    for (network, model), (name, rule) in itertools.product(open_models(arguments), rules.items()):
        row: Row = {"network": network, "rule": name}
        for protocol, visits in {"gradual": gradual, "returning": returning}.items():
            stream = [domains[domain].split(size)[at] for domain, at in visits]
            row[protocol] = follow(model, rule, stream, [labels[at] for _, at in visits])
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["signatures", "streams"])
    parser.add_argument("--clean", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=["resnet20"])
    parser.add_argument("--near", type=float, nargs="+", default=[0.0, 0.3, 100.0])
    parser.add_argument("--images", type=int, default=100, help="a visit, one batch")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    search = search_signatures if arguments.what == "signatures" else search_streams
    write(arguments.json, {"rows": search(arguments)}, "numpy")


if __name__ == "__main__":
    main()
