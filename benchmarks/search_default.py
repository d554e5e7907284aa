"""The search that decided the default for networks of every norm and batches of every size.

    python benchmarks/search_default.py recipes --models vit_s4=WEIGHTS wrn16_4_gn=WEIGHTS \
        --clean CIFAR10_TEST.npz [--norms other] [--batch 200] [--images 10000] \
        [--variance 1 2 4] [--taper 0 2] [--rho .97] [--radius 6] [--reach 1 4] \
        [--priors absolute relative all]
    python benchmarks/search_default.py offsets --models NAME=WEIGHTS … --clean CIFAR10_TEST.npz \
        [--images 4000] [--keep FOLDER]
    python benchmarks/search_default.py digits [--seeds 3] [--batches 64 16]
    python benchmarks/search_default.py mild [--seeds 3] [--batches 64 16]
    python benchmarks/search_default.py shift --models resnet20=WEIGHTS … --clean CIFAR10_TEST.npz \
        [--images 2000] [--batches 200 16] [--limits 0 .4 .45 .5] [--keeps 1 .5] \
        [--source CIFAR10_TRAIN.npz] [--measured .05 .1 .2] [--severities 1]

Nothing here sees the fifteen corruptions that are reported: networks for CIFAR-10 are tried on
clean images and on speckle noise, Gaussian blur, saturation and spatter at severity 5.

recipes: the default with every combination of the values given, the model reset for each
corruption; without batch norm by prior, too: a variance for all parameters, relative to the size of
each layer (the default), and that with the whole Fisher matrix ("all"). offsets: class offsets
taken off the logits of frozen networks, 300 images at a time, by
temperature, rounds and gate, with classes of equal shares and with shares that fall from 1 to 1/5.
A gate says how far offsets count: "diversity" by the classes predicted, "information" by the mutual
information that they gain, "a part" also by how much of the marginal entropy gained that is (as
Centering has it). --keep FOLDER keeps the logits, and reads those
that are there. digits: small networks of batch norm, group norm and none on scikit-learn's digits,
by reach and, without norms, by variance. shift: S of the source network (``Ema.shift``) on clean
images, mixed and sorted by class, and on the extra corruptions at severity 5 and others, and what
the default with each limit of it has there, and with what ``ForgetAtHome`` keeps; with --source the
same from 500 source images (``Ema.baseline``), and the limits --measured. mild: the same limits
with batch norm on digits that are changed slightly, or sorted by class.
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn

import driftfilter as df
from driftfilter.app import models
from driftfilter.app.corruptions import EXTRA, corrupt
from driftfilter.app.metrics import quality
from driftfilter.app.streams import open_cifar10
from driftfilter.model.centering import Centered
from driftfilter.model.predictive import lift
from driftfilter.networks.alignment import compare
from driftfilter.networks.batch_trust import SHIFT
from driftfilter.networks.shared_copy import twin
from figures import write

Row = dict[str, Any]
METRICS = ("accuracy", "nll", "ece")
KNOBS = {"variance": [3.0], "taper": [2.0], "rho": [0.97], "radius": [6.0], "reach": [1.0]}
DOMAINS = ("clean", *EXTRA)
PRIORS: dict[str, dict[str, Any]] = {  # of networks without batch norm, by name
    "absolute": {"structure": "diagonal", "relative": False},
    "relative": {"structure": "diagonal", "relative": True},
    "all": {"structure": "low_rank", "rank": 256, "relative": True},  # of the Fisher matrix
}
SPREAD, COUNT, BLOCK = 4.0, 30.0, 300  # of logits, of the prior in samples, images at a time


def follow(
    model: nn.Module,
    recipe: df.Recipe | None,
    inputs: Tensor,
    batch: int,
    source: Tensor | None = None,
) -> Tensor:
    """Log-probabilities of a stream; of the frozen network if there is no recipe."""
    if recipe is None:
        with torch.no_grad():
            return torch.cat([model(each) for each in inputs.split(batch)]).log_softmax(-1)
    adapter = df.adapt(model, recipe, data=source, monitor=None)
    return torch.cat([adapter(each) for each in inputs.split(batch)])


def judge(log_probabilities: Tensor, labels: Tensor) -> Row:
    found = quality(log_probabilities.float().cpu(), labels)
    return {name: round(getattr(found, name), 4) for name in METRICS}


def average(rows: list[Row]) -> Row:
    return {name: round(fmean(row[name] for row in rows), 4) for name in METRICS}


def show(title: str, cells: dict[str, Row]) -> None:
    texts = (
        f"{name} {c['accuracy']:.3f} {c['nll']:.3f} {c['ece']:.3f}" for name, c in cells.items()
    )
    print(f"{title:<52}", *texts, sep="  ", flush=True)


# Recipes


def open_domains(arguments: argparse.Namespace) -> tuple[dict[str, Tensor], Tensor]:
    """Clean images and the four extra corruptions of them, and labels."""
    data = open_cifar10(arguments.clean)
    images = data.images[: arguments.images].to(arguments.device)
    domains = {"clean": images} | {name: corrupt(images, name, 5, seed=0) for name in EXTRA}
    return domains, data.labels[: arguments.images]


def open_models(arguments: argparse.Namespace) -> Iterator[tuple[str, nn.Module]]:
    for given in arguments.models:
        name, _, weights = given.partition("=")
        yield name, models.load(name, Path(weights) if weights else None).to(arguments.device)


def search_recipes(arguments: argparse.Namespace) -> list[Row]:
    """Accuracy, NLL and ECE of each combination: clean, and the mean of the corruptions."""
    domains, labels = open_domains(arguments)
    grid = [
        dict(zip(KNOBS, values, strict=True))
        for values in itertools.product(*(getattr(arguments, knob) for knob in KNOBS))
    ]
    rows = []
    cases = [(None, None), *itertools.product(arguments.priors or [None], grid)]
    for (name, model), (prior, options) in itertools.product(open_models(arguments), cases):
        recipe = None
        if options is not None:
            recipe = df.presets.get("driftfilter", norms=arguments.norms, **options)
        if recipe is not None and prior is not None:
            assert isinstance(recipe.source, df.Gaussian)
            recipe = replace(recipe, source=replace(recipe.source, **PRIORS[prior]))
        found = {
            domain: judge(follow(model, recipe, images, arguments.batch), labels)
            for domain, images in domains.items()
        }
        cells = {"clean": found["clean"], "extra": average([found[each] for each in EXTRA])}
        rows.append({"network": name, "prior": prior, "options": options, **cells})
        show(
            f"{name} {prior or ''} " + (" ".join(f"{k} {v:g}" for k, v in (options or {}).items())),
            cells,
        )
    return rows


# Offsets


def predict_logits(arguments: argparse.Namespace) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Logits of each network by domain, up to what samples have in common, and labels."""
    for name, model in open_models(arguments):
        path = arguments.keep / f"{name}.safetensors" if arguments.keep else None
        if path is not None and path.exists():
            yield name, load_file(path)
            continue
        domains, labels = open_domains(arguments)
        found = {each: follow(model, None, domains[each], 200).cpu() for each in domains}
        found["labels"] = labels
        if path is not None:
            save_file(found, path)
        yield name, found


