"""More published methods: those that look beyond the logits of one batch, and new losses.

As in published.py each is a recipe that says why it is the method it names, at the authors'
hyper-parameters or those of the benchmark code for CIFAR-10-C, and what differs from their code.
"""

from dataclasses import replace

from driftfilter.model.observation import Gibbs
from driftfilter.model.opinion import OpinionEntropy
from driftfilter.presets.published import tent
from driftfilter.recipe import Recipe


def come(lr: float = 1e-3) -> Recipe:
    """COME, because it is TENT with the entropy of an opinion, which has a share for not knowing,
    in the place of the entropy of the classes.

    The share is that of k classes (the authors' code has 1,000, for ImageNet, where they take SGD
    with momentum 0.9 and 2.5e-4). Their EATA and SAR with this loss also gate by it.
    """
    return replace(tent(lr), observation=Gibbs(OpinionEntropy()))


MORE = (come,)
