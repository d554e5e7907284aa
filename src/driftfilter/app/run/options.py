"""What ``driftfilter run`` and ``driftfilter check`` can be told; torch is not imported here."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from driftfilter.app.arguments import (
    MODEL_HELP,
    argument,
    count,
    count_option,
    file,
    folder,
    fraction,
    option,
    whole,
)


@dataclass(frozen=True)
class ModelOptions:
    """Options that say which network, where it computes and how its samples are read."""

    model: str = argument("MODEL", MODEL_HELP)
    _: KW_ONLY
    weights: str | None = option(
        ".safetensors, or .pt that holds tensors only (default: as the factory makes it)",
        metavar="FILE",
    )
    seed: int = option("of all draws (default {default})", 0, type=int, metavar="S")
    device: str = option("auto (default), cpu or cuda", "auto", metavar="NAME")
    layout: Literal["auto", "first", "last"] = option(
        "of image channels (auto: 8-bit [n, h, w, 3] are last)", "auto"
    )
    scale: float | None = option(
        "factor of all values (default: 1/255 for 8-bit images, else 1)", type=float, metavar="X"
    )


@dataclass(frozen=True)
class AdapterOptions(ModelOptions):
    """Options that also say how the network adapts."""

    _: KW_ONLY
    preset: str | None = option(
        "with options as in tent:lr=0.001 (default driftfilter)", metavar="NAME"
    )
    recipe: str | None = option("TOML of a recipe, instead of a preset", metavar="FILE")
    set: Sequence[str] = option(
        "a field of the recipe, as in transition.dynamics.rho=0.99; repeat",
        (),
        action="append",
        metavar="PATH=VALUE",
    )
    source: str | None = option(
        "source samples (.npy, .npz, a folder), for recipes with a source posterior or a loss of "
        "them",
        metavar="FILE",
    )
    integers: str = option(
        "parts of a JSON object that are integers, such as input_ids", "", metavar="A,B"
    )
    speed: Literal["exact", "fast"] = option(
        "fast: the model in bfloat16 where the device computes in it (default {default})", "exact"
    )


@dataclass(frozen=True)
class RunOptions(AdapterOptions):
    """Options of ``driftfilter run``, as they are written there."""

    data: str = argument(
        "DATA", ".npy [n, ...], .npz with x or images, a folder of pictures, or - for lines of JSON"
    )
    labels: str | None = option(
        ".npy, or .npz with labels or y: for the accuracy, never for adapting; or .csv of "
        "sample,label[,after]: learned when they have come",
        metavar="FILE",
    )
    tenants: str | None = option(
        "array of an .npz that says whose each sample is: a posterior for each", metavar="COLUMN"
    )
    batch: int = count_option("samples a step (default {default})", 200)
    window: int = count_option(
        "samples the adapter looks back on, for small batches (default {default})", 0
    )
    update_every: int = count_option("steps between two updates (default {default})", 1)
    range: str | None = option(
        "a batch with values outside, after scaling, is bad (default: any finite value)",
        metavar="LOW,HIGH",
    )
    predictions: Literal["npz", "csv"] = option(
        "predictions.npz in the end (default), or .csv that grows", "npz"
    )
    checkpoint_every: int = count_option("steps between two saves (default: only when it ends)", 0)
    keep: int = option("checkpoints to keep (default {default})", 1, type=count, metavar="K")
    resume: bool = option(
        "go on from the checkpoint in --out; from the beginning if there is none", False
    )
    stdin_continues: bool = option(
        "on resuming, stdin goes on where it stopped (default: it starts again)", False
    )
    on_bad_batch: Literal["stop", "skip"] = option(
        "not finite, out of range, of another shape (default {default})", "stop"
    )
    baseline: bool = option(
        "also predict with the model as it is, for the report: one more forward pass", False
    )
    classes: str | None = option(
        "names of the classes, one a line, for the report (default: their numbers)",
        metavar="FILE",
    )
    live: bool = option("a dashboard on the terminal: accuracy, entropy, classes, alarms", False)
    out: Path = option(
        "to write to (default {default})", Path("runs/run"), type=folder, metavar="DIR"
    )

    @property
    def labels_are_late(self) -> bool:
        """Whether labels are learned, not held against predictions."""
        return self.labels is not None and self.labels.lower().endswith(".csv")

    def fixed(self) -> dict[str, Any]:
        """Options that must not change between the parts of a run.

        A checkpoint itself knows the model and the recipe.
        """
        names = ("batch", "seed", "layout", "scale", "range", "integers", "predictions", "baseline")
        return {
            **{name: getattr(self, name) for name in names},
            "labels": "none"
            if self.labels is None
            else "learned"
            if self.labels_are_late
            else "given",
        }


@dataclass(frozen=True)
class CheckOptions:
    """Options of ``driftfilter check``."""

    run: Path = argument("RUN", "folder of a driftfilter run that has ended", type=Path)
    min_accuracy_estimate: float | None = option(
        "least expected accuracy over the run, which needs no labels", type=fraction, metavar="P"
    )
    min_accuracy: float | None = option(
        "least accuracy, of a run with --labels", type=fraction, metavar="P"
    )
    max_ece: float | None = option(
        "largest calibration error, of a run with --labels", type=fraction, metavar="P"
    )
    max_alarms: int | None = option("most alarms of the monitor", type=whole, metavar="N")
    max_skipped: int | None = option("most steps that were skipped", type=whole, metavar="N")
    junit: Path | None = option("to write the checks to, as JUnit XML", type=file, metavar="FILE")

    @property
    def known(self) -> list[str]:
        """The checks, as they are written."""
        names = (item.name for item in fields(self) if item.name.startswith(("min_", "max_")))
        return [f"--{name.replace('_', '-')}" for name in names]

    @property
    def asked(self) -> bool:
        """Whether there is anything to check."""
        return any(getattr(self, each[2:].replace("-", "_")) is not None for each in self.known)


@dataclass(frozen=True)
class TuneOptions(ModelOptions):
    """Options of ``driftfilter tune``, as they are written there."""

    data: str = argument(
        "DATA", ".npy [n, ...], .npz with x or images, or a folder of pictures; labels are not used"
    )
    batch: int = count_option("samples a step (default {default})", 200)
    limit: int = count_option("samples to look at, the first ones (default: all)", 0)
