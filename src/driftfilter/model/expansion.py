"""A loss to second order in the logits of each sample: how value, gradient and Hessian are
computed.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from driftfilter.gaussian.covariance import positive_root
from driftfilter.model.closed_forms import FLOOR, bend, center


class Expansion(NamedTuple):
    """A loss to second order in the logits."""

    value: Tensor  # [v, ..., n]; a sample's loss is the sum over its views
    gradient: Tensor  # [v, ..., n, k]
    hessian: Callable[
        [], Tensor
    ]  # [v, ..., n, k, k], computed when asked for; indefinite as a rule
    root: Callable[[], Tensor]  # R [v, ..., n, k, r], R Rᵀ = the positive part of the Hessian
    # Weight of each view (number or [n]), for curvature from the model alone.
    shares: tuple[float | Tensor, ...] = (1.0,)


def log_softmax(logits: Tensor) -> Tensor:
    """log p with a floor."""
    return logits.log_softmax(-1).clamp_min(FLOOR)


@cache
def _contrasts(k: int) -> Tensor:
    """Orthonormal basis of the vectors that sum to 0, [k, k - 1]."""
    ones = torch.ones(k, 1, dtype=torch.float64)
    columns: Tensor = torch.linalg.qr(
        torch.cat((ones, torch.eye(k, dtype=torch.float64)[:, : k - 1]), 1)
    )[0]
    return columns[:, 1:]


@cache
def _opposite(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor([1.0, -1.0], dtype=dtype, device=device)


def invariant_root(hessian: Tensor) -> Tensor:
    """R [..., k, k - 1], R Rᵀ = the positive part, for losses that do not see a shift of the
    logits: their Hessians have rows of sum 0. One logit has no curvature, a root of zeros.
    """
    if hessian.shape[-1] == 1:
        return torch.zeros_like(hessian)
    basis = _contrasts(hessian.shape[-1]).to(hessian)
    return basis @ positive_root(basis.mT @ hessian @ basis)


def separable(
    value: Tensor | None,
    p: Tensor,
    first: Tensor,
    second: Tensor,
    shares: tuple[float | Tensor, ...] = (1.0,),
) -> Expansion:
    """Every loss Σ_k g_k(p_k), from first = p g'(p) and second = p² g''(p), which stay finite as p
    -> 0:

    ∇ = u = first - p Σfirst,  ∇² = diag(v) - v pᵀ - p vᵀ + (Σb) p pᵀ  with b = second, v = u + b.
    A constant in g' cancels, since Σp = 1. The value is Σfirst if none is given.
    """
    total = first.sum(-1, keepdim=True)
    gradient = center(first, p, total)

    def hessian() -> Tensor:
        v = gradient + second
        halved = torch.addcmul(
            v, p, second.sum(-1, keepdim=True), value=-0.5
        )  # so that (Σb) p pᵀ comes along
        outer = halved[..., :, None] * p[..., None, :]
        return torch.diag_embed(v) - outer - outer.mT

    def root() -> Tensor:
        if p.shape[-1] != 2:
            return invariant_root(hessian())
        a = bend(gradient + second, p, second.sum(-1, keepdim=True)).clamp_min_(0).sqrt_()
        return (a * _opposite(p.dtype, p.device)).unsqueeze(-1)

    return Expansion(total.squeeze(-1) if value is None else value, gradient, hessian, root, shares)


def differentiate(function: Callable[[Tensor], Tensor], logits: Tensor) -> Expansion:
    """Any function logits [n, k] -> [n] to second order, by automatic differentiation on the clean
    view.
    """
    clean = logits[:1].flatten(0, -2)  # [m, k]
    gradient, value = torch.func.vmap(torch.func.grad_and_value(_one_sample(function)))(clean)
    hessian = hessians(function, logits)
    values, gradients = value.reshape(logits[:1].shape[:-1]), gradient.reshape(logits[:1].shape)
    return Expansion(values, gradients, hessian, lambda: positive_root(hessian()))


def couple(
    function: Callable[[Tensor], Tensor], outputs: Tensor, weights: Tensor, least: int = 2
) -> Expansion:
    """A function of a whole batch to second order: outputs [v, m, K] of the samples that have a
    weight -> values ℓ [m], or one number [] that stands for each of them.

    Rows are c_i = (1 / w_i) ∂/∂f_i Σ_j w_j ℓ_j, so that Σ_i (w_i / n) J_iᵀ c_i is the gradient of
    Σ_j (w_j / n) ℓ_j, which samples enter jointly. The Hessian is the block of each view of each
    sample. With fewer than ``least`` samples there is nothing to couple, and all of it is 0.
    """
    kept = weights > 0
    own, enough = weights[kept], int(kept.sum()) >= least
    with torch.enable_grad():
        leaf = outputs[:, kept].detach().requires_grad_()
        losses = function(leaf) if enough else leaf.new_zeros(len(own))
        _require_values(losses, len(own))
        total = (own * losses).sum()
    (rows,) = (
        torch.autograd.grad(total, leaf, create_graph=True)
        if total.requires_grad
        else (torch.zeros_like(leaf),)
    )
    value, gradient = torch.zeros_like(outputs[..., 0]), torch.zeros_like(outputs)
    value[0, kept] = losses.detach().expand_as(own)
    gradient[:, kept] = rows.detach() / own[:, None]

    def hessian() -> Tensor:
        blocks = outputs.new_zeros(*outputs.shape, outputs.shape[-1])
        if rows.requires_grad:
            blocks[:, kept] = _blocks(rows, leaf) / own[:, None, None]
        return blocks

    shares = (1 / len(outputs),) * len(outputs)
    return Expansion(value, gradient, hessian, lambda: positive_root(hessian()), shares)


def _require_values(losses: object, samples: int) -> None:
    fits = isinstance(losses, Tensor) and losses.shape in ((), (samples,))
    if not fits:
        got = f"shape {list(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(
            f"a loss of a batch must give one number, or one for each of its {samples} samples, "
            f"got {got}"
        )


def _blocks(rows: Tensor, leaf: Tensor) -> Tensor:
    """∂ rows_i / ∂ leaf_i of every view and sample [v, m, K, K], a sample at a time."""
    views, samples, width = leaf.shape
    blocks = leaf.new_zeros(views, samples, width, width)
    units = torch.eye(width, dtype=leaf.dtype, device=leaf.device)
    for view in range(views):
        for i in range(samples):
            with torch.enable_grad():
                own = rows[view, i]
            (moved,) = torch.autograd.grad(
                own, leaf, units, retain_graph=True, is_grads_batched=True
            )
            blocks[view, i] = moved[:, view, i]
    return blocks


def pad_features(expansion: Expansion, columns: int) -> Expansion:
    """An expansion in the logits as one in outputs with so many features beside them."""
    if columns == 0:
        return expansion

    def hessian() -> Tensor:
        return functional.pad(expansion.hessian(), (0, columns, 0, columns))

    return expansion._replace(
        gradient=functional.pad(expansion.gradient, (0, columns)),
        hessian=hessian,
        root=lambda: functional.pad(expansion.root(), (0, 0, 0, columns)),
    )


def hessians(function: Callable[[Tensor], Tensor], logits: Tensor) -> Callable[[], Tensor]:
    """∇² of a function logits [n, k] -> [n] at every sample of the clean view, when asked for."""

    def hessian() -> Tensor:
        # Reverse over reverse: torch's forward mode takes two seconds to load and warns while it
        # does.
        second = torch.func.jacrev(torch.func.grad(_one_sample(function)))
        matrices: Tensor = torch.func.vmap(second)(logits[:1].flatten(0, -2))
        return matrices.reshape(*logits[:1].shape, logits.shape[-1])

    return hessian


def _one_sample(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function logits [n, k] -> [n] as one from the logits of a sample [k] to one value []."""

    def one(row: Tensor) -> Tensor:
        value = function(row[None])
        if not isinstance(value, Tensor) or value.shape != (1,):
            got = (
                f"shape {list(value.shape)} for n = 1"
                if isinstance(value, Tensor)
                else type(value).__name__
            )
            raise ValueError(
                f"the loss function must give one value a sample, shape [n], got {got}"
            )
        return value[0]

    return one
