"""Our own presets as plain loops: carried batch-norm statistics, tapered prior, the loss on every
view, in dense algebra.
"""

import math
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from oracles import ClassOffsets, LabelRuns
from published.filters import norm_names
from published.gradient_steps import Step, assign, flat, norms, slr_each

LATE = 0.3  # of the share of a batch in the layers behind the first 45 %
CONSISTENCY = 0.3  # of the symmetric cross-entropy between two views, as the preset has it
Moments = dict[str, tuple[Tensor, Tensor]]


def mix(old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], share: float) -> Any:
    """Mean and variance of a mixture."""
    shift = new[0] - old[0]
    spread = (1 - share) * old[1] + share * new[1] + share * (1 - share) * shift**2
    return old[0] + share * shift, spread


def least_share(
    batch: Tensor, old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], eps: float
) -> float:
    """What the first batch norm says of a change of domain."""
    before, after = old[1] + eps, new[1] + eps
    between = (batch.mean((2, 3), keepdim=True).var(0, correction=0)[None] / after).clamp(0.05, 1)
    shift = (new[0] - old[0]) ** 2 / (between * torch.maximum(before, after))
    moved = (shift + (1 - between) * (after / before).log() ** 2).mean().item()
    n = len(batch)
    return min(1.0, max(0.0, moved / (1 + 8 / n) - 1)) * min(1, n / 16)


def renormalised(
    model: nn.Module, batch: Tensor, own: dict[str, Tensor], carried: Moments, share: float
) -> tuple[Tensor, Moments, float]:
    """Logits where every sample uses norm parameters of its own [n, c], the statistics of the batch
    and the least share that they have.

    Batch renormalisation: (x - m_b)/s_b r + d, r and d constants that make it (x - m)/s.
    """
    found: Moments = {}
    least = 0.0
    for name, layer in model.named_children():
        if not isinstance(layer, nn.BatchNorm2d):
            batch = layer(batch)
            continue
        variance, mean = torch.var_mean(batch, (0, 2, 3), correction=0, keepdim=True)
        new = (mean.detach(), variance.detach())
        if not found:
            least = least_share(batch.detach(), carried[name], new, layer.eps)
        found[name] = new
        new_mean, new_variance = mix(carried[name], new, max(late(name, carried) * share, least))
        deviation = (new_variance + layer.eps).sqrt()
        inside = (variance + layer.eps).sqrt()
        ratio, offset = (inside / deviation).detach(), ((mean - new_mean) / deviation).detach()
        hat = (batch - mean) / inside * ratio + offset
        batch = (
            hat * own[f"{name}.weight"][:, :, None, None] + own[f"{name}.bias"][:, :, None, None]
        )
    return batch, found, least


def late(name: str, carried: Moments) -> float:
    """By what the share of a batch is multiplied in a layer."""
    return 1.0 if list(carried).index(name) < 0.45 * len(carried) else LATE


def losses_of(
    logits: list[Tensor], weights: Tensor, ceiling: float, balance: float, softening: float
) -> Tensor:
    """l_i [n] of every sample: mean over views of the soft likelihood ratio and information
    maximisation of softer predictions, and where there are two views the symmetric cross-entropy
    between them, as they are.
    """
    shares, total = (
        (weights / weights.sum())[:, None],
        torch.zeros(len(weights), dtype=weights.dtype),
    )
    for view in [own / softening for own in logits]:
        p = view.softmax(1)
        mean = (shares * p).sum(0).detach()
        diversity = (p * (mean.log() - view.log_softmax(1))).sum(1)
        total = total + (slr_each(view, ceiling) + balance * diversity) / len(logits)
    if len(logits) == 2:
        one, other = (view.log_softmax(1) for view in logits)
        total = total - CONSISTENCY * ((one.exp() * other).sum(1) + (other.exp() * one).sum(1)) / 2
    return total


