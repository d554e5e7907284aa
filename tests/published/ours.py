"""Our own presets as plain loops: carried batch-norm statistics, tapered prior, the loss on every
view, in dense algebra.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from published.filters import norm_names
from published.gradient_steps import Step, assign, flat, norms, slr_each

CONSISTENCY = 0.3  # of the symmetric cross-entropy between two views, as the preset has it
Moments = dict[str, tuple[Tensor, Tensor]]


def renormalised(
    model: nn.Module, batch: Tensor, own: dict[str, Tensor], carried: Moments, share: float
) -> tuple[Tensor, Moments]:
    """Logits where every sample uses norm parameters of its own [n, c], and the statistics to carry
    on.

    Batch renormalisation: (x - m_b)/s_b r + d, r and d constants that make it (x - m)/s.
    """
    blends: Moments = {}
    for name, layer in model.named_children():
        if not isinstance(layer, nn.BatchNorm2d):
            batch = layer(batch)
            continue
        variance, mean = torch.var_mean(batch, (0, 2, 3), correction=0, keepdim=True)
        old_mean, old_variance = carried[name]
        shift = mean.detach() - old_mean
        new_mean = old_mean + share * shift
        new_variance = (
            (1 - share) * old_variance + share * variance.detach() + share * (1 - share) * shift**2
        )
        blends[name] = (new_mean, new_variance)
        deviation = (new_variance + layer.eps).sqrt()
        inside = (variance + layer.eps).sqrt()
        ratio, offset = (inside / deviation).detach(), ((mean - new_mean) / deviation).detach()
        hat = (batch - mean) / inside * ratio + offset
        batch = (
            hat * own[f"{name}.weight"][:, :, None, None] + own[f"{name}.bias"][:, :, None, None]
        )
    return batch, blends


def losses_of(logits: list[Tensor], weights: Tensor, ceiling: float, balance: float) -> Tensor:
    """l_i [n] of every sample: mean over views of the soft likelihood ratio and information
    maximisation, and where there are two views the symmetric cross-entropy between them.
    """
    shares, total = (
        (weights / weights.sum())[:, None],
        torch.zeros(len(weights), dtype=weights.dtype),
    )
    for view in logits:
        p = view.softmax(1)
        mean = (shares * p).sum(0).detach()
        diversity = (p * (mean.log() - view.log_softmax(1))).sum(1)
        total = total + (slr_each(view, ceiling) + balance * diversity) / len(logits)
    if len(logits) == 2:
        one, other = (view.log_softmax(1) for view in logits)
        total = total - CONSISTENCY * ((one.exp() * other).sum(1) + (other.exp() * one).sum(1)) / 2
    return total


def own_loop(
    model: nn.Module,
    batches: list[Tensor],
    mirrored: bool,
    beta: float,
    variance: float,
    taper: float,
    rho: float,
    ceiling: float,
    balance: float,
    radius: float,
    temperature: float | None,
    momentum: float,
    diversity: float,
) -> Iterator[Step]:
    parameters, names = norms(model), norm_names(model)
    source, here = flat(parameters), flat(parameters)
    layers = [name.partition(".")[0] for name in names]
    depth = [
        1 - sorted(set(layers), key=layers.index).index(name) / len(set(layers)) for name in layers
    ]
    prior = torch.cat(
        [
            torch.full_like(p.flatten(), variance * d**taper)
            for p, d in zip(parameters, depth, strict=True)
        ]
    )
    carried: Moments = {}
    for name, layer in model.named_children():
        if isinstance(layer, nn.BatchNorm2d):
            assert layer.running_mean is not None
            assert layer.running_var is not None
            carried[name] = (
                layer.running_mean[None, :, None, None],
                layer.running_var[None, :, None, None],
            )
    share = momentum * min(1, len(batches[0]) / 64)
    fading, sums = 1 - len(batches[0]) / 100, torch.zeros(2)
    for batch in batches:
        here = rho * here + (1 - rho) * source
        pieces = here.split([p.numel() for p in parameters])
        leaves = [piece.expand(len(batch), -1).clone().requires_grad_() for piece in pieces]
        own = dict(zip(names, leaves, strict=True))
        views = [batch, batch.flip(-1)] if mirrored else [batch]
        passes = [renormalised(model, view, own, carried, share) for view in views]
        logits = [view for view, _ in passes]
        p = logits[0].detach().softmax(1)
        k, n = p.shape[1], len(batch)
        weights = beta * (1 - torch.special.entr(p).sum(1) / math.log(k))
        energy = (weights * losses_of(logits, weights, ceiling, balance)).sum() / max(n, 100)
        slopes = torch.stack(torch.autograd.grad(energy, logits, retain_graph=True)).sum(0)
        rows = torch.cat(torch.autograd.grad(energy, leaves), 1)
        sums = fading * sums + torch.stack(((rows**2 * prior).sum(), (slopes**2).sum()))
        moderated = (1 + math.pi / 4 * 0.01 * sums[0].item() / sums[1].item()) ** 0.5
        covariance = 1 / (1 / prior + (rows**2).sum(0) / (weights.mean() / max(n, 100)))
        step = covariance * rows.sum(0)
        length = ((rows @ step) / (weights.mean() / max(n, 100)).sqrt()).norm()
        here = here - step * min(1.0, radius / length.item())
        carried = passes[0][1]
        seen = torch.special.entr(p.mean(0)).sum().exp().item() / (k * (1 - (1 - 1 / k) ** n))
        share = momentum * min(1, n / 64) * min(1, seen) ** diversity
        mean = torch.stack(logits).mean(0).detach()
        yield Step(
            here,
            functional.softmax(mean / (temperature or moderated), 1),
            covariance=torch.diag(covariance),
        )
    assign(parameters, source)
