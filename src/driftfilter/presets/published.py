"""Published methods as compositions: each is a recipe, and says why it is the method it names.

Hyper-parameters are the authors', or those of the benchmark code for CIFAR-10-C if the authors
have none. What differs from the authors' code stands in the docstring. More of them, which look
beyond the logits of one batch, are in more_published.py.
"""

from dataclasses import replace
from typing import Any

from driftfilter.inference.linearized import Frozen
from driftfilter.inference.optimizers import SGD, Adam, GradientStep
from driftfilter.inference.prediction import FromTeacher, MonteCarlo
from driftfilter.inference.resets import (
    ResetBelow,
    ResetEvery,
    RestoreIrrelevant,
    RestoreRandomly,
)
from driftfilter.model.dynamics import MeanReversion, RandomWalk
from driftfilter.model.losses import (
    ConjugatePseudoLabel,
    Entropy,
    GeneralizedCrossEntropy,
    InformationMaximization,
    Loss,
    PseudoLabel,
    SoftLikelihoodRatio,
)
from driftfilter.model.noise import Isotropic
from driftfilter.model.observation import Gibbs, Teacher
from driftfilter.model.transition import Transition
from driftfilter.model.views import Augmentation, Consistency, ImageViews, MarginalEntropy
from driftfilter.model.weighting import DiversityGate, EntropyGate, Product
from driftfilter.networks.batch_norm import PseudoCount, RunningStatistics, Statistics
from driftfilter.networks.lora import LoRA
from driftfilter.networks.parameters import AllParameters, NormAffine, Smallest
from driftfilter.networks.prototypes import Mixture, Prototypes, Supports
from driftfilter.presets.weight_filters import cmf, roid, slwi, ssa
from driftfilter.recipe import Recipe
from driftfilter.source.posterior import Gaussian, Laplace


def _descent(loss: Loss, lr: float, **others: Any) -> Recipe:
    """Adam on the mean loss of a batch, from a point mass, predicting before the step: what most
    methods share.
    """
    return replace(
        Recipe(observation=Gibbs(loss), inference=GradientStep(Adam(lr)), predict_from="prior"),
        **others,
    )


def source() -> Recipe:
    """The model as it was trained, because nothing is learned and batch normalisation keeps the
    source's statistics.
    """
    return Recipe(Smallest(), statistics="source", inference=Frozen(), predict_from="prior")


def bn(statistics: Statistics = "batch") -> Recipe:
    """BN adaptation, because only the statistics of batch normalisation follow the stream.

    ``PseudoCount(16)`` is Schneider et al.'s blend with the source (with the mixture's variance
    term, which most code omits), ``Ema(0.1)`` carried statistics of ours (``bn_ema`` has the
    published ones).
    """
    return Recipe(Smallest(), statistics=statistics, inference=Frozen(), predict_from="prior")


def bn_ema(momentum: float = 0.1) -> Recipe:
    """BN-EMA, because batch normalisation goes on with its running statistics as in training, and
    predicts by them: ``RunningStatistics``.

    The authors' code takes each layer's own momentum, which is 0.1 unless a network says otherwise,
    and puts the whole network into training mode for the first pass, so that dropout draws there.
    """
    return bn(RunningStatistics(momentum))


def tent(lr: float = 1e-3) -> Recipe:
    """TENT, because the mean of a point mass over the norm parameters takes Adam's step on the mean
    entropy.

    As a filter it would be exact for SGD without momentum only: Σ⁻ = lr I, F = 0. The model stays
    in evaluation mode.
    """
    return _descent(Entropy(), lr)


def pl(lr: float = 1e-3, threshold: float = 0.9) -> Recipe:
    """Pseudo-labels, because the loss is the cross-entropy to the most likely class, over samples
    confident enough.
    """
    return _descent(
        PseudoLabel(threshold), lr, observation=Gibbs(PseudoLabel(threshold), over="kept")
    )


def rpl(lr: float = 1e-3, q: float = 0.8) -> Recipe:
    """Robust pseudo-labels, because the loss is the generalised cross-entropy (1 - p^q) / q of the
    most likely class.
    """
    return _descent(GeneralizedCrossEntropy(q), lr)


def conjugate(lr: float = 1e-3, epsilon: float = 0.0) -> Recipe:
    """Conjugate pseudo-labels, because the loss is the conjugate of the source's (ε = 0:
    cross-entropy, ε = 6: PolyLoss).

    For ε = 0 it is the entropy. SGD with Nesterov momentum 0.9; predicts after the step, as the
    authors do.
    """
    rule = GradientStep(SGD(lr, momentum=0.9, nesterov=True))
    return Recipe(observation=Gibbs(ConjugatePseudoLabel(epsilon)), inference=rule)


def shot_im(lr: float = 1e-3) -> Recipe:
    """SHOT-IM, because the loss is the information maximisation mean H(p_i) - H(p̄) and the head
    stays.

    Online, on the norm parameters (the authors: offline epochs on the whole feature extractor, 1e-5
    inside the logarithms).
    """
    return _descent(InformationMaximization(), lr)


