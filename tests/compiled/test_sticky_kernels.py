"""Passes of a state that lasts, compiled: the same numbers, never needed, and not asked for unless
a stream has such a chain.
"""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

import driftfilter as df
from driftfilter.compiled import plan, sticky_chain as compiled
from driftfilter.model import sticky_chain as plain
from driftfilter.model.class_shares import count_up_by_rows
from driftfilter.model.sticky_chain import Stickiness
from oracles import Array
from small import normal

pytest.importorskip("numba")

STICKY = Stickiness(np.array([0.0, 0.6, 0.95]), np.array([0.5, 0.3, 0.2]), 0.01)


def draw(n: int, k: int, seed: int = 0) -> tuple[Array, Array, Array]:
    """p(s_0, z_0) [3, k], l [n, k] with zeros in it, and w · l [n, k]."""
    random = np.random.default_rng(seed)
    likelihood = random.gamma(0.3, 3.0, (n, k)) * (random.random((n, k)) < 0.9) + 1e-9
    start = random.dirichlet(np.ones(3 * k)).reshape(3, k)
    return start, likelihood, random.dirichlet(np.ones(k), n) * likelihood


@pytest.fixture
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever answers is compiled."""
    monkeypatch.setattr(plain, "smooth", broken)


def broken(*arguments: Any) -> Any:
    raise OSError("none")


@pytest.mark.parametrize(("n", "k"), [(1, 1), (1, 5), (200, 10), (3, 1000), (2000, 3)])
def test_passes_are_those_of_whole_arrays(n: int, k: int, no_fallback: None) -> None:
    given = draw(n, k)
    found = compiled.smooth(*given, STICKY)
    filtered, evidence = plain.forward(*given, STICKY)
    smoothed = plain.backward(filtered, evidence, *given[1:], STICKY)
    for own, other in zip(found, (filtered, evidence, smoothed), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-11, atol=1e-14)


def test_arrays_may_lie_in_memory_as_they_like(no_fallback: None) -> None:
    start, likelihood, drawn = draw(20, 4)
    strided = np.repeat(likelihood, 2, 1)[:, ::2]
    found = compiled.smooth(np.asfortranarray(start), strided, np.asfortranarray(drawn), STICKY)
    expected = compiled.smooth(start, likelihood, drawn, STICKY)
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(own, other)


def test_labels_are_put_in_order_by_compiled_code(no_fallback: None) -> None:
    """A chain of labels gives its passes what they need, in an adapter too."""
    alone, chain = normal(60, 4, seed=1).log_softmax(-1), df.LabelChain()
    known = quick = None
    for part in alone.split(20):
        together, known = chain(part, known)
        quickly, quick = chain(part, quick, compiled.smooth)
        torch.testing.assert_close(quickly, together, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(quick, known, rtol=1e-12, atol=1e-14)
    adapter = df.adapt(torch.nn.Linear(3, 4), "source", labels=chain)
    assert adapter(normal(20, 3).float()).shape == (20, 4)


def test_a_chain_goes_on_without_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    given = draw(20, 4)
    monkeypatch.setattr("driftfilter.compiled.sticky_kernels.run_backward", broken)
    monkeypatch.setattr(plan, "_failures", [])
    with pytest.warns(UserWarning, match="the eager path takes over: OSError") as told:
        found = compiled.smooth(*given, STICKY)
    assert len(told) == 1
    compiled.smooth(*given, STICKY)  # a second warning would be an error
    for own, other in zip(found, plain.smooth(*given, STICKY), strict=True):
        np.testing.assert_array_equal(own, other)


@pytest.mark.slow
def test_only_a_chain_asks_for_numba() -> None:
    code = """
import sys, torch, driftfilter as df
model, x = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4)), torch.randn(8, 3)
df.adapt(model, "tent")(x)
assert "numba" not in sys.modules
df.adapt(model, "tent", labels=df.LabelChain())(x)
assert "numba" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("n", "k"), [(1, 2), (200, 10), (3, 1000)])
def test_counts_are_those_by_rows(n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "count_up_by_rows", broken)
    random = np.random.default_rng(0)
    filled, p, weights = (
        1 + random.random((2, k)),
        random.dirichlet(np.ones(k), n),
        random.random(n),
    )
    quick = filled.copy()
    chances = compiled.count_up(quick, np.asfortranarray(p), weights)
    np.testing.assert_allclose(chances, count_up_by_rows(filled, p, weights), rtol=1e-12)
    np.testing.assert_allclose(quick, filled, rtol=1e-12)


def test_counts_go_on_without_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("driftfilter.compiled.sticky_kernels.run_count", broken)
    monkeypatch.setattr(plan, "_failures", [])
    filled, p = np.ones((2, 3)), np.full((4, 3), 1 / 3)
    with pytest.warns(UserWarning, match="the eager path takes over: OSError"):
        chances = compiled.count_up(filled, p, np.ones(4))
    np.testing.assert_array_equal(chances, count_up_by_rows(np.ones((2, 3)), p, np.ones(4)))
