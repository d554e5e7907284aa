"""A motion over another length of time: T^τ, so that T^a after T^b is T^(a + b).

    μ ← G^τ μ + φ(G) c,   Σ ← K^τ Σ K^τᵀ + W_τ,   φ(x) = (1 - x^τ) / (1 - x), K = √keep G

For a whole τ these are τ motions one after the other, W_τ = Σ_j K^j W K^jᵀ over j < τ. For any
other τ the powers are the principal ones, which exist unless G has an eigenvalue that is 0 or
negative.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from driftfilter.base.checks import require
from driftfilter.gaussian.covariance import Covariance, Gain, Noise, identity_like, symmetrize

_ENOUGH = 0.25  # distance of a root from I from which the series of its logarithm converges fast
_TERMS = 15  # of that series and of the exponential's, whose next ones are below rounding errors


def _widen(base: float | Tensor) -> tuple[Any, Any]:
    """In float64, with the functions for it: a tensor's own, and NumPy's for a number, which no
    device has to be asked for.
    """
    return (torch, base.double()) if isinstance(base, Tensor) else (np, np.float64(base))


def raise_to(base: float | Tensor, dt: float) -> float | Tensor:
    """x^τ of a number or of each entry [d]."""
    _, values = _widen(base)
    _require_powers(bool((values >= 0).all()), dt)
    return _like(values**dt, base)


def _sum_powers(base: float | Tensor, dt: float) -> float | Tensor:
    """φ(x) = (1 - x^τ) / (1 - x) of a number or of each entry; τ if x = 1."""
    space, values = _widen(base)
    _require_powers(bool((values >= 0).all()), dt)
    with np.errstate(divide="ignore", invalid="ignore"):
        # 1 - x^τ without cancellation near x = 1.
        near = -space.expm1(dt * space.log1p(values - 1)) / (1 - values)
        ratio = space.where(values > 0, near, (1 - values**dt) / (1 - values))
    return _like(space.where(values == 1, dt, ratio), base)


def _like(values: Any, base: float | Tensor) -> float | Tensor:
    return values.to(base.dtype) if isinstance(base, Tensor) else float(values)


def move_on(gain: Gain, drift: float | Tensor, dt: float) -> tuple[Gain, float | Tensor]:
    """G^τ and φ(G) c."""
    if not _is_matrix(gain):
        sums = _sum_powers(gain, dt)
        return raise_to(gain, dt), drift if _is_zero(drift) else sums * drift
    assert isinstance(gain, Tensor)
    if _is_zero(drift):
        return _matrix_power(gain.double(), dt).to(gain.dtype), drift
    size = len(gain)
    column = torch.as_tensor(drift, dtype=torch.float64, device=gain.device).expand(size)
    affine = torch.eye(size + 1, dtype=torch.float64, device=gain.device)
    affine[:size, :size], affine[:size, size] = gain, column
    moved = _matrix_power(affine, dt).to(gain.dtype)
    return moved[:size, :size], moved[:size, size]


def gather(kept: Gain, noise: Noise, dt: float) -> Noise:
    """W_τ for a gain K of the deviations."""
    if _is_zero(noise):
        return noise
    if isinstance(kept, float):
        return _scale_noise(noise, _sum_powers(kept * kept, dt))
    if not _is_matrix(kept):
        return _gather_entries(kept, noise, dt)
    matrix = _as_matrix(noise, kept).double()
    gain = kept.double()
    total = _sum_whole(gain, matrix, int(dt)) if _is_whole(dt) else _sum_part(gain, matrix, dt)
    return symmetrize(total).to(kept.dtype)


def _scale_noise(noise: Noise, factor: float | Tensor) -> Noise:
    """W times a number, or D^½ W D^½ of a diagonal W for factors D [d]."""
    if isinstance(noise, Covariance):
        root = factor.sqrt() if isinstance(factor, Tensor) else math.sqrt(factor)
        return noise.propagate(root, 0.0)
    return noise * factor


def _gather_entries(kept: Tensor, noise: Noise, dt: float) -> Noise:
    """W_τ for K = diag(k): φ(k_i k_j) W_ij."""
    if isinstance(noise, Covariance) and not noise.is_diagonal:
        noise = noise.dense()
    if isinstance(noise, Tensor) and noise.dim() == 2:
        total = _sum_powers(torch.outer(kept, kept), dt) * noise
        _require_covariance(total, noise, dt)
        return total
    return _scale_noise(noise, _sum_powers(kept * kept, dt))


def _as_matrix(noise: Noise, like: Tensor) -> Tensor:
    if isinstance(noise, Covariance):
        return noise.dense()
    if isinstance(noise, float):
        return noise * identity_like(like)
    return torch.diag(noise) if noise.dim() == 1 else noise


def _sum_whole(gain: Tensor, noise: Tensor, steps: int) -> Tensor:
    """Σ_j K^j W K^jᵀ over j < n, by doubling."""
    total = torch.zeros_like(noise)
    while steps:
        if steps & 1:
            total = gain @ total @ gain.mT + noise
        noise = gain @ noise @ gain.mT + noise
        gain, steps = gain @ gain, steps >> 1
    return total


def _sum_part(gain: Tensor, noise: Tensor, dt: float) -> Tensor:
    """W_τ from B = [[K, W K⁻ᵀ], [0, K⁻ᵀ]]: B^τ = [[K^τ, W_τ K^-τᵀ], [0, K^-τᵀ]]."""
    size, inverse = len(gain), _invert(gain, dt).mT
    block = torch.zeros(2 * size, 2 * size, dtype=torch.float64, device=gain.device)
    block[:size, :size], block[:size, size:], block[size:, size:] = gain, noise @ inverse, inverse
    moved = _matrix_power(block, dt)
    total = symmetrize(moved[:size, size:] @ moved[:size, :size].mT)
    _require_covariance(total, noise, dt)
    return total


def _matrix_power(matrix: Tensor, dt: float) -> Tensor:
    """A^τ, the principal power unless τ is whole."""
    if _is_whole(dt):
        whole: Tensor = torch.linalg.matrix_power(matrix, int(dt))
        return whole
    return _exponential(dt * _logarithm(matrix, dt))


def _exponential(matrix: Tensor) -> Tensor:
    """exp A = (exp A/2ˢ)^(2ˢ) by its series; torch.matrix_exp is off by 1e-11 for some matrices."""
    norm = torch.linalg.matrix_norm(matrix, 1).item()
    doublings = max(0, math.frexp(norm)[1] + 1)  # to a norm of at most 1/2
    step = matrix / 2.0**doublings
    total = term = identity_like(matrix)
    for place in range(1, _TERMS + 1):
        term = term @ step / place
        total = total + term
    for _ in range(doublings):
        total = total @ total
    return total


def _logarithm(matrix: Tensor, dt: float) -> Tensor:
    """log A = 2ˢ log A^(1/2ˢ), log X = 2 (Z + Z³/3 + Z⁵/5 + …) with Z = (X + I)⁻¹ (X - I)."""
    eye, roots = identity_like(matrix), 0
    values = torch.linalg.eigvals(matrix)
    largest = values.abs().max()
    real = values.imag.abs() <= 1e-7 * largest
    _require_powers(not bool((real & (values.real <= 1e-12 * largest)).any()), dt)
    while torch.linalg.matrix_norm(matrix - eye, 1) > _ENOUGH:
        matrix, roots = _square_root(matrix), roots + 1
    step: Tensor = torch.linalg.solve(matrix + eye, matrix - eye)
    square, term, total = step @ step, step, torch.zeros_like(step)
    for place in range(_TERMS):
        total, term = total + term / (2 * place + 1), term @ square
    return total * float(2 ** (roots + 1))


def _square_root(matrix: Tensor) -> Tensor:
    """The principal square root by Denman and Beavers' iteration in its product form."""
    eye, product = identity_like(matrix), matrix
    for _ in range(50):
        inverse = torch.linalg.inv(product)
        matrix = matrix @ (eye + inverse) / 2
        product = (2 * eye + product + inverse) / 4
        if torch.linalg.matrix_norm(product - eye, 1) < 1e-14 * len(eye):
            break
    return matrix


