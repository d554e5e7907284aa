"""Whether two versions of the code compute the same, bit for bit.

    python benchmarks/same_results.py runs/before           # with the old code
    python benchmarks/same_results.py runs/after --against runs/before    # with the new code

A folder gets ``results.json``, one SHA-256 for each case, and the checkpoints of the adapters.
Cases: every preset on the shipped networks (batch norm, group norm) in single and double precision;
``Filter.run`` in compiled code and step by step; fleets, compiled and batched; checkpoints that the
other version wrote. Only public names are used.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import driftfilter as df
from driftfilter.app import models
from driftfilter.app.corruptions import corrupt
from driftfilter.app.streams import sample_images

BATCHES, SAMPLES, SAVED_AFTER = 5, 12, 3
DTYPES = {"float32": torch.float32, "float64": torch.float64}
FEW = {
    "cotta": {"copies": 4},
    "petal": {"copies": 4},
    "memo": {"copies": 4},
}  # 32 copies would only take longer
STRUCTURES: dict[str, Callable[[int, torch.dtype], df.Covariance]] = {
    "Full": lambda d, dtype: df.Full(torch.eye(d, dtype=dtype)),
    "Diagonal": lambda d, dtype: df.Diagonal(torch.ones(d, dtype=dtype)),
    "LowRank": lambda d, dtype: df.LowRank(
        torch.ones(d, dtype=dtype), torch.zeros(0, d, dtype=dtype), rank=4
    ),
}
LOSSES = (
    df.Entropy(),
    df.SoftLikelihoodRatio(),
    df.PseudoLabel(),
    df.InformationMaximization(),
    df.GeneralizedCrossEntropy(),
    df.ConjugatePseudoLabel(),
    df.Sum((df.Entropy(), df.InformationMaximization()), (1.0, 0.5)),
)
CURVATURES = (
    df.Hessian(),
    df.GaussNewton(),
    df.EmpiricalFisher(),
    df.EmpiricalFisher(centered=False),
    df.NoCurvature(),
)
WEIGHTINGS = (
    df.Constant(2.0),
    df.Reliability(2.0),
    df.EntropyGate(0.6),
    df.Product((df.Reliability(), df.EntropyGate(0.9))),
)
PREDICTIONS = (df.MAP(), df.Tempered(2.0), df.LinearizedProbit(), df.LinearizedProbit("per_class"))
TRANSITIONS = (
    df.Transition(df.RandomWalk(), df.Isotropic(1e-3)),
    df.Transition(df.MeanReversion(0.98), df.Stationary()),
    df.Transition(df.RandomWalk(), df.Discount(0.98)),
    df.Transition(df.MeanReversion(0.98), df.Reset(0.5)),
)


def digest(*tensors: Tensor) -> str:
    """SHA-256 of shapes, dtypes and bytes."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{list(tensor.shape)} {tensor.dtype}".encode())
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def batches(dtype: torch.dtype) -> list[Tensor]:
    """Images that drift: a few of each of several corruptions, by a rule that needs no random
    numbers.
    """
    images = sample_images().images[: BATCHES * SAMPLES].float() / 255
    names = ("gaussian_noise", "contrast", "brightness", "fog", "jpeg_compression")
    parts = images.split(SAMPLES)
    return [
        corrupt(part, name, 3, seed=0).to(dtype) for name, part in zip(names, parts, strict=True)
    ]


def adapters(network: str, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], df.Adapter]]]:
    """Every preset on a shipped network, and the default with a window and as it predicts
    elsewhere.
    """
    model = models.load(network).eval().to(dtype)
    source = torch.cat(batches(dtype))[:24]

    def made(name: str, **options: Any) -> Callable[[], df.Adapter]:
        return lambda: df.adapt(model, name, **options)

    for name in df.presets.names():
        yield (
            name,
            made(
                name, **FEW.get(name, {}), **({"data": source} if name in ("eata", "petal") else {})
            ),
        )
    yield "driftfilter, window", made("driftfilter", window=16, update_every=2)
    yield "driftfilter, channels_last", made("driftfilter", channels_last=True)
    yield "opgd, Gaussian logits", made("opgd", prediction=df.LinearizedGaussian(4))
    yield (
        "opgd_diag, variational",
        made("opgd_diag", inference=df.Variational(df.EmpiricalFisher(), 2, iterations=2)),
    )


def stream(adapter: df.Adapter, data: list[Tensor]) -> list[Tensor]:
    return [adapter(batch) for batch in data]


def state_of(adapter: df.Adapter) -> list[Tensor]:
    return [value for _, value in sorted(adapter.state_dict().items())]


def of_presets(folder: Path, before: Path | None) -> Iterator[tuple[str, str]]:
    for network in ("resnet20", "resnet20_gn"):
        for precision, dtype in DTYPES.items():
            data = batches(dtype)
            for name, make in adapters(network, dtype):
                label, adapter = f"{network}, {precision}, {name}", make()
                file = f"{label}.safetensors".replace(" ", "").replace(",", "-")
                first = stream(adapter, data[:SAVED_AFTER])
                df.save(adapter, folder / file)
                rest = stream(adapter, data[SAVED_AFTER:])
                yield label, digest(*first, *rest, *state_of(adapter))
                yield f"{label}, predict", digest(adapter.predict(data[0]).log_probabilities)
                again = make()  # from the other version's file, if there is one
                df.load(again, (before or folder) / file)
                yield (
                    f"{label}, checkpoint",
                    digest(*stream(again, data[SAVED_AFTER:]), *state_of(again)),
                )