def eta(lr: float = 1e-3, margin: float = 0.4, similarity: float = 0.4) -> Recipe:
    """ETA, because samples that are uncertain or like those before are left out, and others count
    exp(E₀ - H).

    The mean is over the samples kept. ImageNet: similarity 0.05, SGD 2.5e-4. Where none is kept the
    authors skip the step; here the transition still applies, which for a random walk is the same.
    """
    gates = Product((EntropyGate(margin), DiversityGate(similarity)))
    return _descent(Entropy(), lr, observation=Gibbs(Entropy(), gates, over="kept"))


def eata(
    lr: float = 1e-3, margin: float = 0.4, similarity: float = 0.4, alpha: float = 1.0
) -> Recipe:
    """EATA, because it is ETA with the gradient of α Σ_j F_j (θ_j - θ_Sj)², a Gaussian source
    posterior as fixed anchor.

    F is the authors' Fisher from unlabeled source ``data`` (2,000 samples in their code): the mean
    over batches of the squared gradient of the batch's mean cross-entropy to its own labels.
    Without data it is ETA. ImageNet: α = 2000. A step that keeps no sample does not pull either, as
    theirs.
    """
    fisher = Laplace(per="batch", scale="mean", precision=1e-12, labels="predicted")
    anchored = GradientStep(Adam(lr), anchor=2 * alpha)
    return replace(eta(lr, margin, similarity), source=fisher, inference=anchored)


def ewc(lr: float = 1e-3, strength: float = 10.0) -> Recipe:
    """EWC, because the loss of the new task, here the entropy, has the gradient of λ/2 Σ_j F_j (θ_j
    - θ_Sj)² added: a Gaussian source posterior as fixed anchor.

    F is the Fisher information of the trained network, the mean over source ``data``, exact over
    their labels (none are needed). Without data it is TENT. The authors train on a labelled task;
    what takes its place is chosen here, and λ is: on speckle noise, blur, saturation and spatter.
    """
    fisher = Laplace(scale="mean", precision=1e-12)
    return _descent(Entropy(), lr, source=fisher, inference=GradientStep(Adam(lr), anchor=strength))


def slr(lr: float = 1e-3) -> Recipe:
    """Soft likelihood ratio, because that is the loss, bounded at p = 0.99 as ROID's code has
    it.
    """
    return _descent(SoftLikelihoodRatio(ceiling=0.99), lr)


def cotta(
    lr: float = 1e-3,
    momentum: float = 0.999,
    restore: float = 0.01,
    confidence: float = 0.92,
    copies: int = 32,
    augmentation: Augmentation | None = None,
) -> Recipe:
    """CoTTA, because all parameters follow the cross-entropy to a slow teacher, which is averaged
    over augmentations if the source is unsure, and each parameter goes back to its source value
    with probability 0.01 after a step.

    Predicts with the teacher. The augmentation differs from the authors' (no hue, saturation and
    blur).
    """
    teacher = Teacher(momentum, augmentation or ImageViews(), copies, confidence)
    return _descent(
        Entropy(),
        lr,
        parameters=AllParameters(),
        observation=Gibbs(Consistency(None, "cross_entropy", "soft", copies=0), teacher=teacher),
        prediction=FromTeacher(),
        upkeep=RestoreRandomly(restore),
    )


def petal(
    lr: float = 1e-3,
    strength: float = 1e-9,
    quantile: float = 0.03,
    momentum: float = 0.999,
    confidence: float = 0.92,
    copies: int = 32,
    augmentation: Augmentation | None = None,
) -> Recipe:
    """PETAL, because it is CoTTA with the pull λ Λ_S (θ - θ_S) of a Gaussian source posterior, and
    restores the parameters whose squared gradient is below its 3 % quantile.

    Λ_S is a diagonal Laplace posterior from source ``data``, while the authors retrain with SWAG;
    without data λ = 0.
    """
    recipe = cotta(lr, momentum, 0.0, confidence, copies, augmentation)
    anchored = GradientStep(Adam(lr), anchor=strength, keep_gradient=True)
    return replace(recipe, source=Laplace(), inference=anchored, upkeep=RestoreIrrelevant(quantile))


def bacs(
    lr: float = 1e-3, strength: float = 1e-4, samples: int = 10, precision: float = 100.0
) -> Recipe:
    """BACS, because the entropy is minimised under a Gaussian source posterior as anchor, and an
    ensemble predicts.

    One posterior with ``samples`` draws of the same covariance, while the authors adapt each member
    of an ensemble (of SWAG posteriors) by itself; a diagonal Laplace posterior from source
    ``data``. Without data it is TENT.
    """
    posterior, anchored = Laplace(precision=precision), GradientStep(Adam(lr), anchor=strength)
    return _descent(
        Entropy(), lr, source=posterior, inference=anchored, prediction=MonteCarlo(samples)
    )


