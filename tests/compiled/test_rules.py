"""Closed forms by torch, by numba with math's functions and with those of the kernels: one code."""

import inspect
from typing import Any

import numpy as np
import pytest
import torch

from driftfilter.model import closed_forms

pytest.importorskip("numba")

from driftfilter.compiled import vector_math
from driftfilter.compiled.rules import compile_rule

P = torch.linspace(1e-6, 1 - 1e-6, 101, dtype=torch.float64)
LOGP, TARGET, OTHER = P.log(), (P > 0.4).double(), P.flip(0)
TABLE: dict[str, tuple[Any, ...]] = {
    "center": (OTHER, P, 0.7),
    "bend": (OTHER, P, -0.4),
    "entropy": (P, LOGP),
    "cross_entropy": (LOGP, TARGET),
    "generalized_cross_entropy": (LOGP, 0.3),
    "generalized_value": (LOGP, 0.3),
    "bounded_likelihood_ratio": (P, 0.9),
    "information": (P, LOGP, 0.2, OTHER, 1e-300),
    "certainty": (OTHER, 0.9),
    "gate": (P - 0.5, 1.0),
    "kappa": (10 * P,),
    "variance_at": (P + 0.5,),
    "share_of": (40 * P, 20.0),
}
OF_NUMBERS = ("variance_at", "share_of")  # which nobody asks for tensors


def test_the_table_has_every_closed_form() -> None:
    own = inspect.getmembers(closed_forms, inspect.isfunction)
    assert {name for name, rule in own if rule.__module__ == closed_forms.__name__} == set(TABLE)


@pytest.mark.parametrize("own", [{}, {"exp": vector_math.exp, "log": vector_math.log}], ids=len)
@pytest.mark.parametrize("name", TABLE)
def test_numbers_give_what_tensors_give(name: str, own: dict[str, Any]) -> None:
    rule, compiled = (
        getattr(closed_forms, name),
        called(compile_rule(getattr(closed_forms, name), **own)),
    )
    columns = torch.broadcast_tensors(
        *[torch.as_tensor(part, dtype=P.dtype) for part in TABLE[name]]
    )
    if name in OF_NUMBERS:
        rows = torch.stack(columns, 1).tolist()
        wanted: Any = torch.tensor([rule(*row) for row in rows], dtype=P.dtype)
    else:
        wanted = rule(*columns)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    found = np.array([np.atleast_1d(compiled(*row)) for row in torch.stack(columns, 1).tolist()])
    for position, values in enumerate(wanted):
        np.testing.assert_allclose(found[:, position], values.numpy(), rtol=2e-14, atol=1e-15)


def called(rule: Any) -> Any:
    """A rule that Python can call: parts of kernels have no way in."""
    import numba

    return numba.njit(lambda *arguments: rule(*arguments))
