"""The table of presets: published methods (published.py), the paper's and ours, by name; and the recipe of one for a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from driftfilter.augmentation import Augmentation, Consistency, Mirror
from driftfilter.checks import nearest, require, warn
from driftfilter.curvature import EmpiricalFisher, Hessian
from driftfilter.dynamics import MeanReversion, RandomWalk
from driftfilter.inference import Bong, Linearized
from driftfilter.losses import InformationMaximization, SoftLikelihoodRatio, Sum, as_loss
from driftfilter.noise import Reset, Stationary
from driftfilter.observation import Gibbs
from driftfilter.parameters import Head
from driftfilter.prediction import LinearizedGaussian, Moderated, Tempered
from driftfilter.published import (
    bacs,
    bn,
    cmf,
    conjugate,
    cotta,
    eata,
    eta,
    lora,
    memo,
    petal,
    pl,
    rdumb,
    roid,
    rpl,
    sar,
    shot_im,
    slr,
    source,
    stad,
    stad_vmf,
    t3a,
    tent,
)
from driftfilter.recipe import Recipe
from driftfilter.source import Gaussian, Structure
from driftfilter.statistics import Ema
from driftfilter.transition import Transition
from driftfilter.weighting import Constant, Reliability


def _paper(structure: Structure, beta: float, variance: float, rank: int = 256) -> Recipe:
    return Recipe(
        source=Gaussian(variance, structure, rank),
        transition=Transition(RandomWalk(), Reset(variance)),
        observation=Gibbs(InformationMaximization(), Constant(beta)),
        inference=Linearized(EmpiricalFisher()),
        predict_from="prior",
    )


def opgd(beta: float = 2.0, variance: float = 0.1, rank: int = 256) -> Recipe:
    """The paper's online preconditioned gradient descent: information maximisation with β = 2, and the full empirical
    Fisher of the batch against an isotropic prior that every step renews. Exact in the mean for any ``rank``.

    Predicts before the step, which saves a forward pass; ``predict_from="posterior"`` gains a little. The variance was chosen
    on speckle, blur, saturation and spatter with the shipped ResNet-20.
    """
    return _paper("low_rank", beta, variance, rank)


def opgd_diag(beta: float = 2.0, variance: float = 0.08) -> Recipe:
    """The same with the diagonal of the Fisher."""
    return _paper("diagonal", beta, variance)


def bong_diag(beta: float = 2.0, variance: float = 0.02, samples: int = 2) -> Recipe:
    """Bayesian online natural gradient: opgd_diag with gradient and Fisher averaged over draws from the prior."""
    return replace(_paper("diagonal", beta, variance), inference=Bong(EmpiricalFisher(), samples))


def bong_lowrank(beta: float = 2.0, variance: float = 0.02, samples: int = 2, rank: int = 64) -> Recipe:
    """The same with the full Fisher, kept at a low rank."""
    return replace(_paper("low_rank", beta, variance, rank), inference=Bong(EmpiricalFisher(), samples))


def driftfilter(
    beta: float = 2.0,
    variance: float = 0.1,
    taper: float = 2.0,
    rho: float = 0.985,
    ceiling: float = 0.9999,
    balance: float = 0.5,
    radius: float = 2.0,
    temperature: float | None = None,
    momentum: float = 0.5,
    diversity: float = 4.0,
) -> Recipe:
    """Ours, the default: one forward and one backward pass, no augmentation. The soft likelihood ratio of reliable samples,
    with ``balance`` times information maximisation against collapse, moves the norm parameters, the early layers more than
    the deep ones, by at most ``radius`` a step, and they revert to the source.

    Batch normalisation carries its statistics, and trusts a batch the less the fewer classes are in it. Predicts before the
    step, at the ``temperature`` that the belief's own variance of the logits asks for (``Moderated``), or at one that is given.
    Batches below 100 samples take smaller steps. All was chosen on speckle noise, blur, saturation and spatter
    (docs/benchmarks.md); without batch normalisation `adapt` takes a smaller ``variance``, more ``balance`` and temperature 2.
    """
    loss = Sum((SoftLikelihoodRatio(ceiling), InformationMaximization()), (1.0, balance))
    return Recipe(
        statistics=Ema(momentum, diversity),
        source=Gaussian(variance, taper=taper),
        transition=Transition(MeanReversion(rho), Reset(None)),
        observation=Gibbs(loss, Reliability(beta), reference=100),
        inference=Linearized(EmpiricalFisher(centered=False), radius),
        prediction=Moderated() if temperature is None else Tempered(temperature),
        predict_from="prior",
    )


def driftfilter_aug(
    beta: float = 2.0,
    variance: float = 0.1,
    taper: float = 2.0,
    rho: float = 0.985,
    ceiling: float = 0.9999,
    balance: float = 0.5,
    radius: float = 2.0,
    temperature: float | None = None,
    momentum: float = 0.5,
    diversity: float = 4.0,
    consistency: float = 0.3,
    augmentation: Augmentation | None = None,
) -> Recipe:
    """The same for inputs and their mirror images: the loss is that of both, plus the symmetric cross-entropy between them,
    and the prediction is from their mean logits. Another ``augmentation`` that preserves labels may take the mirror's place.
    """
    recipe = driftfilter(beta, variance, taper, rho, ceiling, balance, radius, temperature, momentum, diversity)
    agreement = Consistency(augmentation or Mirror(), divergence="symmetric", target="moving")
    own = as_loss("driftfilter_aug", recipe.observation.loss)
    loss = Sum((own, agreement), (1.0, consistency), each_view=True)
    return replace(
        recipe,
        observation=replace(recipe.observation, loss=loss),
        prediction=replace(recipe.prediction, over_views=True),
    )


def _head(structure: Structure, rank: int, beta: float, variance: float, rho: float) -> Recipe:
    return Recipe(
        parameters=Head(),
        source=Gaussian(variance, structure, rank),
        transition=Transition(MeanReversion(rho), Stationary()),
        observation=Gibbs(InformationMaximization(), Constant(beta)),
        prediction=LinearizedGaussian(),
    )


def head_ekf(
    beta: float = 2.0, variance: float = 0.01, rho: float = 0.99, structure: Structure = "low_rank", rank: int = 64
) -> Recipe:
    """An extended Kalman filter on the last layer, with the curvature of the loss; predicts with Gaussian logits."""
    return replace(_head(structure, rank, beta, variance, rho), inference=Linearized(Hessian()))


def head_bong(
    beta: float = 2.0,
    variance: float = 0.01,
    rho: float = 0.99,
    structure: Structure = "low_rank",
    rank: int = 64,
    samples: int = 8,
) -> Recipe:
    """The same with gradient and curvature averaged over the prior."""
    return replace(_head(structure, rank, beta, variance, rho), inference=Bong(Hessian(), samples))


PRESETS: dict[str, Callable[..., Recipe]] = {
    preset.__name__: preset
    for preset in (
        source,
        bn,
        tent,
        pl,
        rpl,
        conjugate,
        shot_im,
        eta,
        eata,
        slr,
        roid,
        cmf,
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
        driftfilter,
        driftfilter_aug,
        opgd,
        opgd_diag,
        bong_diag,
        bong_lowrank,
        head_ekf,
        head_bong,
    )
}


# At their published rates only for networks with batch normalisation: they push every sample, certain or not, and on the
# shipped network with group normalisation they fall below the source (docs/presets.md).
FOR_BATCH_NORM = ("tent", "pl", "rpl", "conjugate", "slr", "roid", "cmf", "bacs")

# What is safe in place of a default for networks without batch normalisation: their gradients are larger, and nothing but
# information maximisation keeps the classes apart.
_SAFE = {"variance": 0.01, "balance": 3.0, "temperature": 2.0}
WITHOUT_BATCH_NORM: dict[str, dict[str, float]] = {"driftfilter": _SAFE, "driftfilter_aug": _SAFE}


def for_model(model: nn.Module, name: str, options: Mapping[str, Any], beside: Sequence[str] = ()) -> Recipe:
    """The recipe of a preset, with what is safe for the norms of a network where an option does not say otherwise."""
    layers = list(model.modules()) if isinstance(model, nn.Module) else []
    by_batch = any(isinstance(layer, _BatchNorm) for layer in layers)
    by_group = any(isinstance(layer, nn.GroupNorm) for layer in layers) and not by_batch
    if name in FOR_BATCH_NORM and "lr" not in options and by_group:
        warn(f"{name!r} at its published rate was seen to lose accuracy under group norm (docs/presets.md); lower lr")
    safer = {} if by_batch else WITHOUT_BATCH_NORM.get(name, {})
    return recipe_of(name, {**safer, **options}, beside)


def names() -> list[str]:
    """Every preset."""
    return list(PRESETS)


def get(name: str, **options: Any) -> Recipe:
    """The recipe of a preset, with some of its hyper-parameters, or fields of the recipe, changed.

    >>> get("tent", lr=0.01).inference
    GradientStep(rule=Adam(lr=0.01, betas=(0.9, 0.999), eps=1e-08), anchor=0.0, radius=0.0, reference=0, keep_gradient=False)
    """
    return recipe_of(name, options)


def recipe_of(name: str, options: Mapping[str, Any], beside: Sequence[str] = ()) -> Recipe:
    """The same; an error about an option that is not known names those ``beside`` the preset's, too."""
    known = isinstance(name, str) and name in PRESETS
    require(known, "preset", name, f"one of {names()}{nearest(str(name), names())}")
    signature = inspect.signature(PRESETS[name])
    own = {key: value for key, value in options.items() if key in signature.parameters}
    others = {key: value for key, value in options.items() if key not in own}
    known_fields = [item.name for item in fields(Recipe)]
    for key in others:
        possible = [*signature.parameters, *known_fields, *beside]
        require(key in known_fields, f"option of preset {name!r}", key, f"one of {possible}{nearest(key, possible)}")
    return replace(PRESETS[name](**own), **others)
