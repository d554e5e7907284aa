"""One step of many streams in batched torch algebra, on any device, by the rules of one filter.

What looks at one stream alone, transition, energy, curvature and prediction, is mapped over the
streams; the Newton step takes beliefs with a leading dimension.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from driftfilter.base.checks import NotFiniteError, NotPositiveDefiniteError, unchecked
from driftfilter.base.randomness import Randomness
from driftfilter.filtering import Filter
from driftfilter.gaussian.belief import Belief
from driftfilter.gaussian.diagonal import Diagonal
from driftfilter.gaussian.full import Full
from driftfilter.inference.linearized import Bounds, newton_step
from driftfilter.inference.prediction import Query
from driftfilter.model.closed_forms import share_of
from driftfilter.model.losses import Loss
from driftfilter.model.observation import Samples, evaluate
from driftfilter.model.predictive import PredictiveModel
from driftfilter.model.transition import BoundTransition

Pair: TypeAlias = tuple[Tensor, Tensor]


def step_batched(
    filt: Filter, transition: BoundTransition, x: Tensor, mean: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Means [m, d] and covariances [m, d] or [m, d, d] after a batch [m, n, D] of each stream;
    log-probabilities and logit variances [m, n, k].
    """
    structure = Full if values.dim() == 3 else Diagonal
    radius: float = filt.inference.radius  # type: ignore[attr-defined]
    bounds = Bounds(radius * share_of(x.shape[1], filt.observation.reference))
    look, predict = _energy(filt, transition, structure), _prediction(filt, structure)
    mean, values, logits, gradient, factor = torch.func.vmap(look)(mean, values, x)
    good = torch.isfinite(logits.sum((1, 2)))  # a finite sum proves it, at the cost of one pass
    if not bool(good.all()) and not bool(torch.isfinite(logits).all()):
        raise NotFiniteError(
            f"the model's logits must be finite; not so for {int((~good).sum())} of {len(good)} "
            f"streams, the first at place {int(good.int().argmin())}"
        )
    try:
        posterior = newton_step(_belief(structure, mean, values), gradient, factor, bounds)
    except (NotFiniteError, NotPositiveDefiniteError):
        for place in range(len(mean)):
            prior = _belief(structure, mean[place], values[place])
            try:
                newton_step(prior, gradient[place], factor[place], bounds)
            except (NotFiniteError, NotPositiveDefiniteError) as error:
                raise type(error)(f"{error}; in the stream at place {place}") from error
        raise
    after, left = posterior.mean, _values(posterior)
    if filt.predict_from == "prior":
        return after, left, *torch.func.vmap(predict)(mean, values, x)
    return after, left, *torch.func.vmap(predict)(after, left, x)


def _belief(structure: type[Full | Diagonal], mean: Tensor, values: Tensor) -> Belief:
    field = "matrix" if structure is Full else "values"
    return unchecked(Belief, mean=mean, covariance=unchecked(structure, **{field: values}))


def _values(belief: Belief) -> Tensor:
    """A dense covariance as its matrix, a diagonal one as its variances."""
    covariance = belief.covariance
    return covariance.matrix if isinstance(covariance, Full) else covariance.variance()


def _energy(
    filt: Filter, transition: BoundTransition, structure: type[Full | Diagonal]
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]:
    """Prior mean and covariance of one stream, its logits, and gradient and curvature there."""
    observation, curvature = filt.observation, filt.inference.curvature
    loss: Loss = observation.loss  # type: ignore[assignment]  # as_loss in Gibbs
    model: PredictiveModel = filt.logits  # type: ignore[assignment]  # lifted in Filter

    def look(mean: Tensor, values: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        prior = transition(_belief(structure, mean, values))
        logits, pullback = model.pullback(prior.mean, x)
        targets = loss.targets(logits)
        selected = loss.selected(targets)
        start = torch.ones_like(logits[:, 0]) if selected is None else selected
        weights, _ = observation.weighting(logits, start, {})
        used = (weights != 0).sum()
        # With coefficients of 0 a stream learns nothing.
        coefficients = observation.coefficients(weights, used) * (used >= filt.needed)
        samples = Samples(targets, weights, coefficients, x.shape[0])
        evaluation = evaluate(loss, [(logits, pullback)], samples, keeps_rows=True)
        return prior.mean, _values(prior), logits, *curvature(evaluation)

    return look


def _prediction(
    filt: Filter, structure: type[Full | Diagonal]
) -> Callable[[Tensor, Tensor, Tensor], Pair]:
    """Log-probabilities and logit variances of one stream."""
    model: PredictiveModel = filt.logits  # type: ignore[assignment]  # lifted in Filter

    def predict(mean: Tensor, values: Tensor, x: Tensor) -> Pair:
        query = Query(model, x, Randomness(0, 0, x.device))  # no rule that is covered draws
        prediction = filt.prediction(_belief(structure, mean, values), query)
        return prediction.log_probabilities, prediction.logit_variance

    return predict
