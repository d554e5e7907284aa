"""Recipe, one choice for every building block; variants in TOML.

A variant is a frozen dataclass. In TOML it is a table: ``kind`` names the class, the other keys are
its fields. A place in the table VARIANTS is all that a class needs to be read, written, listed and
checked: one of the package, which its module registers and which gets its conformance tests by it,
and one of a user's own, added at run time as in ``df.VARIANTS["loss"]["Mine"] = Mine``.
"""

from __future__ import annotations

import json
import sys
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal, final

from torch import Tensor

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import driftfilter.filtering as filtering
from driftfilter.base.checks import (
    LATE,
    VARIANTS as VARIANTS,
    Checked,
    Count,
    Role,
    nearest,
    register,
    require,
    role_of,
)

# Those with an "as" are not named below: all variants are in the table once this module is loaded.
from driftfilter.inference import (
    iterates as iterates,
    laplacian as laplacian,
    linearized,
    optimizers as optimizers,
    prediction,
    variational as variational,
)
from driftfilter.model import (
    batch_losses as batch_losses,
    buffers,
    composed as composed,
    domains,
    label_chain,
    looking as looking,
    observation,
    opinion as opinion,
    predictive,
    transition,
    views as views,
)
from driftfilter.model.centering import Centered, Centering
from driftfilter.networks import (
    batch_norm,
    lora as lora,
    norm_rules as norm_rules,
    parameters,
    prototypes as prototypes,
)
from driftfilter.source import posterior


@final
@dataclass(frozen=True)
class Recipe(Checked):
    """What to adapt, where it starts, how it moves, what is learned from a batch, and how it is
    predicted.

    ``parameters`` of the network, ``statistics`` of its batch normalisation, the ``source``
    posterior; ``centering`` of the logits (None: none); the other fields are those of ``Filter``.
    ``chunk``: batches are cut into pieces of this many samples, each a step of its own (0: never).
    ``least``: smaller batches are predicted at once, and adapted to together when so many samples
    have come (0: at once). ``align``: layers that keep no statistics get those of source data
    behind them, to which ``statistics`` apply as to batch normalisation (networks/alignment.py).
    ``buffer``: batches are predicted at once, and updates are made of the samples that it keeps
    (None: of the batches themselves). ``labels``: how labels follow each other in the stream; what
    is predicted for samples one by one is put together by it (None: each for itself). ``domains``:
    the stream may be of several domains that come back or are mixed, each with a filter state of
    its own (None: one state for all).
    """

    parameters: Annotated[Any, Role("parameters", "NormAffine()")] = field(
        default_factory=parameters.NormAffine
    )
    statistics: Any = "batch"
    source: Annotated[Any, Role("source", "PointMass()")] = field(
        default_factory=posterior.PointMass
    )
    transition: transition.Transition = field(default_factory=transition.Transition)
    observation: observation.Gibbs = field(default_factory=observation.Gibbs)
    inference: Any = field(default_factory=linearized.Linearized)
    prediction: Any = field(default_factory=prediction.MAP)
    predict_from: Literal["prior", "posterior"] = "posterior"
    upkeep: Any = None
    chunk: Count = 0
    centering: Centering | None = None
    least: Count = 0
    align: bool = False
    buffer: buffers.Buffer | None = field(default=None, metadata=LATE)
    labels: label_chain.LabelChain | None = field(default=None, metadata=LATE)
    domains: domains.Domains | None = field(default=None, metadata=LATE)

    def __post_init__(self) -> None:
        super().__post_init__()
        batch_norm.require_statistics(self.statistics)
        if isinstance(self.upkeep, list):
            object.__setattr__(self, "upkeep", tuple(self.upkeep))
        require(
            self.centering is None or isinstance(self.centering, Centering),
            "Recipe.centering",
            self.centering,
            "a Centering or None",
        )
        is_buffer = isinstance(self.buffer, buffers.Buffer) and not isinstance(self.buffer, type)
        allowed = "a Buffer, such as CategoryBalanced(), or None"
        require(self.buffer is None or is_buffer, "Recipe.buffer", self.buffer, allowed)
        require(
            self.buffer is None or self.least == 0,
            "Recipe.least",
            self.least,
            "0 with a buffer, which says itself when an update is due",
        )
        is_chain = self.labels is None or isinstance(self.labels, label_chain.LabelChain)
        require(is_chain, "Recipe.labels", self.labels, "a LabelChain or None")
        is_memory = self.domains is None or isinstance(self.domains, domains.Domains)
        require(is_memory, "Recipe.domains", self.domains, "a Domains or None")
        allowed = "None with a buffer, whose samples are of all domains"
        alone = self.domains is None or self.buffer is None
        require(alone, "Recipe.domains", self.domains, allowed)
        self.filter(predictive.LinearHead(2))  # checks the other fields

    @property
    def measures_source(self) -> bool:
        """Whether statistics of source data are a part of the model."""
        by_data = getattr(self.statistics, "baseline", "running") == "data"
        return self.align or by_data

    def describe(self) -> str:
        """What was chosen, a line for each field that is not empty, without defaults in it."""
        chosen = {item.name: getattr(self, item.name) for item in fields(self)}
        return "\n".join(
            f"{name}: {value if isinstance(value, str) else abbreviate(value)}"
            for name, value in chosen.items()
            if value is not None and value is not False and value != 0
        )

    def filter(
        self, model: predictive.PredictiveModel, shares: Tensor | None = None
    ) -> filtering.Filter:
        """The filter on a model; ``shares`` of the classes in the source [k], for centring."""
        if self.centering is not None:
            model = Centered(model, self.centering, shares)
        rules = (self.transition, self.observation, self.inference, self.prediction)
        return filtering.Filter(model, *rules, self.predict_from, self.upkeep)


