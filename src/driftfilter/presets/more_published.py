"""More published methods: those that look beyond the logits of one batch, and new losses.

As in published.py each is a recipe that says why it is the method it names, at the authors'
hyper-parameters or those of the benchmark code for CIFAR-10-C, and what differs from their code.
"""

from dataclasses import replace
from typing import Literal

from driftfilter.inference.laplacian import LaplacianAdjustment
from driftfilter.inference.linearized import Frozen
from driftfilter.inference.optimizers import SGD, Adam, GradientStep
from driftfilter.inference.prediction import FromTeacher
from driftfilter.model.batch_losses import CentroidLabel, Contrast, MomentAlignment
from driftfilter.model.buffers import CategoryBalanced, PredictionBalanced
from driftfilter.model.looking import ProbabilityDrop
from driftfilter.model.losses import Entropy, InformationMaximization, Sum
from driftfilter.model.observation import Gibbs, Teacher
from driftfilter.model.opinion import OpinionEntropy
from driftfilter.model.views import Augmentation, Consistency, ImageViews, PatchShuffle
from driftfilter.model.weighting import Recency
from driftfilter.networks.norm_rules import InstanceAware, RobustStatistics
from driftfilter.networks.parameters import AllParameters, NormAffine, Smallest
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


def santa(
    lr: float = 1e-3,
    anchoring: float = 1.0,
    contrast: float = 1.0,
    temperature: float = 0.1,
    augmentation: Augmentation | None = None,
) -> Recipe:
    """SANTA, because predictions of an image and of its augmented copy go to where the source
    network is certain (-Σ p log p_S), and the features of both to each other and to the nearest
    class mean of the source.

    Class means are of source ``data``; without data the second term is left out. The authors' code
    (that of the benchmark) puts a random projector of two layers before the contrast, and trains it
    along; here features are contrasted as they are, as in their code for DomainNet-126. Their
    augmentation is another one.
    """
    views = augmentation or ImageViews()
    aligned = Contrast(views, prototypes=True, temperature=temperature)
    anchored = Consistency(None, "reverse", "soft", copies=0)
    loss = Sum((anchored, aligned), (anchoring, contrast), each_view=True)
    source = Teacher(momentum=1.0, confidence=0.0, copies=1)
    return replace(tent(lr), observation=Gibbs(loss, teacher=source))


def shot(lr: float = 1e-3, weight: float = 0.3, recent: int = 1000) -> Recipe:
    """SHOT, because the loss is information maximisation plus ``weight`` times the cross-entropy to
    the nearest class centroid in features.

    Online, on the norm parameters, and centroids are of the last ``recent`` samples, with features
    as they were. The authors run epochs over the whole target set on the feature extractor, with
    centroids of all of it once an epoch, and add 1e-5 inside the logarithms of the entropies.
    """
    loss = Sum((InformationMaximization(), CentroidLabel(recent)), (1.0, weight))
    return replace(tent(lr), observation=Gibbs(loss))


def tttpp(
    lr: float = 1e-3,
    scale: float = 0.05,
    temperature: float = 0.5,
    queue: int = 0,
    augmentation: Augmentation | None = None,
) -> Recipe:
    """TTT++, because all parameters follow a contrastive loss of two augmented copies of each image
    and the alignment of mean and covariance of the features with the source's.

    Moments are of source ``data``; without data the alignment is left out. The contrast counts
    temperature / 0.07, as in the authors' code. They train a head for it with the source network,
    on whose outputs both terms stand too, normalise both copies of an image together, keep a queue
    of features (``queue``) once it is full, take the source's moments in evaluation mode, and
    run epochs with SGD of momentum 0.9 and 0.01; here it is one step a batch, on the features.
    """
    pairs = Contrast(augmentation or ImageViews(), 2, clean=False, temperature=temperature)
    loss = Sum((pairs, MomentAlignment(queue)), (temperature / 0.07, scale))
    return Recipe(
        parameters=AllParameters(),
        observation=Gibbs(loss),
        inference=GradientStep(SGD(lr, momentum=0.9)),
    )


# The authors' strong augmentation, as far as ImageViews has it.
_STRONG = ImageViews(degrees=15.0, zoom=0.1, brightness=0.4, contrast=0.3)


def rotta(
    lr: float = 1e-3,
    capacity: int = 64,
    every: int = 64,
    momentum: float = 0.05,
    slowness: float = 0.999,
    timeliness: float = 1.0,
    uncertainty: float = 1.0,
    augmentation: Augmentation | None = None,
) -> Recipe:
    """RoTTA, because every 64 samples the student takes a step on a memory that is balanced by
    category, recent and certain: the cross-entropy of augmented samples to a slow teacher's
    prediction of them as they are, recent ones weighing more; batch norm blends its statistics
    slowly, the teacher's and the student's each by itself.

    Predicts each batch with the teacher, before its samples enter the memory. The augmentation
    differs from the authors' (no hue, saturation, gamma and blur; each image draws its own).
    """
    return Recipe(
        statistics=RobustStatistics(momentum),
        observation=Gibbs(
            Consistency(None, "cross_entropy", "soft", copies=0),
            Recency(span=capacity),
            teacher=Teacher(slowness, copies=1, confidence=0.0, own_statistics=True),
            augmentation=augmentation or _STRONG,
        ),
        inference=GradientStep(Adam(lr)),
        prediction=FromTeacher(),
        buffer=CategoryBalanced(capacity, every, timeliness, uncertainty),
    )


def note(
    lr: float = 1e-4,
    capacity: int = 64,
    every: int = 64,
    width: float = 4.0,
    momentum: float = 0.01,
) -> Recipe:
    """NOTE, because every 64 samples Adam takes a step on the entropy of a reservoir with as many
    samples of each predicted class, and batch norm corrects each sample by its own moments where
    chance does not explain them.

    Samples are predicted one by one, by statistics that follow the reservoir; larger batches are
    cut into pieces of ``every`` samples, each predicted before its update. The authors train the
    source network with this batch norm; one that was not loses by it where samples differ much.
    Their mean is also over the classes, which Adam does not see, with 1e-6 inside the logarithm.
    """
    return Recipe(
        statistics=InstanceAware(width, momentum),
        observation=Gibbs(Entropy()),
        inference=GradientStep(Adam(lr)),
        predict_from="prior",
        buffer=PredictionBalanced(capacity, every),
        chunk=every,
    )


MORE = (come, deyo, lame, santa, shot, tttpp, rotta, note)
