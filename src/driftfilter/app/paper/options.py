"""What ``driftfilter reproduce`` can be told; torch is not imported here."""

import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from driftfilter.app.arguments import argument, count, count_option, folder, option
from driftfilter.app.bench.options import BenchOptions

ExampleName: TypeAlias = Literal["dynamics", "linear", "moons", "pinwheel", "cifar", "all"]
EXAMPLES = get_args(ExampleName)[:-1]
SEEDS = 20
FIRST_SEED = 3000  # nothing was chosen on the seeds from here on
CIFAR = "cifar: "  # begins the help of its options
_OF_BENCH = {item.name: item for item in fields(BenchOptions)}


def _cifar(name: str, help: str | None = None, default: Any = None) -> Any:
    """Field of ``driftfilter bench`` that the example cifar has, too, perhaps with another default
    and help.
    """
    item = _OF_BENCH[name]
    text = item.metadata["help"] if help is None else help
    return field(default=default, metadata={**item.metadata, "help": CIFAR + text})


@dataclass(frozen=True)
class ReproduceOptions:
    """Options of ``driftfilter reproduce``; those of the images are for cifar alone."""

    example: ExampleName = argument("EXAMPLE", f"{', '.join(EXAMPLES)}, or all of them")
    seeds: int | None = count_option(f"number of seeds (default {SEEDS}; cifar 1)", None)
    first_seed: int = option("the first of them ({default})", FIRST_SEED, type=int, metavar="S")
    out: Path = option(
        "where to write (default {default})", Path("runs/reproduce"), type=folder, metavar="DIR"
    )
    workers: int = option(
        "processes (default: one a core)", os.cpu_count() or 1, type=count, metavar="N"
    )
    no_figures: bool = option("numbers only, without matplotlib", False)
    data: str | None = _cifar("data")
    clean: str | None = _cifar("clean")
    source: str | None = _cifar(
        "source", ".npz of source images for EATA's Fisher (default: the last 1,000 shipped)"
    )
    model: str = option(
        CIFAR + "a shipped network, or name=weights.safetensors (default {default})",
        "resnet20",
        metavar="NAME",
    )
    corruptions: str | None = _cifar(
        "corruptions", "all (default with --data or --clean), or names (default: 4)"
    )
    severity: int = _cifar("severity", default=5)
    batch: int = _cifar("batch", default=200)
    images: int | None = _cifar(
        "images", "a corruption (default: all with --data or --clean, else 1,000)"
    )
    device: str = _cifar("device", default="auto")

    @property
    def names(self) -> tuple[str, ...]:
        """The examples to run."""
        return EXAMPLES if self.example == "all" else (self.example,)

    def list_seeds(self, default: int = SEEDS) -> range:
        """The seeds that are asked for, or so many of them."""
        return range(self.first_seed, self.first_seed + (self.seeds or default))

    def find_misplaced(self) -> str | None:
        """What is wrong with options of cifar that are given for other examples."""
        if "cifar" in self.names:
            return None
        given = (
            f"--{item.name} must be given for cifar or all, got example {self.example!r}"
            for item in fields(self)
            if item.metadata["help"].startswith(CIFAR) and getattr(self, item.name) != item.default
        )
        return next(given, None)