register(recipe=(Recipe,))

_TOO_DEEP = "TOML must be of parts inside parts some levels deep, got more"
_NOTHING = "None"  # the kind of a field that is left empty, for TOML has no null


def _by_name() -> dict[str, type[Any]]:
    """Every class of the table as it is now."""
    return {name: cls for classes in VARIANTS.values() for name, cls in classes.items()}


def to_dict(variant: Any) -> dict[str, Any]:
    """A variant as plain data: its kind and its fields."""
    name = type(variant).__name__
    if _by_name().get(name) is not type(variant):
        raise ValueError(
            f"{variant!r} cannot be written as data: {name} is not in the table of variants"
        )
    return {
        "kind": name,
        **{
            item.name: _plain(value)
            for item in fields(variant)
            if (value := getattr(variant, item.name)) is not None or item.default is not None
        },
    }


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if value is None:
        return {"kind": _NOTHING}
    if isinstance(value, (bool, str)):
        return value
    if isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else float(value)
    if is_dataclass(value):
        return to_dict(value)
    raise ValueError(
        f"{value!r} cannot be written as data: only variants in the table, numbers, texts and "
        "lists can"
    )


def from_dict(data: dict[str, Any]) -> Any:
    """The variant that plain data describe; an unknown name is an error with the nearest one."""
    kind, classes = data.get("kind"), _by_name()
    cls = classes.get(kind) if isinstance(kind, str) else None
    if cls is None:
        hint = nearest(kind, list(classes)) if isinstance(kind, str) else f", in {data!r}"
        raise ValueError(f"kind must be the name of a variant, got {kind!r}{hint}")
    known = {item.name: item for item in fields(cls)}
    for key in data:
        if key != "kind" and key not in known:
            raise ValueError(
                f"{kind} has no field {key!r}{nearest(key, list(known))}; its fields are "
                f"{list(known)}"
            )
    for name, item in known.items():
        if name not in data and item.default is MISSING and item.default_factory is MISSING:
            raise ValueError(f"{kind}.{name} must be given: it has no default")
    values = {key: _build(value) for key, value in data.items() if key != "kind"}
    for key, value in values.items():
        _require_role(f"{kind}.{key}", value, known[key])
    return cls(**values)