def _invert(gain: Tensor, dt: float) -> Tensor:
    inverse: Tensor
    inverse, status = torch.linalg.inv_ex(gain)
    _require_powers(not status.item(), dt)
    return inverse


def _require_powers(exist: bool, dt: float) -> None:
    require(
        exist or _is_whole(dt),
        "dt",
        dt,
        "a whole number if the gain has an eigenvalue that is 0 or negative, without a real power",
    )


def _require_covariance(total: Tensor, noise: Tensor, dt: float) -> None:
    """Raise if W_τ is not positive semi-definite, but for rounding and what W has of it."""
    if _is_whole(dt):
        return
    values = torch.linalg.eigvalsh(total.double())
    rounding = 10 * (1 + dt) * torch.linalg.eigvalsh(noise.double())[0].clamp_max(0).abs()
    require(
        bool(values[0] >= -1e-9 * values[-1].abs() - rounding),
        "dt",
        dt,
        "a whole number for this noise, which over a part of a step is no covariance "
        f"(smallest eigenvalue {values[0].item():.3g})",
    )


def _is_whole(dt: float) -> bool:
    return float(dt).is_integer()


def _is_zero(value: object) -> bool:
    return isinstance(value, float) and value == 0.0


def _is_matrix(gain: Gain) -> bool:
    return isinstance(gain, Tensor) and gain.dim() == 2
