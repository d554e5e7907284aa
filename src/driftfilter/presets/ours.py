"""The paper's presets and ours."""

from collections.abc import Callable
from dataclasses import replace
from inspect import Parameter, signature
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from driftfilter.base.checks import require
from driftfilter.inference.curvature import EmpiricalFisher, Hessian
from driftfilter.inference.linearized import Bong, Frozen, Linearized
from driftfilter.inference.prediction import LinearizedGaussian, Moderated, Tempered
from driftfilter.model.centering import Centering
from driftfilter.model.domains import Domains
from driftfilter.model.dynamics import MeanReversion, RandomWalk
from driftfilter.model.label_chain import LabelChain
from driftfilter.model.losses import (
    InformationMaximization,
    Loss,
    RunningInformation,
    Softened,
    SoftLikelihoodRatio,
    Sum,
    as_loss,
)
from driftfilter.model.noise import Reset, Stationary
from driftfilter.model.observation import Gibbs
from driftfilter.model.transition import Transition
from driftfilter.model.views import Augmentation, Consistency, Mirror
from driftfilter.model.weighting import Constant, Reliability, RunGate
from driftfilter.networks.batch_norm import Ema
from driftfilter.networks.batch_trust import ForgetAtHome
from driftfilter.networks.parameters import Head, NoParameters, NormAffine
from driftfilter.recipe import Recipe
from driftfilter.source.posterior import Gaussian

Preset = TypeVar("Preset", bound=Callable[..., Recipe])
Norms: TypeAlias = Literal["batch", "measured", "aligned", "other", "none", "frozen"]

# What options of ``driftfilter`` are unless they are given, where norms differ.
_ELSEWHERE = {
    "variance": 0.2,
    "radius": 6.0,
    "reach": 1.0,
    "limit": 0.0,
    "shift": 0.45,
    "momentum": 0.5,
    "softening": 1.0,
}
_BATCH = _ELSEWHERE | {"reach": 30.0, "momentum": 0.7, "softening": 2.0}
_NUMBERS: dict[str, dict[str, float]] = {
    "batch": _BATCH,
    "measured": _BATCH | {"shift": 0.05},
    "aligned": _ELSEWHERE | {"variance": 0.1, "shift": 0.1},
    "other": _ELSEWHERE | {"variance": 3.0, "limit": 0.012},
    "none": _ELSEWHERE | {"variance": 0.005},
    "frozen": _ELSEWHERE,
}
_DOUBT = 0.075  # of a source at which a stream is no longer its own
_SKEW, _BIAS = 0.1, 5.0  # of the chain of labels with batch norm


def _paper(structure: str, beta: float, variance: float, rank: int = 256) -> Recipe:
    return Recipe(
        source=Gaussian(variance, structure, rank),
        transition=Transition(RandomWalk(), Reset(variance)),
        observation=Gibbs(InformationMaximization(), Constant(beta)),
        inference=Linearized(EmpiricalFisher()),
        predict_from="prior",
    )


def opgd(beta: float = 2.0, variance: float = 0.1, rank: int = 256) -> Recipe:
    """The paper's online preconditioned gradient descent: information maximisation with β = 2, and
    the full empirical Fisher of the batch against an isotropic prior that every step renews. Exact
    in the mean for any ``rank``.

    Predicts before the step, which saves a forward pass; ``predict_from="posterior"`` gains a
    little. The variance was chosen on speckle, blur, saturation and spatter with the shipped
    ResNet-20.
    """
    return _paper("low_rank", beta, variance, rank)


def opgd_diag(beta: float = 2.0, variance: float = 0.08) -> Recipe:
    """opgd with the diagonal of the Fisher."""
    return _paper("diagonal", beta, variance)


def bong_diag(beta: float = 2.0, variance: float = 0.02, samples: int = 2) -> Recipe:
    """Bayesian online natural gradient: opgd_diag with gradient and Fisher averaged over draws from
    the prior.
    """
    return replace(_paper("diagonal", beta, variance), inference=Bong(EmpiricalFisher(), samples))


def bong_lowrank(
    beta: float = 2.0, variance: float = 0.02, samples: int = 2, rank: int = 64
) -> Recipe:
    """bong_diag with the full Fisher, kept at a low rank."""
    return replace(
        _paper("low_rank", beta, variance, rank), inference=Bong(EmpiricalFisher(), samples)
    )