def _require_role(where: str, value: Any, field: Field[Any]) -> None:
    """Raise if a field whose default is a variant, or a tuple of them, gets another role."""
    default: Any = field.default if field.default_factory is MISSING else field.default_factory()
    several = isinstance(default, tuple) and len(default) > 0
    role = role_of(default[0] if several else default)
    if value is None:  # whether a field may be empty is the class's own check
        return
    listed = value if several else (value,)
    fits = isinstance(listed, tuple) and all(role_of(item) == role for item in listed)
    if role is not None and not fits:
        what = f"a list of variants of role {role}" if several else f"a variant of role {role}"
        raise ValueError(f"{where} must be {what}, from {list(VARIANTS[role])}, got {value!r}")


def _build(value: Any) -> Any:
    if isinstance(value, dict):
        return None if value == {"kind": _NOTHING} else from_dict(value)
    return tuple(_build(item) for item in value) if isinstance(value, list) else value


def change(variant: Any, path: str, text: str) -> Any:
    """The variant with the field at a path, such as ``transition.dynamics.rho``, set to a TOML
    value; a bare word is a text, but ``None`` nothing.

    >>> change(Recipe(), "observation.weighting.beta", "3.0").observation.weighting
    Constant(beta=3.0)
    """
    try:
        value = _read_toml(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = {"kind": _NOTHING} if text == _NOTHING else text
    data = to_dict(variant)
    part: Any = data
    *names, last = path.split(".")
    for depth, name in enumerate(names):
        part = _descend(part, name, path, ".".join(names[:depth]))
    if isinstance(part, list):
        _descend(part, last, path, ".".join(names))
        part[int(last)] = value
    else:
        require(
            isinstance(part, dict),
            path,
            text,
            f"the path of a field; {'.'.join(names)} is {part!r}",
        )
        part[last] = value
    return from_dict(data)


def _descend(part: Any, name: str, path: str, where: str) -> Any:
    """The part of plain data of this name or, in a list, at this place."""
    if isinstance(part, list):
        require(
            name.isdigit() and int(name) < len(part),
            path,
            name,
            f"a place below {len(part)} in {where}",
        )
        return part[int(name)]
    known = [key for key in part if key != "kind"] if isinstance(part, dict) else []
    require(
        name in known,
        path,
        name,
        f"one of the fields {known} of {where or part['kind']}{nearest(name, known)}",
    )
    return part[name]


def abbreviate(value: Any) -> str:
    """The expression of a variant, without the fields that have their defaults.

    >>> abbreviate(Recipe(statistics=batch_norm.Ema(momentum=0.5)))
    'Recipe(statistics=Ema(momentum=0.5))'
    """
    if isinstance(value, tuple):
        parts = ", ".join(map(abbreviate, value))
        return f"({parts},)" if len(value) == 1 else f"({parts})"
    if not is_dataclass(value) or isinstance(value, type):
        return repr(value)
    own = ((item, getattr(value, item.name)) for item in fields(value) if item.init)
    parts = ", ".join(
        f"{item.name}={abbreviate(each)}" for item, each in own if not _is_default(item, each)
    )
    return f"{type(value).__name__}({parts})"


def _is_default(item: Field[Any], value: Any) -> bool:
    """Whether a field has its default, by what is printed: values may be tensors."""
    default = item.default if item.default_factory is MISSING else item.default_factory()
    return repr(value) == repr(default)


def to_toml(variant: Any) -> str:
    """A variant as a TOML document."""
    return "".join(f"{key} = {_toml(value)}\n" for key, value in to_dict(variant).items())


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def from_toml(text: str) -> Any:
    """The variant that a TOML document describes; a mark of UTF-8 may stand before it."""
    try:
        return from_dict(_read_toml(text.removeprefix("\ufeff")))
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def _read_toml(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
