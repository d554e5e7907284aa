"""More published methods as their authors write them: plain loops as in gradient_steps.py.

No loss, weighting, rule or statistic of driftfilter is used here; only draws of random numbers are
shared.
"""

import torch
from torch import Tensor


def come_loss(logits: Tensor) -> Tensor:
    """COME: the entropy of beliefs and uncertainty, the length of the logits detached."""
    length = logits.norm(dim=1, keepdim=True)
    evidence = torch.exp(logits / length * length.detach())
    classes = logits.shape[1]
    total = evidence.sum(1, keepdim=True) + classes
    opinion = torch.cat((evidence / total, classes / total), 1) + 1e-7
    return -(opinion * opinion.log()).sum(1).mean()