def filters() -> Iterator[tuple[str, df.Filter]]:
    """Filters on a linear head of three classes and four features: each block once beside the
    others' defaults.
    """
    base = df.Filter(df.LinearHead(3), inference=df.Linearized(df.Hessian()))
    for loss in LOSSES:
        for curvature in CURVATURES:
            gibbs = df.Gibbs(loss, df.Constant(2.0))
            yield (
                f"{loss}, {curvature}",
                replace(base, observation=gibbs, inference=df.Linearized(curvature)),
            )
    for weighting in WEIGHTINGS:
        yield f"{weighting}", replace(base, observation=df.Gibbs(df.Entropy(), weighting))
    for prediction in (*PREDICTIONS, df.MonteCarlo(4), df.LinearizedGaussian(4)):
        for source in ("prior", "posterior"):
            yield (
                f"{prediction}, {source}",
                replace(base, prediction=prediction, predict_from=source),
            )
    for transition in TRANSITIONS:
        yield f"{transition}", replace(base, transition=transition)
    yield "Bong", replace(base, inference=df.Bong(df.Hessian(), 4))
    yield "Bong, nodes", replace(base, inference=df.Bong(df.Hessian(), 0, 9))
    yield "Variational", replace(base, inference=df.Variational(df.GaussNewton(), 4, iterations=5))


def started(filt: df.Filter, structure: str, dtype: torch.dtype) -> df.FilterState:
    mean = torch.linspace(-1, 1, 12, dtype=dtype)
    return filt.init(df.Belief(mean, STRUCTURES[structure](12, dtype)), seed=3)


def features(steps: int, n: int, dtype: torch.dtype) -> Tensor:
    drawn = torch.randn(
        steps, n, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )
    return (drawn + torch.linspace(0, 1, steps, dtype=torch.float64)[:, None, None]).to(dtype)


def of_filters() -> Iterator[tuple[str, str]]:
    for label, filt in filters():
        for structure in STRUCTURES:
            for precision, dtype in DTYPES.items():
                for n in (1, 6):
                    name = f"{label}, {structure}, {precision}, n = {n}"
                    try:
                        yield from of_filter(name, filt, structure, features(20, n, dtype))
                    except (ValueError, df.NotPositiveDefiniteError) as error:
                        yield f"{name}, refused", str(error)


def of_filter(
    name: str, filt: df.Filter, structure: str, data: Tensor
) -> Iterator[tuple[str, str]]:
    state, outputs = filt.run(started(filt, structure, data.dtype), data)
    whole = (
        state.belief.mean,
        state.belief.covariance.dense(),
        outputs.log_probabilities,
        outputs.logit_variance,
    )
    yield f"{name}, run ({outputs.compiled} compiled)", digest(*whole)
    state, predictions = started(filt, structure, data.dtype), []
    for batch in data:
        state, prediction, _ = filt.step(state, batch)
        predictions += [prediction.log_probabilities, prediction.logit_variance]
    yield f"{name}, steps", digest(state.belief.mean, state.belief.covariance.dense(), *predictions)


def of_fleets() -> Iterator[tuple[str, str]]:
    for structure in ("Full", "Diagonal"):
        for precision, dtype in DTYPES.items():
            for loss in (df.Entropy(), df.PseudoLabel()):
                for prediction in (df.MAP(), df.LinearizedProbit()):
                    filt = df.Filter(
                        df.LinearHead(3),
                        observation=df.Gibbs(loss),
                        inference=df.Linearized(df.Hessian()),
                        prediction=prediction,
                    )
                    belief = df.Belief(
                        torch.linspace(-1, 1, 12, dtype=dtype), STRUCTURES[structure](12, dtype)
                    )
                    data = features(40, 6, dtype).reshape(8, 5, 6, 4)
                    for way in ("compiled", "batched"):
                        fleet = df.Fleet(filt, belief, streams=range(8))
                        found = fleet.run(data) if way == "compiled" else batched(fleet, data)
                        states = [fleet.state(stream).belief for stream in range(8)]
                        kept = [
                            part for each in states for part in (each.mean, each.covariance.dense())
                        ]
                        label = (
                            f"fleet, {way}, {structure}, {precision}, {type(loss).__name__}, "
                            f"{type(prediction).__name__}"
                        )
                        yield label, digest(found.log_probabilities, found.logit_variance, *kept)


def batched(fleet: df.Fleet, data: Tensor) -> df.Prediction:
    """The same without numba, as on a GPU."""
    import importlib.util

    find = importlib.util.find_spec
    modules = [
        module
        for name, module in sys.modules.items()
        if name.startswith("driftfilter") and hasattr(module, "find_spec")
    ]
    try:
        for module in modules:
            module.find_spec = lambda name: None if name == "numba" else find(name)  # type: ignore[attr-defined]
        return fleet.run(data)
    finally:
        for module in modules:
            module.find_spec = find  # type: ignore[attr-defined]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="to write to")
    parser.add_argument("--against", type=Path, help="folder of the other version")
    parser.add_argument(
        "--only", choices=("presets", "filters", "fleets"), action="append", help="(default: all)"
    )
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cases: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
        "filters": of_filters,
        "fleets": of_fleets,
        "presets": lambda: of_presets(options.folder, options.against),
    }
    results = {name: value for kind in options.only or cases for name, value in cases[kind]()}
    (options.folder / "results.json").write_text(json.dumps(results, indent=1))
    print(f"{len(results)} cases in {options.folder}")
    if options.against is None:
        return 0
    before = json.loads((options.against / "results.json").read_text())
    others = sorted(name for name in results if before.get(name) != results[name])
    print(
        *(f"  {name}: {'new' if name not in before else 'another result'}" for name in others),
        sep="\n",
    )
    print(f"{len(results) - len(others)} equal to {options.against}, {len(others)} not")
    return int(bool(others))


if __name__ == "__main__":
    sys.exit(main())
