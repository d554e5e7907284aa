"""What a filter's rules are in the terms of the compiled step, or why they have none."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from driftfilter.base.checks import role_of, unchecked
from driftfilter.base.tensors import moved
from driftfilter.compiled import terms as kinds
from driftfilter.compiled.terms import PSEUDO_LABEL, Motion, Rules
from driftfilter.gaussian.belief import Belief
from driftfilter.gaussian.covariance import Covariance
from driftfilter.gaussian.diagonal import Diagonal
from driftfilter.gaussian.full import Full
from driftfilter.inference.curvature import EmpiricalFisher, GaussNewton, Hessian, NoCurvature
from driftfilter.inference.linearized import Linearized
from driftfilter.inference.prediction import MAP, LinearizedProbit, Tempered
from driftfilter.model.closed_forms import variance_at
from driftfilter.model.dynamics import Spread
from driftfilter.model.losses import (
    Entropy,
    GeneralizedCrossEntropy,
    InformationMaximization,
    PseudoLabel,
    SoftLikelihoodRatio,
    Sum,
)
from driftfilter.model.transition import BlockDynamics, BoundTransition, Transition
from driftfilter.model.weighting import Constant, EntropyGate, Product, Reliability

if TYPE_CHECKING:
    from driftfilter.filtering import Filter


class Uncovered(Exception):  # noqa: N818  # no error: the eager path takes over  # no error: the eager path takes over
    """A configuration that compiled code does not cover, and why."""


def rules_of(filt: Filter) -> Rules:
    """Loss, weighting, curvature and prediction as numbers."""
    observation, inference = filt.observation, filt.inference
    if observation.teacher is not None or filt.upkeep is not None:
        raise Uncovered("the filter has a teacher or an upkeep")
    if type(inference) is not Linearized:
        raise Uncovered(f"the inference is {inference}, not Linearized")
    terms = _terms(observation.loss, 1.0)
    curvature, scale = _curvature(inference.curvature)
    beta, gates = _weights(observation.weighting)
    prediction, temperature = _prediction(filt.prediction)
    return Rules(
        np.array(terms),
        np.array(gates).reshape(-1, 3),
        beta,
        all(kind == PSEUDO_LABEL and number > 0 for kind, number, _ in terms),
        observation.over == "kept",
        observation.reference,
        filt.needed,
        curvature,
        scale,
        float(inference.radius),
        prediction,
        temperature,
        variance_at(temperature),
        filt.predict_from == "posterior",
    )


def _terms(loss: Any, coefficient: float) -> list[tuple[int, float, float]]:
    """A loss as terms: kind, own parameter, coefficient."""
    if type(loss) is Sum:
        pairs = zip(loss.terms, loss.coefficients, strict=True)
        return [term for part, own in pairs for term in _terms(part, coefficient * own)]
    if type(loss) is SoftLikelihoodRatio and loss.ceiling < 1:
        return [(kinds.BOUNDED_RATIO, loss.ceiling, coefficient)]
    if type(loss) is PseudoLabel:
        return [(kinds.PSEUDO_LABEL, loss.threshold, coefficient)]
    if type(loss) is GeneralizedCrossEntropy:
        return [(kinds.GENERALIZED, loss.q, coefficient)]
    plain = {Entropy: kinds.ENTROPY, InformationMaximization: kinds.INFORMATION}
    if type(loss) not in plain:
        raise Uncovered(f"the loss {loss} has no closed form here")
    return [(plain[type(loss)], 0.0, coefficient)]


def _curvature(curvature: Any) -> tuple[int, float]:
    if type(curvature) is EmpiricalFisher:
        return (kinds.CENTERED_FISHER if curvature.centered else kinds.FISHER), float(
            curvature.scale
        )
    known = {Hessian: kinds.HESSIAN, GaussNewton: kinds.GAUSS_NEWTON, NoCurvature: kinds.NONE}
    if type(curvature) not in known:
        raise Uncovered(f"the curvature is {curvature}")
    return known[type(curvature)], 1.0


def _weights(weighting: Any) -> tuple[float, list[tuple[int, float, float]]]:
    """β of every sample, and the factors that depend on it: kind, β, fraction."""
    if type(weighting) is Constant:
        return float(weighting.beta), []
    if type(weighting) is Reliability:
        return 1.0, [(kinds.RELIABILITY, float(weighting.beta), 0.0)]
    if type(weighting) is EntropyGate:
        kind = kinds.WEIGHTED_GATE if weighting.weighted else kinds.GATE
        return 1.0, [(kind, float(weighting.beta), float(weighting.fraction))]
    if type(weighting) is not Product:
        raise Uncovered(f"the weighting is {weighting}, which has a memory or is your own")
    parts = [_weights(factor) for factor in weighting.factors]
    return math.prod(beta for beta, _ in parts), [gate for _, gates in parts for gate in gates]


def _prediction(rule: Any) -> tuple[int, float]:
    if type(rule) is MAP:
        return kinds.TEMPERED, 1.0
    if type(rule) is Tempered:
        return kinds.TEMPERED, float(rule.temperature)
    if type(rule) is not LinearizedProbit:
        raise Uncovered(f"the prediction is {rule}, not MAP, Tempered or LinearizedProbit")
    return (kinds.PAIRWISE if rule.form == "pairwise" else kinds.PER_CLASS), 1.0


def motion_of(transition: Transition, source: Belief) -> Motion:
    """A transition from this source as arrays."""
    source = moved(source, lambda tensor: tensor.double())
    bound, d = transition.bind(source), source.dimension
    full = isinstance(source.covariance, Full)
    if isinstance(bound.spread, Spread):
        factor, noise = _constant(bound, bound.spread, source)
        kappa = torch.zeros(d, dtype=torch.float64)
    else:
        _require_known(transition)
        factor, noise, kappa = _probed(bound, source)
    matrix = (
        bound.gain
        if isinstance(bound.gain, Tensor) and bound.gain.dim() == 2
        else torch.zeros(0, 0)
    )
    shrink, floor = _bounds(matrix, factor, noise)
    diagonal = noise.diagonal() if noise.dim() == 2 else noise
    if noise.dim() == 1 or not (noise - torch.diag(diagonal)).any():
        noise = torch.zeros(0, 0)
    else:
        diagonal = torch.zeros(d, dtype=torch.float64)
    if not full:
        factor = factor.expand(d)[None] if factor.dim() == 0 else factor.diagonal()[None]
    still = not matrix.numel() and not kappa.any() and bool((factor == 1).all())
    still = still and not noise.any() and not diagonal.any()
    vectors = (0.0 if matrix.numel() else bound.gain, bound.drift, diagonal, kappa, source.mean)
    rows = torch.stack([torch.as_tensor(row, dtype=torch.float64).expand(d) for row in vectors])
    pieces = (rows, matrix, factor.reshape(1, 1) if factor.dim() == 0 else factor, noise)
    arrays: list[Any] = [np.ascontiguousarray(piece.double().numpy()) for piece in pieces]
    return Motion(arrays[0], arrays[1], arrays[2], arrays[3], bool(still), shrink, floor)


def _bounds(matrix: Tensor, factor: Tensor, noise: Tensor) -> tuple[float, float]:
    """λ_min(Σ⁻) >= shrink λ_min(Σ) + floor: Schur's bound of an elementwise product, A and W being
    semi-definite.
    """
    shrink = (factor if factor.dim() == 0 else factor.diagonal().min()).item()
    if matrix.numel():
        shrink *= torch.linalg.svdvals(matrix)[-1].item() ** 2
    floor = noise.min() if noise.dim() == 1 else torch.linalg.eigvalsh(noise)[0]
    return shrink, max(floor.item(), 0.0)


def _constant(bound: BoundTransition, spread: Spread, source: Belief) -> tuple[Tensor, Tensor]:
    """A, a number [], or a matrix [d, d], and W, a vector or a matrix, of a noise that is always
    the same.
    """
    keep, noise = spread
    if isinstance(noise, float):
        noise = source.mean.new_full((source.dimension,), noise)
    elif not isinstance(noise, Tensor):
        noise = noise.dense()
    gain = bound.gain
    factor = torch.as_tensor(keep, dtype=torch.float64)
    if isinstance(gain, float):
        factor = factor * gain * gain
    if factor.dim() or (isinstance(gain, Tensor) and gain.dim() == 1):
        vector = factor.sqrt() * (gain if isinstance(gain, Tensor) and gain.dim() == 1 else 1.0)
        factor = torch.outer(vector, vector)
    return factor, noise


def _require_known(transition: Transition) -> None:
    """Raise where a noise that depends on the belief is the user's own: three probes would not tell
    what it does.
    """
    parts = transition.dynamics.parts if type(transition.dynamics) is BlockDynamics else ()
    for part in parts:
        _require_known(part)

    if role_of(transition.noise) is None or role_of(transition.dynamics) is None:
        raise Uncovered(f"the noise of {transition} depends on the belief in a way of your own")


def _probed(bound: BoundTransition, source: Belief) -> tuple[Tensor, Tensor, Tensor]:
    """A, W and κ of a noise that depends on the belief: Σ⁻ is affine in Σ and (μ - μ₀)², so three
    probes tell.

    Under a gain G the probe of A is Σ = G⁻¹ 1 1ᵀ G⁻ᵀ, which G turns into ones.
    """
    ones = torch.ones(source.dimension, dtype=torch.float64)

    def probe(mean: Tensor, root: Tensor) -> Tensor:
        covariance: Covariance
        if isinstance(source.covariance, Full):
            covariance = unchecked(Full, matrix=torch.outer(root, root))
        else:
            covariance = unchecked(Diagonal, values=root.square())
        return bound(unchecked(Belief, mean=mean, covariance=covariance)).covariance.dense()

    root = ones
    if isinstance(bound.gain, Tensor) and bound.gain.dim() == 2:
        if not torch.linalg.cond(bound.gain).item() < 1e6:
            raise Uncovered(
                "a gain that cannot be inverted, with a noise that depends on the belief"
            )
        root = torch.linalg.solve(bound.gain, ones)
    noise = probe(source.mean, 0 * ones)
    factor = probe(source.mean, root) - noise
    return factor, noise, (probe(source.mean + 1, 0 * ones) - noise).diagonal()
