"""Logistic regression on single observations with a full covariance: Filter.run beside JAX scans
and a NumPy loop, in one run.

    python benchmarks/scan.py [--steps 10000] [--rounds 7] [--json FILE]

The same filter everywhere (mean reversion, isotropic noise, entropy, uncentred empirical Fisher,
float64): each gives the log-probabilities of every step. JAX is jit + lax.scan with the rank-one
update, written in two ways; 1,000 streams at once are its vmap, and a Fleet. Times are of whole
calls, results ready, the best of several rounds taking turns.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import driftfilter as df
from figures import write

RHO, NOISE, START = 0.99, 1e-3, 0.1
Array = NDArray[np.float64]


def build(d: int) -> tuple[df.Filter, df.Belief]:
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(d, generator=generator, dtype=torch.float64) / d**0.5
    transition = df.Transition(df.MeanReversion(RHO), df.Isotropic(NOISE))
    inference = df.Linearized(df.EmpiricalFisher(centered=False))
    filt = df.Filter(df.LinearHead(2), transition, df.Gibbs(df.Entropy()), inference)
    return filt, df.Belief(mean, df.Full(START * torch.eye(d, dtype=torch.float64)))


def numpy_loop(mean: Array, stream: Array) -> Array:
    source, d = mean, len(mean)
    covariance, eye, out = START * np.eye(d), NOISE * np.eye(d), np.empty((len(stream), 2))
    for t, x in enumerate(stream):
        mean, covariance = RHO * mean + (1 - RHO) * source, RHO**2 * covariance + eye
        f = x @ mean
        p = 1 / (1 + np.exp(-f))
        slope = -f * p * (1 - p)
        y = covariance @ x
        gain = y / (1 + slope * slope * (x @ y))
        mean, covariance = mean - slope * gain, covariance - slope * slope * np.outer(y, gain)
        f = x @ mean
        out[t] = -np.logaddexp(0, f), -np.logaddexp(0, -f)
    return out


def jax_scan(mean: Array, streams: Array, symmetric: bool) -> Callable[[], Any]:
    """Streams [steps, d], or [streams, steps, d] by vmap."""
    jax: Any = importlib.import_module("jax")
    jnp: Any = importlib.import_module("jax.numpy")
    jax.config.update("jax_enable_x64", True)
    source = jnp.asarray(mean)
    eye = NOISE * jnp.eye(len(mean))

    def step(carry: Any, x: Any) -> Any:
        mean, covariance = carry
        mean, covariance = RHO * mean + (1 - RHO) * source, RHO**2 * covariance + eye
        f = x @ mean
        slope = -f * jax.nn.sigmoid(f) * jax.nn.sigmoid(-f)
        y = covariance @ x
        scale = 1 / (1 + slope * slope * (x @ y))
        taken = slope * jnp.sqrt(scale) * y if symmetric else slope * scale * y
        mean, covariance = (
            mean - slope * scale * y,
            covariance - jnp.outer(taken, taken if symmetric else slope * y),
        )
        f = x @ mean
        return (mean, covariance), jnp.stack((jax.nn.log_sigmoid(-f), jax.nn.log_sigmoid(f)))

    def scan(stream: Any) -> Any:
        return jax.lax.scan(step, (source, START * jnp.eye(len(mean))), stream)

    ready, inputs = jax.jit(jax.vmap(scan) if streams.ndim == 3 else scan), jnp.asarray(streams)
    return lambda: np.asarray(jax.block_until_ready(ready(inputs))[1])


def measured(cases: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Seconds of the best of several rounds, cases taking turns; all must give the same
    log-probabilities.
    """
    results = {name: np.asarray(case()) for name, case in cases.items()}
    first = next(iter(results.values()))
    for name, result in results.items():
        np.testing.assert_allclose(result.reshape(first.shape), first, atol=1e-9, err_msg=name)
    times: dict[str, float] = {}
    for _ in range(rounds):
        for name, case in cases.items():
            begun = time.perf_counter()
            case()
            times[name] = min(times.get(name, np.inf), time.perf_counter() - begun)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()

    import jax
    import numba

    versions = {
        "torch": torch.__version__,
        "numba": numba.__version__,
        "jax": jax.__version__,
        "numpy": np.__version__,
    }
    where = (
        f"{platform.machine()}, {torch.get_num_threads()} threads, Python "
        f"{platform.python_version()}, {versions}"
    )
    date = datetime.date.today().isoformat()
    print(f"{where}, {date}\nµs a step (ratio to the fastest JAX)")
    rows: dict[str, dict[str, float]] = {}
    for d in (3, 30, 108):
        filt, belief = build(d)
        state = filt.init(belief)
        stream = torch.randn(
            arguments.steps, 1, d, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        )
        flat, mean = stream[:, 0].numpy(), belief.mean.numpy()
        begun = time.perf_counter()
        filt.run(state, stream)
        first = time.perf_counter() - begun
        cases: dict[str, Callable[[], Any]] = {
            "Filter.run": lambda f=filt, s=state, x=stream: f.run(s, x)[1].log_probabilities,  # type: ignore[misc]
            "JAX scan": jax_scan(mean, flat, False),
            "JAX scan, symmetric": jax_scan(mean, flat, True),
            "NumPy loop": lambda m=mean, x=flat: numpy_loop(m, x),  # type: ignore[misc]
        }
        times = {
            name: 1e6 * value / arguments.steps
            for name, value in measured(cases, arguments.rounds).items()
        }
        rows[f"d = {d}"] = report(f"d = {d}", times)
        rows[f"d = {d}"]["first call, s"] = first
        print(f"{'':<12}first call {first:.2f} s")
    filt, belief = build(3)
    streams, steps = 1000, 200
    x = torch.randn(
        streams, steps, 1, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    cases = {
        "Fleet.run": lambda: df.Fleet(filt, belief, range(streams)).run(x).log_probabilities,
        "JAX vmap": jax_scan(belief.mean.numpy(), x[:, :, 0].numpy(), False),
        "JAX vmap, symmetric": jax_scan(belief.mean.numpy(), x[:, :, 0].numpy(), True),
    }
    times = {name: 1e6 * value / steps for name, value in measured(cases, arguments.rounds).items()}
    rows["1,000 streams, d = 3"] = report("1,000 streams, d = 3", times)
    write(arguments.json, {"steps": arguments.steps, "µs a step": rows}, "numpy", "numba", "jax")


def report(name: str, times: dict[str, float]) -> dict[str, float]:
    fastest = min(value for case, value in times.items() if case.startswith("JAX"))
    print(
        f"{name:<22}"
        + "; ".join(f"{case} {value:.2f} ({value / fastest:.2f})" for case, value in times.items())
    )
    return dict(times)


if __name__ == "__main__":
    main()
