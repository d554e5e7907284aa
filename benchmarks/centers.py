"""Class centres with a source-centred prior on frozen features, mixed in by predictive gain, beside
the frozen network and `center`. It lost, and is no preset: this is how that was measured.

    python benchmarks/centers.py --clean CIFAR10_TEST.npz --weights FOLDER [--json FILE]

The mean feature of class k is μ_k ~ N(c_k, Σ / κ₀), κ₀ = 3, Σ = I / κ. Centres c_k and weights a_k
are those whose logits a_k - κ/2 |z - c_k|² are the head's up to a constant (`Prototypes`); 1 / κ is
the variance of the first 200 features about their predicted class, over ``fraction``. A sample
counts with its responsibilities r, and fades over 2,000 samples:

    μ_k given data ~ N(m_k, Σ / κ_k),   κ_k = κ₀ + Σ r_k,   m_k = (κ₀ c_k + Σ r_k z) / κ_k

With s the softmax of the network, q that of the centres at their means m_k, and q̄ that of the
posterior predictive N(m_k, Σ (1 + 1 / κ_k)), the prediction is p ∝ s^(1-λ) q^λ, λ in [0, 1] the
maximum of λ G - log Z(λ), G = KL(q̄ ‖ s) - KL(q̄ ‖ q), Z its constant: the expected gain in log
score over s if labels came from q̄. "On offsets": s is `center`'s prediction. That κ and the place
of the centres are taken from the first 200 features favours centres in batches of one. Streams are
the four corruptions that are not reported, severity 5, shuffled and with labels in runs of 40.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.app import corruptions, models, streams
from driftfilter.app.metrics import Quality, quality
from driftfilter.networks.features import Backbone, find_head
from driftfilter.networks.prototypes import PrototypeHead, Prototypes
from figures import write

METRICS = ("accuracy", "ece")
COUNT, WINDOW, FIRST, RUN = 3.0, 2000, 200, 40  # κ₀, samples, samples, labels of a class in a run


class Rule(NamedTuple):
    on_offsets: bool
    fraction: float
    shares: str  # responsibilities: of the "network" or of the "centers"


RULES = {
    "centers": Rule(False, 1.0, "network"),
    "centers, own shares": Rule(False, 1.0, "centers"),
    "centers, fraction .1": Rule(False, 0.1, "network"),
    "centers on offsets, fraction .1": Rule(True, 0.1, "network"),
}


def mix(network: Tensor, plugged: Tensor, predictive: Tensor) -> Tensor:
    """log p [n, k] of log s, log q and log q̄, λ by bisection: the objective is concave."""
    gain = (predictive.exp() * (plugged - network)).sum(1, keepdim=True)
    low, high = torch.zeros_like(gain), torch.ones_like(gain)
    for _ in range(40):
        share = (low + high) / 2
        mixed = torch.lerp(network, plugged, share).softmax(1)
        rises = gain > (mixed * (plugged - network)).sum(1, keepdim=True)
        low, high = torch.where(rises, share, low), torch.where(rises, high, share)
    return torch.lerp(network, plugged, low).log_softmax(1)


def follow(backbone: Backbone, features: Tensor, network: Tensor, size: int, rule: Rule) -> Tensor:
    """log p [n, k] of a stream of features, log s given, in batches of a size."""
    first, shares = features[:FIRST], network[:FIRST].exp()
    means = shares.mT @ first / shares.sum(0).unsqueeze(1).clamp_min(1e-6)
    kappa = rule.fraction / (first - means[shares.argmax(1)]).square().mean().item()
    model, theta = Prototypes("gaussian", kappa, intercept=True).build(backbone, first.mean(0))
    head = model.model
    assert isinstance(head, PrototypeHead)
    weights, start = head.split(theta.double())
    scale, width = kappa**0.5, features.shape[1]
    rows, start = scale * (features - first.mean(0)), scale * start
    counts, sums, found = torch.zeros_like(weights), torch.zeros_like(start), []

    def classify(batch: Tensor) -> tuple[Tensor, Tensor]:
        """log q and log q̄."""
        total = COUNT + counts
        distances = torch.cdist(batch, (COUNT * start + sums) / total.unsqueeze(1)).square()
        spread = 1 + 1 / total
        known = rule.fraction * width / 2 * spread.log()
        plugged = (weights - distances / 2).log_softmax(1)
        return plugged, (weights - distances / (2 * spread) - known).log_softmax(1)

    for batch, own in zip(rows.split(size), network.split(size), strict=True):
        share = (own if rule.shares == "network" else classify(batch)[1]).exp()
        fading = max(0.0, 1 - len(batch) / WINDOW)
        counts, sums = fading * counts + share.sum(0), fading * sums + share.mT @ batch
        found.append(mix(own, *classify(batch)))
    return torch.cat(found)


def order(labels: Tensor, in_runs: bool) -> Tensor:
    """The samples as they are, or in runs of one label."""
    if not in_runs:
        return torch.arange(len(labels))
    pieces = [piece for k in range(10) for piece in (labels == k).nonzero()[:, 0].split(RUN)]
    drawn = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))
    return torch.cat([pieces[int(place)] for place in drawn])


def centred(backbone: Backbone, features: Tensor, size: int) -> Tensor:
    """log s of `center`."""
    head = nn.utils.skip_init(nn.Linear, *reversed(backbone.weight.shape), dtype=torch.float64)
    assert backbone.bias is not None
    with torch.no_grad():
        head.weight.copy_(backbone.weight)
        head.bias.copy_(backbone.bias)
    adapter = df.adapt(head, "center", monitor=None)
    return torch.cat([adapter(batch) for batch in features.split(size)])


@torch.no_grad()
def measure(source: nn.Module, clean: streams.Images) -> list[dict[str, object]]:
    backbone = Backbone(source, find_head(source, clean.images[:2]))
    domains = {
        name: torch.cat([backbone(batch) for batch in images.split(200)]).double()
        for name in corruptions.EXTRA
        for images in [corruptions.corrupt(clean.images, name, 5)]
    }
    found: list[dict[str, object]] = []
    for in_runs in (False, True):
        places = order(clean.labels, in_runs)
        for size in (200, 1):
            scores: dict[str, list[Quality]] = {}
            for features in domains.values():
                rows, labels = features[places], clean.labels[places]
                bias = 0.0 if backbone.bias is None else backbone.bias.double()
                frozen = (rows @ backbone.weight.double().mT + bias).log_softmax(1)
                offsets = centred(backbone, rows, size)
                predicted = {"source": frozen, "center": offsets}
                for name, rule in RULES.items():
                    base = offsets if rule.on_offsets else frozen
                    predicted[name] = follow(backbone, rows, base, size, rule)
                for name, each in predicted.items():
                    scores.setdefault(name, []).append(quality(each.float(), labels))
            for name, values in scores.items():
                accuracy, ece = (fmean(getattr(each, of) for each in values) for of in METRICS)
                line = {"runs": in_runs, "batch": size, "rule": name}
                found.append({**line, "accuracy": accuracy, "ece": ece})
                print(*line.values(), f"{accuracy:.3f} {ece:.3f}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clean", type=Path, required=True, help="CIFAR-10's test images")
    parser.add_argument("--weights", type=Path, required=True, help="folder of weights")
    parser.add_argument("--models", default="vit_s4,wrn16_4_gn,resnet20")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    known = streams.open_cifar10(arguments.clean)
    clean = streams.Images(known.images[: arguments.images], known.labels[: arguments.images])
    figures = {}
    for name in arguments.models.split(","):
        print(name)
        source = models.load(name, arguments.weights / f"{name}.safetensors").eval()
        figures[name] = measure(source, clean)
    write(arguments.json, figures)


if __name__ == "__main__":
    main()
