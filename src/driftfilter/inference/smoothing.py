"""Smoothing: beliefs about the past, given all that came after (Rauch, Tung and Striebel)."""

from collections.abc import Sequence

from driftfilter.base.checks import require, unchecked
from driftfilter.gaussian.belief import Belief
from driftfilter.model.transition import BoundTransition, apply_gain, is_number


def smooth_beliefs(
    beliefs: Sequence[Belief], transitions: Sequence[BoundTransition]
) -> list[Belief]:
    """N(μ_t, Σ_t) given all data, from beliefs given data up to t; ``transitions`` lead from each
    to the next.

    From the last one back, with C = Σ_t Kᵀ (Σ⁻_{t+1})⁻¹ and what was smoothed before as μ', Σ':
    μ ← μ_t + C (μ' - μ⁻_{t+1}), Σ ← Σ_t + C (Σ' - Σ⁻_{t+1}) Cᵀ.
    """
    smoothed = [beliefs[-1]]
    pairs = list(zip(beliefs[:-1], transitions, strict=True))
    for belief, transition in reversed(pairs):
        smoothed.append(_step_back(belief, transition, smoothed[-1]))
    return smoothed[::-1]


def _step_back(belief: Belief, transition: BoundTransition, later: Belief) -> Belief:
    prior, covariance = transition(belief), belief.covariance
    ahead = later.mean - prior.mean
    if prior.covariance is covariance:  # gain 1 and no noise: C = I
        return unchecked(Belief, mean=belief.mean + ahead, covariance=later.covariance)
    require(
        not is_number(transition.spread_of(belief).keep, 0.0),
        "Filter.transition",
        "a noise that drops Σ between steps (Reset)",
        "one that keeps some of it to smooth: later batches say nothing about earlier parameters",
    )
    require(
        not covariance.is_degenerate,
        "states",
        "a belief without variance",
        "beliefs with a covariance: a point mass has nothing to smooth",
    )
    kept = transition.kept_gain(belief)
    back = covariance.apply(apply_gain(kept, prior.covariance.solve(ahead), transposed=True))
    spread = covariance.smooth(kept, prior.covariance, later.covariance)
    return unchecked(Belief, mean=belief.mean + back, covariance=spread)
