"""More published methods as their authors write them: plain loops as in gradient_steps.py.

No loss, weighting, rule or statistic of driftfilter is used here; only draws of random numbers are
shared.
"""

import math
from collections.abc import Callable, Iterator

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