def driftfilter(  # what users may turn
    beta: float = 2.0,
    variance: float | None = None,
    taper: float = 2.0,
    rho: float = 0.97,
    ceiling: float = 0.9999,
    balance: float = 0.5,
    radius: float | None = None,
    reach: float | None = None,
    limit: float | None = None,
    temperature: float | None = None,
    momentum: float | None = None,
    diversity: float = 4.0,
    shift: float | None = None,
    softening: float | None = None,
    norms: Norms = "batch",
) -> Recipe:
    """Ours, the default: one forward and one backward pass (with batch norm one more forward pass
    in every fourth step), no augmentation. The norm parameters move, the early layers more than the
    deep ones, by at most ``radius`` a step, and revert to the source by ``rho``; offsets of the
    classes that a change of domain has made are taken off the logits (``Centering``). `adapt`
    chooses ``norms`` by what the network is.

    Labels may come in runs: what is predicted for samples one by one is put together by a chain
    of labels (``LabelChain``), which changes next to nothing in a shuffled stream; not in tables.
    With batch norm it also finds out whether classes have shares of their own in the stream; other
    norms leave a bias towards some classes that looks the same.

    "batch": batch normalisation carries its statistics, and trusts a batch the less the fewer
    classes are in it, in late layers more so; while the source network, asked in every fourth
    batch, sees no ``shift`` of the domain and is sure of what it sees (``Ema.doubt``), statistics
    and parameters stay the source's, or go back to them (``ForgetAtHome``). The loss is the soft
    likelihood ratio of reliable samples with
    ``balance`` times information maximisation against collapse, both of predictions softened by
    ``softening`` (``Softened``). "measured" (batch norm, with source ``data`` that are no table):
    the same, but how far the domain has shifted is told from what these data are in the network
    (``Ema.baseline``). "aligned" (other norms, with source ``data`` that are no table): the same,
    by statistics of the source data that stand behind the norms (``Recipe.align``), and of
    predictions as they are. "other" (layer, group, instance, RMS norm): the loss is information
    maximisation against the marginal of the last 200 samples (``RunningInformation``), of
    predictions softened to the same spread in every network, unless labels come in runs
    (``RunGate``); no step is longer than a share ``limit`` of the parameters (``Linearized``).
    "none": the same for the last layer in place of norm parameters, of predictions as they are and
    without a limit. "frozen" (quantised layers, or nothing to adapt): no parameter moves
    (``center``). An option that such a network has no use for gives a warning (``UNUSED``).

    Predicts before the step, at a ``temperature`` found without labels (``Moderated``, from the
    belief's variance of the logits along the loss; "aligned" at twice the scale, "other" by that of
    parameters known up to 0.06), or at one that is given. Batches below 16 samples are predicted at
    once and adapted to together; those below 100 ("other" 200) take smaller steps, and in them less
    time passes (``Transition``). ``shift`` is 0.45 with batch norm alone, whose running statistics
    are those of training, 0.05 with batch norm if source data say what is normal, and 0.1 with
    statistics of source data behind the norms. ``momentum`` is 0.7 and ``softening`` 2 with batch
    norm, 0.5 and 1 elsewhere. ``variance`` is 0.2 with batch norm, 0.1 with statistics behind the
    norms and 0.005 for the last layer. With "other" norms it is 3, and relative to the size of each
    layer's parameters, so that one variance serves transformers, residual and small networks alike;
    ``limit`` is 0.012 there, and nothing elsewhere. ``reach`` is 30 with batch norm, and 1
    elsewhere: networks whose parameters a step hardly changes, such as those for a thousand
    classes, take longer ones. All was chosen on clean images, speckle noise, blur, saturation and
    spatter, but for what two classes do, when offsets count, the prior and the limit of other norms
    and how far steps are lengthened: there streams of natural shift and digits had been seen
    (docs/lab/natural.md); and ``rho`` was looked for after the fifteen corruptions had been seen to
    fall, one after the other (docs/lab/defaults.md).
    """
    known = get_args(Norms)
    require(norms in known, "driftfilter: norms", norms, f"one of {known}")
    if norms == "frozen":
        return replace(center(), prediction=Tempered(temperature or 1.0))
    has_batch_norm, by_others = norms in ("batch", "measured"), norms == "other"
    by_batch = has_batch_norm or norms == "aligned"
    usual, reference = _NUMBERS[norms], 200 if by_others else 100
    variance, radius, reach, limit, shift, momentum, softening = (
        usual[name] if given is None else given
        for name, given in (
            ("variance", variance),
            ("radius", radius),
            ("reach", reach),
            ("limit", limit),
            ("shift", shift),
            ("momentum", momentum),
            ("softening", softening),
        )
    )
    loss: Loss = RunningInformation()
    if by_others:
        loss = RunningInformation(spread=2.4, least=0.25)
    if by_batch:
        loss = Sum((SoftLikelihoodRatio(ceiling), InformationMaximization()), (1.0, balance))
        loss = loss if softening == 1 else Softened(loss, softening)
    taper = 0.0 if norms == "none" else taper
    labels = LabelChain(tables=False)
    if has_batch_norm:
        labels = replace(labels, skew=_SKEW, bias=_BIAS)
    return Recipe(
        parameters=Head() if norms == "none" else NormAffine(),
        statistics="source"
        if norms == "none"
        else Ema(
            momentum,
            diversity,
            shift if by_batch else 0.0,
            late=0.3 if has_batch_norm else 1.0,
            baseline="data" if norms == "measured" else "running",
            doubt=_DOUBT if norms == "batch" else 0.0,
        ),
        source=Gaussian(variance, taper=taper, relative=by_others),
        transition=Transition(MeanReversion(rho), Reset(None), samples=reference),
        observation=Gibbs(
            loss,
            Reliability(beta) if by_batch else RunGate(beta),
            reference=reference,
        ),
        inference=Linearized(EmpiricalFisher(centered=False), radius, reach, limit=limit),
        prediction=Moderated(
            scale=0.02 if norms == "aligned" else 0.01,
            variance=0.06 if by_others else None,
        )
        if temperature is None
        else Tempered(temperature),
        predict_from="prior",
        centering=Centering(),
        upkeep=ForgetAtHome(shift) if by_batch else None,
        least=16,
        align=norms == "aligned",
        labels=labels,
        domains=Domains(carry=0.5),
    )


