"""More published methods as their authors write them: plain loops as in gradient_steps.py.

No loss, weighting, rule or statistic of driftfilter is used here; only draws of random numbers are
shared.
"""

import math
from collections.abc import Callable, Iterator
from copy import deepcopy

import torch
from torch import Tensor, nn

from published.gradient_steps import Step, adam, by_batch, entropies, flat, minimise, norms


def come_loss(logits: Tensor) -> Tensor:
    """COME: the entropy of beliefs and uncertainty, the length of the logits detached."""
    length = logits.norm(dim=1, keepdim=True)
    evidence = torch.exp(logits / length * length.detach())
    classes = logits.shape[1]
    total = evidence.sum(1, keepdim=True) + classes
    opinion = torch.cat((evidence / total, classes / total), 1) + 1e-7
    return -(opinion * opinion.log()).sum(1).mean()


def shuffle_patches(images: Tensor, cuts: int, orders: Tensor) -> Tensor:
    """Piece j of an image becomes its piece orders[j], row by row; sizes must divide."""
    size = images.shape[-1] // cuts
    shuffled = torch.empty_like(images)
    for image, new, order in zip(images, shuffled, orders.tolist(), strict=True):
        for place, origin in enumerate(order):
            top, left = place // cuts * size, place % cuts * size
            up, aside = origin // cuts * size, origin % cuts * size
            new[:, top : top + size, left : left + size] = image[
                :, up : up + size, aside : aside + size
            ]
    return shuffled


def deyo_loop(
    model: nn.Module,
    batches: list[Tensor],
    lr: float,
    drop: float,
    margin: float,
    limit: float,
    cuts: int,
    draws: Callable[[int, int], Tensor],
) -> Iterator[Step]:
    """DeYO; ``draws``: a random number for each piece [samples, pieces], by step and samples."""
    model = by_batch(model)
    parameters = norms(model, ("layer4",))
    rule = adam(lr)(parameters)
    for step, batch in enumerate(batches):
        logits = model(batch)
        size = math.log(logits.shape[1])
        certain = torch.where(entropies(logits) < limit * size)[0]
        images = batch[certain]
        with torch.no_grad():
            orders = draws(step, len(images)).argsort(1)
            other = model(shuffle_patches(images, cuts, orders)).softmax(1)
        label = logits[certain].argmax(1, keepdim=True)
        lost = (logits[certain].softmax(1).gather(1, label) - other.gather(1, label))[:, 0]
        second = torch.where(lost > drop)[0]
        losses, lost = entropies(logits)[certain][second], lost[second]
        factor = 1 / torch.exp(losses.detach() - margin * size) + 1 / torch.exp(-lost.detach())
        minimise(rule, (losses * factor).mean())
        note = f"{len(certain)} certain"
        yield Step(flat(parameters), logits.detach().softmax(1), len(second), note=note)


@torch.no_grad()
def lame_loop(
    model: nn.Module, batches: list[Tensor], affinity: str, neighbours: int
) -> Iterator[Step]:
    """LAME, sample by sample; ``kept``: the fixed points until it stands still."""
    body = deepcopy(model).eval()
    head = body.get_submodule("head")
    setattr(body, "head", nn.Identity())  # noqa: B010
    frozen = min(model.parameters(), key=Tensor.numel).detach().flatten()
    for batch in batches:
        features = body(batch)
        p = head(features).softmax(1)
        z = features / features.norm(dim=1, keepdim=True)
        n = len(z)
        apart = torch.stack([(z - row).norm(dim=1) for row in z])
        kernel = torch.zeros(n, n, dtype=p.dtype)
        if affinity == "knn":
            for i in range(n):
                for j in sorted(range(n), key=lambda j, i=i: apart[i, j].item())[1:][:neighbours]:  # type: ignore[misc]
                    kernel[i, j] = 1.0
        elif affinity == "rbf":
            width = torch.stack([row.sort().values[neighbours - 1] for row in apart]).mean()
            kernel = torch.exp(-(apart**2) / (2 * width**2))
        else:
            kernel = z @ z.T
        unary = -torch.log(p + 1e-10)
        labels, before = torch.softmax(-unary, 1), math.inf
        for step in range(100):
            pairwise = kernel @ labels
            labels = torch.softmax(-unary + pairwise, 1)
            energy = (
                (unary * labels - pairwise * labels + labels * torch.log(labels.clip(1e-20)))
                .sum()
                .item()
            )
            if step > 1 and abs(energy - before) <= 1e-8 * abs(before):
                break
            before = energy
        yield Step(frozen, labels, step, note="moved" if (labels - p).abs().max() > 0.1 else "")
