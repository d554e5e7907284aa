"""More published methods: those that look beyond the logits of one batch, and new losses.

As in published.py each is a recipe that says why it is the method it names, at the authors'
hyper-parameters or those of the benchmark code for CIFAR-10-C, and what differs from their code.
"""

from dataclasses import replace
from typing import Literal

from driftfilter.inference.laplacian import LaplacianAdjustment
from driftfilter.inference.linearized import Frozen
from driftfilter.model.looking import ProbabilityDrop
from driftfilter.model.losses import Entropy
from driftfilter.model.observation import Gibbs
from driftfilter.model.opinion import OpinionEntropy
from driftfilter.model.views import PatchShuffle
from driftfilter.networks.parameters import NormAffine, Smallest
from driftfilter.presets.published import tent
from driftfilter.recipe import Recipe


def come(lr: float = 1e-3) -> Recipe:
    """COME, because it is TENT with the entropy of an opinion, which has a share for not knowing,
    in the place of the entropy of the classes.

    The share is that of k classes (the authors' code has 1,000, for ImageNet, where they take SGD
    with momentum 0.9 and 2.5e-4). Their EATA and SAR with this loss also gate by it.
    """
    return replace(tent(lr), observation=Gibbs(OpinionEntropy()))


# Parts of names of the last layers, which the authors leave as they are.
_DEYO_FROZEN = ("*layer4*", "*blocks.9*", "*blocks.10*", "*blocks.11*", "*norm.*", "norm")


def deyo(
    lr: float = 1e-3,
    drop: float = 0.2,
    margin: float = 0.4,
    limit: float = 0.5,
    patches: int = 4,
    frozen: tuple[str, ...] = _DEYO_FROZEN,
) -> Recipe:
    """DeYO, because samples count that are certain and lose probability if their patches are
    shuffled: exp(E₀ - H) + exp d each, and the mean is over the samples kept.

    Adam, as the benchmark code has it for CIFAR-10-C (the authors: SGD with momentum 0.9, 2.5e-4,
    and for ResNet-50 with batch norm ``drop`` 0.3). The last norm layers are ``frozen``, by their
    names. The authors double the rate for batches of one.
    """
    weighting = ProbabilityDrop(PatchShuffle(patches), drop, margin, limit)
    observation = Gibbs(Entropy(), weighting, over="kept")
    return replace(tent(lr), parameters=NormAffine(exclude=frozen), observation=observation)


def lame(affinity: Literal["knn", "rbf", "linear"] = "knn", neighbours: int = 5) -> Recipe:
    """LAME, because no parameter moves, and the labels of a batch are the likely ones that agree
    between samples of like features.

    Batch norm keeps the source's statistics. The paper's best affinity over all of its streams is
    that of 5 nearest neighbours; the default of the authors' code and of the benchmark's is
    "rbf". It is meant for labels that come in runs: shuffled batches lose by it.
    """
    return Recipe(
        parameters=Smallest(),
        statistics="source",
        inference=Frozen(),
        prediction=LaplacianAdjustment(affinity, neighbours),
        predict_from="prior",
    )


MORE = (come, deyo, lame)
