"""What a filter's rules are in the terms of the compiled step, or why they have none."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from driftfilter.base.checks import unchecked, warn
from driftfilter.base.tensors import map_tensors
from driftfilter.compiled import terms as kinds
from driftfilter.compiled.terms import PSEUDO_LABEL, MotionArrays, Rules
from driftfilter.filtering import Filter
from driftfilter.gaussian.belief import Belief
from driftfilter.gaussian.covariance import Covariance
from driftfilter.gaussian.diagonal import Diagonal
from driftfilter.gaussian.full import Full
from driftfilter.inference.curvature import EmpiricalFisher, GaussNewton, Hessian, NoCurvature
from driftfilter.inference.linearized import Linearized
from driftfilter.inference.prediction import MAP, LinearizedProbit, Tempered
from driftfilter.model.closed_forms import variance_at
from driftfilter.model.composed import BlockDynamics, SumDynamics
from driftfilter.model.dynamics import Spread
from driftfilter.model.losses import (
    Entropy,
    GeneralizedCrossEntropy,
    InformationMaximization,
    PseudoLabel,
    SoftLikelihoodRatio,
    Sum,
)
from driftfilter.model.predictive import LinearHead
from driftfilter.model.transition import BoundTransition, Transition
from driftfilter.model.weighting import Constant, EntropyGate, Product, Reliability

# Role -> classes that compiled code covers; of the transition it covers all but one's own.
COVERED: dict[str, tuple[type, ...]] = {
    "model": (LinearHead,),
    "covariance": (Full, Diagonal),
    "inference": (Linearized,),
    "loss": (
        Entropy,
        SoftLikelihoodRatio,
        PseudoLabel,
        GeneralizedCrossEntropy,
        InformationMaximization,
        Sum,
    ),
    "weighting": (Constant, Reliability, EntropyGate, Product),
    "curvature": (Hessian, GaussNewton, EmpiricalFisher, NoCurvature),
    "prediction": (MAP, Tempered, LinearizedProbit),
}


class Uncovered(Exception):  # noqa: N818  # no error: the eager path takes over
    """A configuration that compiled code does not cover, and why."""


_failures: list[str] = []  # of compiled code in this process


def give_up(error: Exception) -> None:
    """Leave compiled code alone for the rest of the process, and warn: kernels raise nothing of
    their own, so it could not be made or loaded.
    """
    if not _failures:
        _failures.append(f"{type(error).__name__}: {error}")
        warn(f"compiled code failed, the eager path takes over: {_failures[0]}")


def is_working() -> bool:
    """Whether compiled code has not failed before."""
    return not _failures


def require_working() -> None:
    """Raise if compiled code has failed before."""
    if not is_working():
        raise Uncovered(f"compiled code has failed: {_failures[0]}")


def require_covered(role: str, part: object) -> None:
    """Raise for a part of a filter that is of no covered class."""
    if type(part) not in COVERED[role]:
        names = [known.__name__ for known in COVERED[role]]
        what = type(part).__name__ if role == "covariance" else part
        raise Uncovered(f"the {role} is {what}, not {' or '.join(names)}")


def translate_rules(filt: Filter) -> Rules:
    """Translate loss, weighting, curvature and prediction into numbers."""
    observation, inference = filt.observation, filt.inference
    if observation.teacher is not None or filt.upkeep is not None:
        raise Uncovered("the filter has a teacher or an upkeep")
    if observation.augmentation is not None:
        raise Uncovered("the loss sees augmented inputs")
    require_covered("inference", inference)
    assert isinstance(inference, Linearized)
    if inference.reach > 1 or inference.limit > 0:
        raise Uncovered("the inference has a reach above 1, or a limit")
    if filt.transition.samples:
        raise Uncovered("the transition goes by samples")
    terms = _terms(observation.loss, 1.0)
    curvature, scale = _number_curvature(inference.curvature)
    beta, gates = _factors(observation.weighting)
    prediction, temperature = _number_prediction(filt.prediction)
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
    require_covered("loss", loss)
    if isinstance(loss, Sum):
        pairs = zip(loss.terms, loss.coefficients, strict=True)
        return [term for part, own in pairs for term in _terms(part, coefficient * own)]
    if isinstance(loss, SoftLikelihoodRatio):
        if loss.ceiling == 1:
            raise Uncovered(f"the loss {loss} has no closed form: its ceiling must be below 1")
        return [(kinds.BOUNDED_RATIO, loss.ceiling, coefficient)]
    if isinstance(loss, PseudoLabel):
        return [(kinds.PSEUDO_LABEL, loss.threshold, coefficient)]
    if isinstance(loss, GeneralizedCrossEntropy):
        return [(kinds.GENERALIZED, loss.q, coefficient)]
    return [(kinds.ENTROPY if isinstance(loss, Entropy) else kinds.INFORMATION, 0.0, coefficient)]


def _number_curvature(curvature: Any) -> tuple[int, float]:
    """Kind of a curvature, and λ of the empirical Fisher."""
    require_covered("curvature", curvature)
    if isinstance(curvature, Hessian) and curvature.clip == "never":
        raise Uncovered("the Hessian is raw, clip='never'")
    if isinstance(curvature, EmpiricalFisher):
        return kinds.CENTERED_FISHER if curvature.centered else kinds.FISHER, float(curvature.scale)
    plain: dict[type, int] = {
        Hessian: kinds.HESSIAN,
        GaussNewton: kinds.GAUSS_NEWTON,
        NoCurvature: kinds.NONE,
    }
    return plain[type(curvature)], 1.0


def _factors(weighting: Any) -> tuple[float, list[tuple[int, float, float]]]:
    """β of every sample, and the factors that depend on it: kind, β, fraction."""
    require_covered("weighting", weighting)
    if isinstance(weighting, Constant):
        return float(weighting.beta), []
    if isinstance(weighting, Reliability):
        return 1.0, [(kinds.RELIABILITY, float(weighting.beta), 0.0)]
    if isinstance(weighting, EntropyGate):
        kind = kinds.WEIGHTED_GATE if weighting.weighted else kinds.GATE
        return 1.0, [(kind, float(weighting.beta), float(weighting.fraction))]
    parts = [_factors(factor) for factor in weighting.factors]
    return math.prod(beta for beta, _ in parts), [gate for _, gates in parts for gate in gates]


def _number_prediction(rule: Any) -> tuple[int, float]:
    """Kind and temperature of a prediction."""
    require_covered("prediction", rule)
    if isinstance(rule, LinearizedProbit):
        return (kinds.PAIRWISE if rule.form == "pairwise" else kinds.PER_CLASS), 1.0
    return kinds.TEMPERED, float(rule.temperature) if isinstance(rule, Tempered) else 1.0


def translate_transition(transition: Transition, source: Belief) -> MotionArrays:
    """Translate a transition from this source into arrays."""
    source = map_tensors(source, lambda tensor: tensor.double())
    bound, d = transition.bind(source), source.dimension
    full = isinstance(source.covariance, Full)
    if isinstance(bound.spread, Spread):
        factor, noise = _read_constant(bound, bound.spread, source)
        kappa = torch.zeros(d, dtype=torch.float64)
    else:
        _require_known(transition)
        factor, noise, kappa = _probe(bound, source)
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
    return MotionArrays(arrays[0], arrays[1], arrays[2], arrays[3], bool(still), shrink, floor)


def _bounds(matrix: Tensor, factor: Tensor, noise: Tensor) -> tuple[float, float]:
    """λ_min(Σ⁻) >= shrink λ_min(Σ) + floor: Schur's bound of an elementwise product, A and W being
    semi-definite.
    """
    shrink = (factor if factor.dim() == 0 else factor.diagonal().min()).item()
    if matrix.numel():
        shrink *= torch.linalg.svdvals(matrix)[-1].item() ** 2
    floor = noise.min() if noise.dim() == 1 else torch.linalg.eigvalsh(noise)[0]
    return shrink, max(floor.item(), 0.0)


def _read_constant(bound: BoundTransition, spread: Spread, source: Belief) -> tuple[Tensor, Tensor]:
    """A, a number [] or a matrix [d, d], and W, a vector or a matrix, of a constant noise."""
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
    """Raise for a noise of the user's own that depends on the belief: three probes would not tell
    what it does.
    """
    dynamics = transition.dynamics
    for part in dynamics.parts if isinstance(dynamics, (BlockDynamics, SumDynamics)) else ():
        _require_known(part)
    modules = {type(transition.noise).__module__, type(dynamics).__module__}
    if not all(module.startswith("driftfilter.model.") for module in modules):
        raise Uncovered(f"the noise of {transition} depends on the belief in a way of your own")


def _probe(bound: BoundTransition, source: Belief) -> tuple[Tensor, Tensor, Tensor]:
    """Find A, W and κ of a noise that depends on the belief: Σ⁻ is affine in Σ and (μ - μ₀)², so
    three probes tell.

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