def centre(views: list[Tensor], offsets: ClassOffsets) -> list[Tensor]:
    """Logits of every view without offsets, which remember the first alone."""
    copies = [offsets, *(deepcopy(offsets) for _ in views[1:])]
    return [
        view - torch.tensor(view.detach().numpy() - own.center(view.detach().numpy()))
        for view, own in zip(views, copies, strict=True)
    ]


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
    softening: float,
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
    full, trust = momentum * min(1, len(batches[0]) / 64), 1.0
    fading, sums = 1 - len(batches[0]) / 100, torch.zeros(2)
    classes = model(batches[0]).shape[1]
    offsets = ClassOffsets(np.full(classes, 1 / classes), 30.0, 2000.0, 0.75)
    for batch in batches:
        kept = rho ** min(1.0, len(batch) / 100)
        here = kept * here + (1 - kept) * source
        pieces = here.split([p.numel() for p in parameters])
        leaves = [piece.expand(len(batch), -1).clone().requires_grad_() for piece in pieces]
        own = dict(zip(names, leaves, strict=True))
        views = [batch, batch.flip(-1)] if mirrored else [batch]
        passes = [renormalised(model, view, own, carried, full * trust) for view in views]
        logits = centre([view for view, _, _ in passes], offsets)
        p = logits[0].detach().softmax(1)
        k, n = p.shape[1], len(batch)
        weights = beta * (1 - torch.special.entr(p).sum(1) / math.log(k))
        energy = (weights * losses_of(logits, weights, ceiling, balance, softening)).sum() / max(
            n, 100
        )
        slopes = torch.stack(torch.autograd.grad(energy, logits, retain_graph=True)).sum(0)
        rows = torch.cat(torch.autograd.grad(energy, leaves), 1)
        sums = fading * sums + torch.stack(((rows**2 * prior).sum(), (slopes**2).sum()))
        moderated = (1 + math.pi / 4 * 0.01 * sums[0].item() / sums[1].item()) ** 0.5
        covariance = 1 / (1 / prior + (rows**2).sum(0) / (weights.mean() / max(n, 100)))
        step = covariance * rows.sum(0)
        least = 0.004 * min(1.0, n / 100) * here.norm()
        step = step * (least / step.norm()).clamp(1, 30)
        length = ((rows @ step) / (weights.mean() / max(n, 100)).sqrt()).norm()
        bound = radius * min(1.0, n / 100)
        here = here - step * min(1.0, bound / length.item())
        raw = passes[0][0].detach().softmax(1)  # statistics know nothing of offsets
        seen = torch.special.entr(raw.mean(0)).sum().exp().item() / (k * (1 - (1 - 1 / k) ** n))
        before, trust = trust, min(1, seen) ** diversity
        share, least = full * (before * trust) ** 0.5, passes[0][2]
        carried = {
            name: mix(carried[name], new, max(late(name, carried) * share, least))
            for name, new in passes[0][1].items()
        }
        mean = torch.stack(logits).mean(0).detach()
        yield Step(
            here,
            functional.softmax(mean / (temperature or moderated), 1),
            covariance=torch.diag(covariance),
        )
    assign(parameters, source)


# Without batch normalisation ----------------------------------------------------------------------


def regrouped(model: nn.Module, norm: bool = True) -> nn.Module:
    """A copy with group norms, or none, in place of batch norms."""
    copy = deepcopy(model).eval()
    for name, layer in model.named_children():
        if isinstance(layer, nn.BatchNorm2d):
            other = nn.GroupNorm(1, layer.num_features).double()
            other.load_state_dict({"weight": layer.weight, "bias": layer.bias})
            setattr(copy, name, other if norm else nn.Identity())
    return copy


def individual_logits(model: nn.Module, batch: Tensor, own: Tensor) -> Tensor:
    """Logits if every sample uses group-norm parameters of its own, or without these a head of its
    own [n, d].
    """
    start = 0
    norms_here = any(isinstance(layer, nn.GroupNorm) for layer in model.children())
    for layer in model.children():
        if isinstance(layer, nn.GroupNorm):
            width = layer.num_channels
            weight, bias = own[:, start : start + 2 * width].split(width, 1)
            start += 2 * width
            hat = functional.group_norm(batch, 1, eps=layer.eps)
            batch = hat * weight[:, :, None, None] + bias[:, :, None, None]
        elif isinstance(layer, nn.Linear) and not norms_here:
            rows = own.unflatten(1, (layer.out_features, -1))  # of each class bias, then weights
            batch = rows[:, :, 0] + (rows[:, :, 1:] @ batch[:, :, None])[:, :, 0]
        else:
            batch = layer(batch)
    return batch


