"""What ``driftfilter serve`` can be told; torch is not imported here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from driftfilter.app.arguments import MODEL_HELP, argument, count_option, option


@dataclass(frozen=True)
class ServeOptions:
    """Options of ``driftfilter serve``."""

    model: str = argument("MODEL", MODEL_HELP)
    store: str = option("folder of the tenants; with --ray an fsspec path, too", "", metavar="DIR")
    weights: str | None = option(
        ".safetensors, or .pt that holds tensors only (default: as the factory makes it)",
        metavar="FILE",
    )
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
        "source samples (.npy, .npz, a folder), for recipes that need them", metavar="FILE"
    )
    seed: int = option("of all draws (default {default})", 0, type=int, metavar="S")
    device: str = option("auto (default), cpu or cuda", "auto", metavar="NAME")
    speed: Literal["exact", "fast"] = option(
        "fast: the model in bfloat16 where the device computes in it (default {default})", "exact"
    )
    layout: Literal["auto", "first", "last"] = option(
        "of image channels (auto: 8-bit [n, h, w, 3] are last)", "auto"
    )
    scale: float | None = option(
        "factor of all values (default: 1/255 for 8-bit images, else 1)", type=float, metavar="X"
    )
    range: str | None = option(
        "values outside, after scaling, are refused (default: any finite value)",
        metavar="LOW,HIGH",
    )
    integers: str = option(
        "parts of a JSON object that are integers, such as input_ids", "", metavar="A,B"
    )
    host: str = option("address to listen at (default {default})", "127.0.0.1", metavar="HOST")
    port: int = option("port, 0 for any (default {default})", 8000, type=int, metavar="N")
    token_file: str | None = option(
        "bearer tokens, one a line (default: everybody may ask)", metavar="FILE"
    )
    durability: Literal["step", "batch"] = option(
        "what is answered is on the disk: at once (step, default), or within a second (batch: "
        "outlasts a kill, not a loss of power)",
        "step",
    )
    memory: int = count_option("megabytes of tenants in memory (default {default})", 1024)
    tenants: int = count_option("at most, of each worker (default {default})", 100_000)
    body: int = count_option("megabytes of a request at most (default {default})", 32)
    rate: float = option(
        "requests a second of each tenant at most, 0 for any (default {default})",
        0.0,
        type=float,
        metavar="R",
    )
    batch: int = count_option("requests that are served together at most (default {default})", 64)
    wait: float = option(
        "milliseconds that a request may wait for others (default {default})",
        0.0,
        type=float,
        metavar="MS",
    )
    ray: str | None = option(
        "workers on a Ray cluster, at its address (local: started here)",
        nargs="?",
        const="local",
        metavar="ADDRESS",
    )
    workers: int = count_option("workers with --ray (default {default})", 2)