def find_offsets(logits: Tensor, temperature: float, rounds: int) -> Tensor:
    """δ ← δ + T log(k m), m the mean prediction at δ and T with COUNT samples of equal shares."""
    n, k = logits.shape
    offsets = torch.zeros(k)
    for _ in range(rounds):
        shares = ((logits - offsets) / temperature).softmax(-1).sum(0)
        offsets = offsets + temperature * ((shares + COUNT / k) / (n + COUNT) * k).log()
    return offsets


def gain_entropy(logits: Tensor, offsets: Tensor) -> float:
    """Marginal entropy H(mean p) without the offsets, less that with them."""
    after, before = (each.softmax(-1).mean(0) for each in (logits - offsets, logits))
    return float((torch.special.entr(after) - torch.special.entr(before)).sum())


def gain_information(logits: Tensor, offsets: Tensor) -> float:
    """Mutual information H(mean p) - mean H(p) without the offsets, less that with them."""
    after, before = (each.softmax(-1) for each in (logits - offsets, logits))
    own = torch.special.entr(after) - torch.special.entr(before)
    return gain_entropy(logits, offsets) - float(own.sum(-1).mean())


def gain_part(logits: Tensor, offsets: Tensor) -> float:
    """Mutual information gained as a part of the marginal entropy gained; less below .08 nats."""
    gained = gain_information(logits, offsets)
    much = min(1.0, max(0.0, (gained - 0.02) / 0.06))
    return much * gained / max(gain_entropy(logits, offsets), 1e-12)


