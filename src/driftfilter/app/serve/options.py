"""What ``driftfilter serve`` can be told; torch is not imported here."""

from dataclasses import dataclass
from typing import Literal

from driftfilter.app.arguments import count_option, option
from driftfilter.app.run.options import AdapterOptions


@dataclass(frozen=True)
class ServeOptions(AdapterOptions):
    """Options of ``driftfilter serve``."""

    store: str = option("folder of the tenants; with --ray an fsspec path, too", "", metavar="DIR")
    range: str | None = option(
        "values outside, after scaling, are refused (default: any finite value)",
        metavar="LOW,HIGH",
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
    bodies: int = count_option(
        "megabytes of all requests that wait, at most (default {default})", 512
    )
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
