"""exp and log of the kernels against numpy's."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

numba = pytest.importorskip("numba")

from driftfilter.compiled import vector_math as compiled_math  # noqa: E402

Array = NDArray[Any]


def looped(
    function: Any,
) -> Callable[[Array], Array]:  # a loop as kernels have it, whose flags allow sums to be reordered
    @numba.njit(fastmath={"reassoc", "contract", "nsz", "arcp"}, error_model="numpy")  # type: ignore[untyped-decorator]
    def loop(x: Array, out: Array) -> None:
        for i in range(len(x)):
            out[i] = function(x[i])

    def run(x: Array) -> Array:
        out = np.empty_like(x)
        loop(x, out)
        return out

    return run


exponential, logarithm = looped(compiled_math.exp), looped(compiled_math.log)


@pytest.mark.parametrize(("low", "high"), [(-707, 709), (-1, 1), (-1e-9, 1e-9)])
def test_exp_is_right_to_two_units_in_the_last_place(low: float, high: float) -> None:
    x = np.linspace(low, high, 100_001)
    np.testing.assert_array_max_ulp(exponential(x), np.exp(x), 2)


def test_exp_of_very_negative_numbers_is_as_good_as_zero() -> None:
    assert (exponential(np.array([-709.0, -1e4, -1e308])) < 1e-307).all()


@pytest.mark.parametrize(("low", "high"), [(-307, 308), (-1, 1)])
def test_log_is_right_to_two_units_in_the_last_place(low: float, high: float) -> None:
    x = 10 ** np.linspace(low, high, 100_001)
    np.testing.assert_array_max_ulp(logarithm(x), np.log(x), 2)


@pytest.mark.parametrize("distance", [1e-15, 1e-9, 1e-3, 0.3])
def test_log_near_one_keeps_its_digits(distance: float) -> None:
    x = 1 + distance * np.linspace(-1, 1, 10_001)
    np.testing.assert_array_max_ulp(logarithm(x), np.log(x), 2)


@pytest.mark.slow
def test_single_precision_is_rounded_once() -> None:
    x = np.linspace(-80, 80, 10_001, dtype=np.float32)
    np.testing.assert_array_max_ulp(
        exponential(x), np.exp(x.astype(np.float64)).astype(np.float32), 1
    )