def lack_diversity(logits: Tensor, offsets: Tensor) -> float:
    """One less the effective number of classes predicted, as a share of all."""
    n, k = logits.shape
    shares = (logits.softmax(-1).sum(0) + COUNT / k) / (n + COUNT)
    return 1 - float(torch.special.entr(shares).sum().exp()) / k


Gate = tuple[Callable[[Tensor, Tensor], float], float, float]  # 0 from the first number, 1 at both
GATES: dict[str, Gate] = {
    "none": (lambda logits, offsets: 1.0, 0.0, 1.0),
    "diversity .9 to .7": (lack_diversity, 0.1, 0.3),
    "diversity .95 to .85": (lack_diversity, 0.05, 0.15),
    "information .02 to .08": (gain_information, 0.02, 0.08),
    "a part of .35 to .5": (gain_part, 0.35, 0.5),
}


def take_off(logits: Tensor, temperature: float, rounds: int, gate: str) -> Tensor:
    offsets = find_offsets(logits, temperature, rounds)
    sign, little, much = GATES[gate]
    return logits - min(1.0, max(0.0, (sign(logits, offsets) - little) / (much - little))) * offsets


def center(logits: Tensor) -> Tensor:
    """The library's rule, from nothing known before."""
    model = Centered(lift(lambda theta, inputs: inputs + 0 * theta), df.Centering())
    return model.pullback(torch.zeros(1), logits)[0]


VARIANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "frozen": lambda logits: logits,
    **{
        f"T {temperature:g}, {rounds} rounds, gate {gate}": partial(
            take_off, temperature=temperature, rounds=rounds, gate=gate
        )
        for (temperature, rounds), gate in itertools.product(((3.0, 2), (2.0, 3), (1.0, 6)), GATES)
    },
    "Centering": center,
}