def start_of(model: nn.Module, variance: float, taper: float) -> tuple[Tensor, Tensor]:
    """Parameters and their prior variances: of group norms, relative to their size and earlier ones
    wider, or of the head.
    """
    layers = [layer for layer in model.children() if isinstance(layer, nn.GroupNorm)]
    if not layers:
        head = next(layer for layer in model.children() if isinstance(layer, nn.Linear))
        mean = torch.cat((head.bias[:, None], head.weight), 1).detach().flatten()
        return mean, torch.full_like(mean, variance)
    mean = flat(piece for layer in layers for piece in (layer.weight, layer.bias))
    sizes = [max((p**2).mean().item() for p in (at.weight, at.bias)) for at in layers]
    least = sum(sizes) / len(sizes) / 100
    spread = [
        layer.weight.new_full(
            (2 * layer.num_channels,), variance * max(size, least) * (1 - at / len(layers)) ** taper
        )
        for at, (layer, size) in enumerate(zip(layers, sizes, strict=True))
    ]
    return mean, torch.cat(spread)


def other_loop(
    model: nn.Module,
    batches: list[Tensor],
    mirrored: bool,
    beta: float,
    variance: float,
    taper: float,
    rho: float,
    radius: float,
    limit: float,
    temperature: float | None,
) -> Iterator[Step]:
    """Class offsets, the information of the last 200 samples and labels in runs, in NumPy; the rest
    as in ``own_loop``.
    """
    source, prior = start_of(model, variance, taper)
    by_norms = any(isinstance(layer, nn.GroupNorm) for layer in model.children())
    reference = 200 if by_norms else 100
    here, k = source, model(batches[0]).shape[1]
    offsets, runs = ClassOffsets(np.full(k, 1 / k), 30.0, 2000.0, 0.75), LabelRuns(k)
    mean, square = torch.full((k,), 1 / k, dtype=torch.float64), None
    fading, sums = 1 - len(batches[0]) / 100, torch.zeros(2)
    for batch in batches:
        kept = rho ** min(1.0, len(batch) / reference)
        here = kept * here + (1 - kept) * source
        leaf = here.expand(len(batch), -1).clone().requires_grad_()
        views = [batch, batch.flip(-1)] if mirrored else [batch]
        logits = centre([individual_logits(model, view, leaf) for view in views], offsets)
        clean, n = logits[0].detach(), len(batch)
        spread = clean.var(1, correction=0).mean()
        share = n / 200
        square = spread if square is None else (1 - share) * square + share * spread
        usual, least = (2.4, 0.25) if by_norms else (4, 1.0)
        sharp = min(8.0, max(least, usual / square.item() ** 0.5))
        mean = (1 - share) * mean + share * (sharp * clean).softmax(1).mean(0)
        runs.count(clean.argmax(1).tolist())
        weight = beta * runs.trust()
        losses = torch.zeros(n).double()
        for each in logits:
            logp = (sharp * each).log_softmax(1)
            losses = losses + (logp.exp() * (mean.log() - logp)).sum(1) / len(logits)
        if mirrored:
            one, other = (view.log_softmax(1) for view in logits)
            both = (one.exp() * other).sum(1) + (other.exp() * one).sum(1)
            losses = losses - CONSISTENCY * both / 2
        energy = weight * losses.sum() / max(n, reference)
        slopes = torch.stack(torch.autograd.grad(energy, logits, retain_graph=True)).sum(0)
        (rows,) = torch.autograd.grad(energy, leaf)
        known = torch.full_like(prior, 0.06) if by_norms else prior
        along, length = (rows**2 * known).sum(), (slopes**2).sum()
        sums = fading * sums + torch.stack((along, length))
        moderated = (1 + math.pi / 4 * 0.01 * sums[0].item() / sums[1].item()) ** 0.5
        scale = weight / max(n, reference)
        covariance = torch.diag(1 / (1 / prior + (rows**2).sum(0) / scale))
        part = min(1.0, n / reference)
        step, bound = covariance @ rows.sum(0), radius * part
        if limit:
            step = step * min(1.0, (limit * part**0.5 * here.norm() / step.norm()).item())
        here = here - step * min(1.0, bound / ((rows @ step) / scale**0.5).norm().item())
        predicted = torch.stack(logits).mean(0).detach() / (temperature or moderated)
        yield Step(here, predicted.softmax(1), covariance=covariance)