_SAR_FROZEN = (
    "*layer4*",
    "*blocks.9*",
    "*blocks.10*",
    "*blocks.11*",
    "norm",
)  # anywhere in a name, as theirs


def sar(
    lr: float = 2.5e-4,
    margin: float = 0.4,
    radius: float = 0.05,
    loss: float = 0.2,
    frozen: tuple[str, ...] = _SAR_FROZEN,
) -> Recipe:
    """SAR, because the gradient of the entropy of reliable samples is taken at the worst point
    within a radius, on the samples still reliable there, and a running loss below a threshold
    resets the model.

    Below 32 samples the rate shrinks in proportion (the authors double it again for one sample).
    The last norm layers are ``frozen``, by their names. A reset keeps the momentum, as the authors'
    code does, and clears the running loss (their code means to, and writes it back). A step that
    keeps no sample does nothing (theirs goes on along the momentum). The threshold 0.2 and the
    learning rate are for 1,000 classes.
    """
    return Recipe(
        parameters=NormAffine(exclude=frozen),
        observation=Gibbs(Entropy(), EntropyGate(margin, weighted=False), over="kept"),
        inference=GradientStep(SGD(lr, momentum=0.9), radius=radius, reference=32),
        predict_from="prior",
        upkeep=ResetBelow(loss, keep_optimizer=True),
    )


def memo(lr: float = 5e-3, copies: int = 32, augmentation: Augmentation | None = None) -> Recipe:
    """MEMO, because every sample is an episode of its own (ρ = 0 returns to the source before it):
    one SGD step of all parameters on the entropy of the mean prediction over augmentations, then
    its prediction.

    Batch normalisation counts the source as 16 samples, and sees one view at a time, while the
    authors normalise all views of a sample together. The authors' augmentation is AugMix.
    """
    return Recipe(
        parameters=AllParameters(),
        statistics=PseudoCount(16),
        transition=Transition(MeanReversion(0.0)),
        observation=Gibbs(MarginalEntropy(augmentation or ImageViews(), copies)),
        inference=GradientStep(SGD(lr)),
        chunk=1,
    )


def lora(
    rank: int = 4, lr: float = 1e-2, copies: int = 8, augmentation: Augmentation | None = None
) -> Recipe:
    """LoRA-TTT's frame, because new low-rank weights that start at B = 0 take one step on the
    marginal entropy of each sample and are dropped (ρ = 0). The authors add a masked-image loss on
    CLIP; rank and rate are ours.
    """
    return replace(memo(lr, copies, augmentation), parameters=LoRA(rank))


def t3a(capacity: int = 100) -> Recipe:
    """T3A, because each class is the mean direction of the rows of the source head and of the
    confident features that the head called by its name, the ``capacity`` of lowest entropy (0: all
    of them, which is the conjugate von Mises–Fisher update).

    A row that the head calls another class is filed there, as in the authors' code. Their code for
    "all of them" drops the least certain support of each class at every call.
    """
    return Recipe(
        parameters=Prototypes("inner_product", filed=True),
        statistics="source",
        observation=Gibbs(Entropy()),
        inference=Supports(capacity),
    )


def stad(
    concentration: float = 1.0, variance: float = 0.1, drift: float = 1e-4, iterations: int = 3
) -> Recipe:
    """STAD with Gaussian prototypes, because they drift by a random walk and features are a mixture
    around them: EM gives the shares, the conjugate update the posterior.

    A window of one batch (the authors smooth over three); κ and the noise are fixed, while the
    authors fit them.
    """
    return Recipe(
        parameters=Prototypes("gaussian", concentration, centered=True),
        statistics="source",
        source=Gaussian(variance),
        transition=Transition(RandomWalk(), Isotropic(drift)),
        inference=Mixture(iterations),
    )


def stad_vmf(
    concentration: float = 10.0,
    transition: float = 1000.0,
    strength: float = 1000.0,
    iterations: int = 3,
) -> Recipe:
    """STAD with von Mises–Fisher prototypes, because it is the same on the sphere, the transition
    of concentration κ_trans.
    """
    return Recipe(
        parameters=Prototypes("von_mises_fisher", concentration, strength, centered=True),
        statistics="source",
        inference=Mixture(iterations, transition_concentration=transition),
    )


def rdumb(
    steps: int = 1000, lr: float = 1e-3, margin: float = 0.4, similarity: float = 0.4
) -> Recipe:
    """RDumb, because it is ETA that starts again every 1,000 updates."""
    return replace(eta(lr, margin, similarity), upkeep=ResetEvery(steps))


PUBLISHED = (
    source,
    bn,
    bn_ema,
    tent,
    pl,
    rpl,
    conjugate,
    shot_im,
    eta,
    eata,
    ewc,
    slr,
    roid,
    cmf,
    slwi,
    ssa,
    cotta,
    petal,
    bacs,
    sar,
    memo,
    lora,
    t3a,
    stad,
    stad_vmf,
    rdumb,
)