def draw(labels: Tensor) -> dict[str, Tensor]:
    """Indices of images, balanced and with shares of classes that fall from 1 to 1/5."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(labels), generator=generator)
    classes = [order[labels[order] == label] for label in range(10)]
    most = min(len(each) for each in classes)
    kept = torch.cat([each[: int(most * 5 ** (-i / 9))] for i, each in enumerate(classes)])
    mixed = kept[torch.randperm(len(kept), generator=generator)]
    return {"balanced": torch.arange(len(labels)), "imbalanced": mixed}


def search_offsets(arguments: argparse.Namespace) -> dict[str, list[Row]]:
    """What offsets gain by stream, and accuracy by temperature, rounds and gate."""
    streams: list[Row] = []
    for name, found in predict_logits(arguments):
        for domain, (kind, at) in itertools.product(DOMAINS, draw(found["labels"]).items()):
            logits, labels = found[domain].float()[at], found["labels"][at]
            logits = logits - logits.mean(-1, keepdim=True)
            logits = logits * SPREAD / logits.square().mean().sqrt()
            pairs = zip(logits.split(BLOCK), labels.split(BLOCK), strict=True)
            blocks = [pair for pair in pairs if len(pair[0]) == min(BLOCK, len(logits))]
            accuracy = {
                variant: fmean(float((take(x).argmax(-1) == y).float().mean()) for x, y in blocks)
                for variant, take in VARIANTS.items()
            }
            gained = fmean(gain_information(x, find_offsets(x, 3.0, 2)) for x, _ in blocks)
            about = {"network": name, "domain": domain, "shares": kind}
            more = fmean(gain_entropy(x, find_offsets(x, 3.0, 2)) for x, _ in blocks)
            gains = {"information": round(gained, 4), "entropy": round(more, 4)}
            streams.append({**about, **gains, "accuracy": accuracy})
            points = 100 * (accuracy["T 3, 2 rounds, gate none"] - accuracy["frozen"])
            text = f"{points:+6.2f} points, {gained:+.3f} of {more:+.3f} nats"
            print(f"{name:<14}{domain:<16}{kind:<12}{text}", flush=True)
    return {"streams": streams, "variants": list(compare_variants(streams))}


def compare_variants(streams: list[Row]) -> Iterator[Row]:
    """Means over networks, and over the four corruptions."""
    for variant in VARIANTS:
        scores: dict[str, list[float]] = {}
        for each in streams:
            place = "clean" if each["domain"] == "clean" else "shifted"
            scores.setdefault(f"{each['shares']}, {place}", []).append(each["accuracy"][variant])
        means = {place: round(fmean(values), 4) for place, values in scores.items()}
        print(f"{variant:<42}", *(f"{place} {mean:.4f}" for place, mean in means.items()))
        yield {"variant": variant, **means}


# Digits

SHIFTS: dict[str, Callable[[Tensor], Tensor]] = {
    "clean": lambda x: x,
    "noise": lambda x: x + 0.4 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)),
    "blur": lambda x: nn.functional.avg_pool2d(
        nn.functional.pad(x, (1, 1, 1, 1), mode="replicate"), 3, 1
    ),
    "moved": lambda x: x.roll(1, 3),
    "grey": lambda x: 0.5 * x + 0.2,
    "inverted": lambda x: 0.6 - 0.5 * x,
}


def train(kind: str, inputs: Tensor, labels: Tensor) -> nn.Module:
    norms: dict[str, Callable[[int], nn.Module]] = {
        "batch": nn.BatchNorm2d,
        "other": lambda channels: nn.GroupNorm(4, channels),
        "none": lambda channels: nn.Identity(),
    }
    first, second = (norms[kind](channels) for channels in (16, 32))
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), first, nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1, stride=2), second, nn.ReLU()),
        *(nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)),
    )
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(25):
        for at in torch.randperm(len(labels)).split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[at]), labels[at]).backward()
            optimizer.step()
    return model.eval()


def list_methods(kind: str) -> dict[str, df.Recipe | None]:
    """The default by reach, and what else was in question for a kind of norms."""
    base = df.presets.get("driftfilter", norms=kind)
    found: dict[str, df.Recipe | None] = {"frozen": None}
    for reach in (1.0, 2.0, 4.0):
        found[f"reach {reach:g}"] = df.presets.get("driftfilter", norms=kind, reach=reach)
    if kind == "none":
        for variance in (0.001, 0.01):
            found[f"variance {variance:g}"] = df.presets.get(
                "driftfilter", norms=kind, variance=variance
            )
    return {**found, "not centred": replace(base, centering=None)}


def search_digits(arguments: argparse.Namespace) -> list[Row]:
    """Quality by norms, batch size, method and shift, means over seeds; the stream comes twice."""
    data = load_digits()
    images = torch.tensor(data.images / 16.0).float().unsqueeze(1)
    labels = torch.tensor(data.target)
    found: dict[tuple[str, int, str], dict[str, list[Row]]] = {}
    for kind, seed in itertools.product(("batch", "other", "none"), range(arguments.seeds)):
        torch.manual_seed(seed)
        order = torch.randperm(len(labels))
        model = train(kind, images[order[:600]], labels[order[:600]])
        at = order[600:].repeat(2)
        for (method, recipe), batch, (shift, change) in itertools.product(
            list_methods(kind).items(), arguments.batches, SHIFTS.items()
        ):
            result = judge(follow(model, recipe, change(images[at]), batch), labels[at])
            cells = found.setdefault((kind, batch, method), {})
            cells.setdefault(shift, []).append(result)
    rows = []
    for (kind, batch, method), cells in found.items():
        means = {shift: average(results) for shift, results in cells.items()}
        rows.append({"norms": kind, "batch": batch, "method": method, **means})
        show(f"{kind} {batch} {method}", means)
    return rows


# Shift


def measure_shift(model: nn.Module, inputs: Tensor, batch: int, source: Tensor | None) -> Row:
    """Least, mean and greatest S of the batches of a stream, from ``source`` images if there are
    any.
    """
    measured = twin(model)
    if source is not None:
        compare(measured, None, source.split(100))
    baseline: Any = "running" if source is None else "data"
    network = df.Network(measured, statistics=df.Ema(0.5, 4.0, 1e3, baseline=baseline))
    known = [
        network.pullback(network.mean(), each)[1].memory[SHIFT] for each in inputs.split(batch)
    ]
    shifts = [float(sums[0] / sums[1]) for sums in known]
    return {"least": min(shifts), "mean": fmean(shifts), "greatest": max(shifts)}


def search_shift(arguments: argparse.Namespace) -> list[Row]:
    """S by network, batch size and domain, and quality by limit (0: no limit)."""
    domains, labels = open_domains(arguments)
    mild = {
        f"{name} {severity}": corrupt(domains["clean"], name, severity, seed=0)
        for severity, name in itertools.product(arguments.severities, EXTRA)
    }
    source = None
    if arguments.source is not None:
        pixels = np.load(arguments.source)["images"][:500]
        source = torch.from_numpy(pixels).permute(0, 3, 1, 2).float().to(arguments.device) / 255
    order, rows = labels.argsort(stable=True), []
    streams = {name: (images, labels) for name, images in (domains | mild).items()}
    streams["sorted"] = domains["clean"][order], labels[order]
    cases = itertools.product(open_models(arguments), arguments.batches, streams.items())
    for (name, model), batch, (domain, (images, own)) in cases:
        size = min(batch, len(own) // 20) if domain == "sorted" else batch
        shifts = measure_shift(model, images, size, None)
        by_data = {} if source is None else measure_shift(model, images, size, source)
        text = " ".join(f"{value:.2f}" for value in (*shifts.values(), *by_data.values()))
        found = {"frozen": judge(follow(model, None, images, 200), own)}
        for limit in arguments.limits:
            recipe = df.presets.get("driftfilter", shift=limit)
            found[f"{limit:g}"] = judge(follow(model, recipe, images, size), own)
        for limit in arguments.measured if source is not None else ():
            recipe = df.presets.get("driftfilter", norms="measured", shift=limit)
            found[f"data {limit:g}"] = judge(follow(model, recipe, images, size, source), own)
        for keep in arguments.keeps:
            recipe = replace(df.presets.get("driftfilter"), upkeep=df.ForgetAtHome(keep=keep))
            found[f"keep {keep:g}"] = judge(follow(model, recipe, images, size), own)
        show(f"{name} {size} {domain}, S {text}", found)
        about = {"network": name, "batch": size, "domain": domain, "S": shifts, "by data": by_data}
        rows.append(about | found)
    return rows


def blur(images: Tensor) -> Tensor:
    return nn.functional.avg_pool2d(nn.functional.pad(images, (1, 1, 1, 1), mode="replicate"), 3, 1)


def add_noise(images: Tensor, scale: float) -> Tensor:
    return images + scale * torch.randn(images.shape, generator=torch.Generator().manual_seed(1))


MILD: dict[str, Callable[[Tensor], Tensor]] = {
    "clean": lambda x: x,
    "noise .1": lambda x: add_noise(x, 0.1),
    "noise .2": lambda x: add_noise(x, 0.2),
    "blur .3": lambda x: torch.lerp(x, blur(x), 0.3),
    "blur .6": lambda x: torch.lerp(x, blur(x), 0.6),
    "grey .9": lambda x: 0.9 * x + 0.05,
    "grey .8": lambda x: 0.8 * x + 0.1,
    "moved .3": lambda x: torch.lerp(x, x.roll(1, 3), 0.3),
}
LIMITS = (0.03, 0.05, 0.07, 0.1, 0.15)


def search_mild(arguments: argparse.Namespace) -> list[Row]:
    """S from source data and quality by limit, means over seeds."""
    data = load_digits()
    images = torch.tensor(data.images / 16.0).float().unsqueeze(1)
    labels = torch.tensor(data.target)
    found: dict[tuple[int, str], dict[str, list[Row]]] = {}
    for seed in range(arguments.seeds):
        torch.manual_seed(seed)
        order = torch.randperm(len(labels))
        model = train("batch", images[order[:600]], labels[order[:600]])
        source, at = images[order[:500]], order[600:]
        kept = at[labels[at].argsort(stable=True)]
        streams = {name: (change(images[at]), labels[at]) for name, change in MILD.items()}
        streams["sorted"] = images[kept], labels[kept]
        methods: dict[str, tuple[df.Recipe | None, Tensor | None]] = {"frozen": (None, None)}
        for limit in (0.45, 0.0):
            methods[f"{limit:g}"] = df.presets.get("driftfilter", shift=limit), None
        for limit in LIMITS:
            own_limit = df.presets.get("driftfilter", norms="measured", shift=limit)
            methods[f"data {limit:g}"] = own_limit, source
        for (domain, (inputs, own)), batch in itertools.product(streams.items(), arguments.batches):
            cells = found.setdefault((batch, domain), {})
            cells.setdefault("S", []).append(measure_shift(model, inputs, batch, source))
            for method, (recipe, given) in methods.items():
                outputs = follow(model, recipe, inputs, batch, given)
                cells.setdefault(method, []).append(judge(outputs, own))
    rows = []
    for (batch, domain), cells in found.items():
        shifts = {name: fmean(row[name] for row in cells["S"]) for name in cells["S"][0]}
        means = {method: average(each) for method, each in cells.items() if method != "S"}
        rows.append({"batch": batch, "domain": domain, "S": shifts, **means})
        show(f"{batch} {domain}, S {' '.join(f'{value:.3f}' for value in shifts.values())}", means)
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parts = parser.add_subparsers(dest="part", required=True)
    recipes, offsets = parts.add_parser("recipes"), parts.add_parser("offsets")
    shift = parts.add_parser("shift")
    for part, images in ((recipes, 10_000), (offsets, 4000), (shift, 2000)):
        part.add_argument("--models", nargs="+", required=True, help="NAME=WEIGHTS, or NAME")
        part.add_argument("--clean", type=Path, required=True, help="CIFAR-10's test images")
        part.add_argument("--images", type=int, default=images)
        part.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    recipes.add_argument("--norms", choices=("batch", "other"), default="other")
    recipes.add_argument("--batch", type=int, default=200)
    recipes.add_argument("--priors", nargs="*", choices=PRIORS, default=[])
    for knob, values in KNOBS.items():
        recipes.add_argument(f"--{knob}", type=float, nargs="+", default=values)
    offsets.add_argument("--keep", type=Path, help="folder of logits")
    shift.add_argument("--batches", type=int, nargs="+", default=[200, 16])
    shift.add_argument("--limits", type=float, nargs="*", default=[0.0, 0.4, 0.45, 0.5])
    shift.add_argument("--keeps", type=float, nargs="*", default=[], help="ForgetAtHome.keep")
    shift.add_argument("--source", type=Path, help="training images")
    shift.add_argument("--measured", type=float, nargs="*", default=[0.05, 0.1, 0.2])
    shift.add_argument("--severities", type=int, nargs="*", default=[1])
    for part in (parts.add_parser("digits"), parts.add_parser("mild")):
        part.add_argument("--seeds", type=int, default=3)
        part.add_argument("--batches", type=int, nargs="+", default=[64, 16])
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    warnings.simplefilter("ignore")
    parts: dict[str, Callable[[argparse.Namespace], Any]] = {
        "recipes": search_recipes,
        "offsets": search_offsets,
        "digits": search_digits,
        "shift": search_shift,
        "mild": search_mild,
    }
    device = getattr(arguments, "device", "cpu")
    write(arguments.json, parts[arguments.part](arguments), device=device)


if __name__ == "__main__":
    main()