# Options of ``driftfilter`` that do nothing, by norms.
_OF_BATCH_NORM = ("balance", "ceiling", "momentum", "diversity", "shift", "softening")
_OF_PARAMETERS = ("beta", "variance", "taper", "rho", "radius", "reach", "limit", "consistency")
UNUSED: dict[str, tuple[str, ...]] = {
    "other": _OF_BATCH_NORM,
    "none": (*_OF_BATCH_NORM, "taper"),
    "frozen": (*_OF_BATCH_NORM, *_OF_PARAMETERS),
}


def _with_options_of(base: Callable[..., Recipe]) -> Callable[[Preset], Preset]:
    """Declare the options of ``base`` for a preset that hands them on, before its own."""

    def declare(preset: Preset) -> Preset:
        options = [
            *signature(base).parameters.values(),
            *(
                option
                for option in signature(preset).parameters.values()
                if option.kind is Parameter.KEYWORD_ONLY
            ),
        ]
        preset.__signature__ = signature(base).replace(parameters=options)  # type: ignore[attr-defined]
        return preset

    return declare


@_with_options_of(driftfilter)
def driftfilter_aug(
    *args: Any, consistency: float = 0.3, augmentation: Augmentation | None = None, **options: Any
) -> Recipe:
    """``driftfilter`` for inputs and their mirror images: the loss is that of both, plus the
    symmetric cross-entropy between them, and the prediction is from their mean logits. Another
    ``augmentation`` that preserves labels may take the mirror's place.
    """
    recipe = driftfilter(*args, **options)
    agreement = Consistency(augmentation or Mirror(), divergence="symmetric", target="moving")
    own = as_loss("driftfilter_aug", recipe.observation.loss)
    loss = Sum((own, agreement), (1.0, consistency), each_view=True)
    return replace(
        recipe,
        observation=replace(recipe.observation, loss=loss),
        prediction=replace(recipe.prediction, over_views=True),
    )


def _head(structure: str, rank: int, beta: float, variance: float, rho: float) -> Recipe:
    return Recipe(
        parameters=Head(),
        source=Gaussian(variance, structure, rank),
        transition=Transition(MeanReversion(rho), Stationary()),
        observation=Gibbs(InformationMaximization(), Constant(beta)),
        prediction=LinearizedGaussian(),
    )


def head_ekf(
    beta: float = 2.0,
    variance: float = 0.01,
    rho: float = 0.99,
    structure: str = "low_rank",
    rank: int = 64,
) -> Recipe:
    """An extended Kalman filter on the last layer, with the curvature of the loss; predicts with
    Gaussian logits.
    """
    return replace(_head(structure, rank, beta, variance, rho), inference=Linearized(Hessian()))


def head_bong(
    beta: float = 2.0,
    variance: float = 0.01,
    rho: float = 0.99,
    structure: str = "low_rank",
    rank: int = 64,
    samples: int = 8,
) -> Recipe:
    """head_ekf with gradient and curvature averaged over the prior."""
    return replace(_head(structure, rank, beta, variance, rho), inference=Bong(Hessian(), samples))


def center(count: float = 30.0, window: int = 2000, temperature: float = 0.75) -> Recipe:
    """A filter of class offsets on a frozen network (``Centering``): no parameter moves, no
    backward pass, for any network and any batch size.
    """
    return Recipe(
        parameters=NoParameters(),
        statistics="source",
        inference=Frozen(),
        predict_from="prior",
        centering=Centering(count, window, temperature),
        labels=LabelChain(tables=False),
    )


OURS = (
    driftfilter,
    driftfilter_aug,
    center,
    opgd,
    opgd_diag,
    bong_diag,
    bong_lowrank,
    head_ekf,
    head_bong,
)
