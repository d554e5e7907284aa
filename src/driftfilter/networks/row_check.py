"""Whether rows worked out layer by layer are the gradients of single samples; proved once for each
way a batch goes.

A parameter that is also used elsewhere, through a functional call, has rows that do not add up to
its gradient; a layer that sees samples in another order, or tokens first, gives them to the wrong
samples. Neither can be read off the module.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from driftfilter.networks.autocast import under_autocast


def tolerance_of(dtype: torch.dtype, device: torch.device) -> float:
    """The relative error that is still rounding: a wrong row is off by much more than TF32 or,
    coarser, half precision.
    """
    return 0.1 if dtype in (torch.float16, torch.bfloat16) or under_autocast(device.type) else 0.01


def some(cotangents: Tensor) -> tuple[Tensor, Tensor]:
    """Cotangents [n, k] that ask about half of the samples, and which samples these are [n].

    They are those of one question out of [m, n, k], the one with the largest cotangent. The sample
    of that cotangent is among the half; the others are drawn.
    """
    samples = cotangents.shape[1]
    which, weightiest = divmod(int(cotangents.abs().sum(-1).argmax()), samples)
    asked = torch.rand(samples, generator=torch.Generator().manual_seed(0)) < 0.5
    asked[weightiest], asked[(weightiest + 1) % samples] = True, False
    asked = asked.to(cotangents.device)
    return cotangents[which] * asked[:, None], asked


def wrong_rows(
    rows: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor | None],
    tolerance: float,
    asked: Tensor | None = None,
) -> list[str]:
    """Names of pieces whose rows [n, ...] do not add up to the gradient or, if some samples are
    ``asked`` about [n], do not leave the others out.
    """
    names = [name for name in rows if gradients[name] is not None]
    if not names:
        return []
    errors, sizes = zip(
        *(_error_and_size(rows[name], gradients[name], asked) for name in names), strict=True
    )
    # Gradients that are zero but for rounding (of a bias before a softmax) are held against the
    # others.
    size = torch.stack(sizes)
    wrong = torch.stack(errors) > tolerance * (size + 1e-2 * size.max())
    return [name for name, bad in zip(names, wrong.tolist(), strict=True) if bad]


def _error_and_size(
    rows: Tensor, gradient: Tensor | None, asked: Tensor | None
) -> tuple[Tensor, Tensor]:
    assert gradient is not None
    flat, whole = rows.flatten(1), gradient.flatten().to(rows.dtype)
    error, size = (flat.sum(0) - whole).norm(), flat.abs().sum(0).norm() + whole.norm()
    return error if asked is None else torch.maximum(error, flat[~asked].norm()), size
