"""Published methods that average or filter weights to keep them near the source's: ROID, and the
filters of Lee and Chang on ROID's loss.
"""

from driftfilter.inference.iterates import ContinualMomentum, LatentWeights, SteadyState
from driftfilter.inference.optimizers import SGD, Adam, GradientStep
from driftfilter.inference.prediction import PriorCorrection
from driftfilter.inference.resets import Upkeep
from driftfilter.model.dynamics import MeanReversion
from driftfilter.model.losses import SoftLikelihoodRatio, Sum
from driftfilter.model.observation import Gibbs
from driftfilter.model.transition import Transition
from driftfilter.model.views import Augmentation, Consistency, ImageViews
from driftfilter.model.weighting import CertaintyDiversity
from driftfilter.recipe import Recipe


def _on_roids_loss(
    rule: Adam | SGD,
    augmentation: Augmentation | None,
    batch_size: int,
    transition: Transition | None = None,
    upkeep: Upkeep | None = None,
) -> Recipe:
    consistency = Consistency(augmentation or ImageViews(), "symmetric", target="moving")
    loss = Sum((SoftLikelihoodRatio(ceiling=0.99), consistency))
    return Recipe(
        observation=Gibbs(loss, CertaintyDiversity(), reference=batch_size, augmented="kept"),
        inference=GradientStep(rule),
        transition=transition or Transition(),
        prediction=PriorCorrection(),
        predict_from="prior",
        upkeep=upkeep,
    )


def roid(
    lr: float = 1e-3,
    rho: float = 0.99,
    augmentation: Augmentation | None = None,
    batch_size: int = 0,
) -> Recipe:
    """ROID, because certain and diverse samples weigh more, the loss is SLR plus symmetric
    cross-entropy to an augmented view of the samples kept (differentiated on both sides), and
    weights revert to the source by 1 - ρ a step: mean reversion, exactly.

    Predicts before the step, with its correction for the batch's class prior. The authors divide
    the loss by the batch size of their configuration: with that ``batch_size`` so does this, for
    batches of no more samples; 0 divides by the samples there are. Their augmentation is another
    one, and samples that are all alike, for which their weights are not numbers, count the same
    here.
    """
    reverting = Transition(MeanReversion(rho))
    return _on_roids_loss(Adam(lr), augmentation, batch_size, reverting)


def cmf(
    lr: float = 1e-3,
    rho: float = 0.99,
    augmentation: Augmentation | None = None,
    batch_size: int = 0,
) -> Recipe:
    """CMF, because a scalar Kalman filter follows the parameters that ROID's loss proposes, and
    pulls them to itself.

    ``batch_size`` and what differs: as in ``roid``. A reset clears the filter's variance, too,
    which the benchmark code forgets.
    """
    return _on_roids_loss(Adam(lr), augmentation, batch_size, upkeep=ContinualMomentum(rho))


def slwi(
    lr: float = 1e-3,
    rho: float = 0.99,
    gain: float = 0.99,
    limit: float = 2.0,
    cut: float = 2.0,
    augmentation: Augmentation | None = None,
    batch_size: int = 0,
) -> Recipe:
    """SLWI, because CMF's filter of latent weights cuts a step of ROID's loss that is not
    stationary, by the filter's own predictive density.

    No code is public, and this follows a summary of the paper: the state-space model, the interval
    of 95 %, steps divided by a number, and the transfer with a fixed gain near 1 are the authors'.
    Chosen here: ``rho``, ``gain`` and the process noise as in ``cmf``; that differences of
    successive log densities are held against the root of their mean square so far; that a step
    which fails is halved. ``batch_size`` and what differs in the loss: as in ``roid``.
    """
    latent = LatentWeights(rho, gain=gain, limit=limit, cut=cut)
    return _on_roids_loss(Adam(lr), augmentation, batch_size, upkeep=latent)


def ssa(
    lr: float = 2.5e-4,
    variance: float = 1e-12,
    moves: int = 96,
    rho: float = 0.99,
    retention: float = 0.94,
    pull: float = 0.01,
    augmentation: Augmentation | None = None,
    batch_size: int = 0,
) -> Recipe:
    """SSA, because steps of ROID's loss are scaled until the mean weight moves with a set variance,
    beside a filter of latent weights with fixed gains.

    SGD with Nesterov momentum 0.9. Rate and variance are the authors', for ImageNet; nothing is
    scaled before ``moves`` + 1 steps. ``batch_size`` and what differs: as in ``roid``.
    """
    steady = SteadyState(variance, moves, rho, retention, pull)
    rule = SGD(lr, momentum=0.9, nesterov=True)
    return _on_roids_loss(rule, augmentation, batch_size, upkeep=steady)
