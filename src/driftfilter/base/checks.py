"""Refusals: every error names the field, the value it got and what is allowed."""

import functools
import inspect
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Protocol,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import torch
from torch import Tensor

# Both are used without torch, too.
from driftfilter.base.suggest import nearest as nearest, require as require

T = TypeVar("T")


class NotPositiveDefiniteError(ValueError):
    """A covariance or precision that is not (or would no longer be) positive definite."""


class NotFiniteError(ValueError):
    """NaN or infinity where numbers are needed."""


def require_number(
    field: str,
    value: Any,
    low: float,
    high: float,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    """Raise unless ``value`` is a finite real number inside the interval."""
    number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    inside = (
        number
        and (low < value if open_low else low <= value)
        and (value < high if open_high else value <= high)
    )
    left = "(" if open_low or math.isinf(low) else "["
    right = ")" if open_high or math.isinf(high) else "]"
    require(inside, field, value, f"a finite number in {left}{low:g}, {high:g}{right}")


def require_count(field: str, value: Any, low: int) -> None:
    """Raise unless ``value`` is an integer of at least ``low``."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    require(whole and value >= low, field, value, f"an integer >= {low}")


# The one table of variants: role -> name -> class. A module adds its own as it is loaded, so that
# every instance has its role; users may add theirs.
VARIANTS: dict[str, dict[str, type[Any]]] = {
    role: {}
    for role in (
        "model",
        "statistics",
        "centering",
        "labels",
        "domains",
        "dynamics",
        "noise",
        "transition",
        "loss",
        "augmentation",
        "weighting",
        "teacher",
        "observation",
        "curvature",
        "inference",
        "optimizer",
        "prediction",
        "upkeep",
        "parameters",
        "buffer",
        "recipe",
        "source",
    )
}


def register(**variants: tuple[type[Any], ...]) -> None:
    """Add classes to the table of variants, by role."""
    for role, classes in variants.items():
        VARIANTS[role] |= {cls.__name__: cls for cls in classes}


def role_of(value: Any) -> str | None:
    """The role of a variant in the table; None for anything else."""
    cls, name = type(value), type(value).__name__
    return next((role for role, found in VARIANTS.items() if found.get(name) is cls), None)


def require_role(field: str, value: Any, role: str, example: str) -> None:
    """Raise unless ``value`` can play a role: an instance and not a class, and no variant of
    another role.
    """
    usable = (callable(value) or hasattr(value, "expand")) and not isinstance(value, (type, Tensor))
    fits = role_of(value) == role or (usable and role_of(value) is None)
    require(fits, field, value, f"of role {role!r}, such as {example}")


# Metadata of a field that came later than the first checkpoints: while it has its default, a recipe
# is of the kind it was before.
LATE = {"late": True}


class Rule(Protocol):
    """What the annotation of a field says about its value: ``Annotated[type, rule]``."""

    def check(self, field: str, value: Any) -> None:
        """Raise ``ValueError`` naming the field if the value breaks the rule."""


class Interval(NamedTuple):
    """A finite number between two bounds, which are allowed unless they are open."""

    low: float
    high: float
    open_low: bool = False
    open_high: bool = False

    def check(self, field: str, value: Any) -> None:
        require_number(field, value, *self)


class AtLeast(NamedTuple):
    """An integer of at least ``low``."""

    low: int

    def check(self, field: str, value: Any) -> None:
        require_count(field, value, self.low)


class OneOf(NamedTuple):
    """One of some values, as a ``Literal`` lists them."""

    allowed: tuple[Any, ...]

    def check(self, field: str, value: Any) -> None:
        require(
            any(isinstance(value, type(each)) and value == each for each in self.allowed),
            field,
            value,
            " or ".join(map(repr, self.allowed))
            if len(self.allowed) == 2
            else f"one of {list(self.allowed)}",
        )


class Role(NamedTuple):
    """A variant of a role, or an object of the user's in its place."""

    role: str
    example: str

    def check(self, field: str, value: Any) -> None:
        require_role(field, value, self.role, self.example)


Positive: TypeAlias = Annotated[float, Interval(0, math.inf, open_low=True)]
NotNegative: TypeAlias = Annotated[float, Interval(0, math.inf)]
Fraction: TypeAlias = Annotated[float, Interval(0, 1)]
PositiveFraction: TypeAlias = Annotated[float, Interval(0, 1, open_low=True)]
FractionBelowOne: TypeAlias = Annotated[float, Interval(0, 1, open_high=True)]
Count: TypeAlias = Annotated[int, AtLeast(0)]
PositiveCount: TypeAlias = Annotated[int, AtLeast(1)]


def _rule_of(annotation: Any) -> Rule | None:
    """The rule of an annotation without None; the type alone is a rule for truth values."""
    if annotation is bool:
        return OneOf((True, False))
    if get_origin(annotation) is Literal:
        return OneOf(get_args(annotation))
    rules = getattr(annotation, "__metadata__", ())
    return rules[0] if rules else None


@functools.cache
def _rules(cls: type) -> tuple[tuple[str, Rule, bool], ...]:
    """The fields of a dataclass that have a rule: name, rule, and whether None is allowed."""
    try:
        annotations, found = get_type_hints(cls, include_extras=True), []
    except NameError:  # a class in a function may name types that are known there alone
        return ()
    for name in (item.name for item in fields(cls)):
        united = get_origin(annotations[name]) in (Union, UnionType)
        parts = get_args(annotations[name]) if united else (annotations[name],)
        own = [part for part in parts if part is not NoneType]
        rule = _rule_of(own[0]) if len(own) == 1 else None
        if rule is not None:
            found.append((name, rule, len(own) < len(parts)))
    return tuple(found)


def check_fields(instance: Any, prefix: str) -> None:
    """Raise unless the fields of a dataclass keep the rules in their annotations.

    These are ``Annotated[float, Interval(0, 1)]`` and other rules, ``Literal[...]`` and ``bool``,
    each with or without ``| None``.
    """
    cls: type = type(instance)
    for name, rule, optional in _rules(cls):
        value = getattr(instance, name)
        if value is not None or not optional:
            rule.check(prefix + name, value)


class Checked:
    """A dataclass whose fields are held to their annotations when it is made."""

    def __post_init__(self) -> None:
        check_fields(self, f"{type(self).__name__}.")


class _Waiting(threading.local):
    """Checks of this thread that wait for the end of a step; None if checks are made at once."""

    # A number [] that is finite if all is well, and the check itself.
    checks: list[tuple[Tensor, Callable[[], None]]] | None = None
    blind: bool = False  # whether nobody looks at a number of a tensor until then


_WAITING = _Waiting()


@contextmanager
def finite_at_the_end() -> Iterator[None]:
    """Checks of tensors on an accelerator wait until the end, to look at the device once: each look
    would stop its queue.

    Where something fails before, the checks come first: the cause is raised, not what follows from
    it.
    """
    waiting = _WAITING.checks = []
    try:
        yield
    except Exception:
        _WAITING.checks = None
        _check_all(waiting)
        raise
    finally:
        _WAITING.checks = None
    _check_all(waiting)


def _check_all(waiting: list[tuple[Tensor, Callable[[], None]]]) -> None:
    if waiting and not torch.stack([told for told, _ in waiting]).isfinite().all().item():
        for _, check in waiting:
            check()


@contextmanager
def without_looking() -> Iterator[list[Tensor]]:
    """Nobody looks at a number of a tensor in this block: checks that wait are not made. What it
    gives are numbers [] that are finite if all of them would pass, there after the block.
    """
    told: list[Tensor] = []
    before = _WAITING.checks, _WAITING.blind
    waiting = _WAITING.checks = []
    _WAITING.blind = True
    try:
        yield told
        told += [own for own, _ in waiting]
    finally:
        _WAITING.checks, _WAITING.blind = before


def may_look() -> bool:
    """Whether somebody may look at a number of a tensor, which stops a GPU's queue."""
    return not _WAITING.blind


def can_wait(values: Tensor) -> bool:
    """Whether a check of a tensor waits for the end of a step."""
    return _WAITING.checks is not None and (values.is_cuda or _WAITING.blind)


def check_later(told: Tensor, check: Callable[[], None]) -> None:
    """Make a check that can wait at the end of the step, if a number [] is not finite then."""
    assert _WAITING.checks is not None
    _WAITING.checks.append((told, check))


@contextmanager
def checks_of_a_trial() -> Iterator[Callable[[], None]]:
    """What it gives forgets the checks that have come to wait in this block."""
    before = len(_WAITING.checks or ())

    def forget() -> None:
        del (_WAITING.checks or [])[before:]

    yield forget


def require_finite(field: str, values: Tensor) -> None:
    """Raise if a tensor holds NaN or infinity, saying how many and where the first one is."""
    if can_wait(values):
        # In half precision the sum of finite values may not be finite.
        total = values.sum(dtype=torch.float32 if values.dtype == torch.float16 else None)
        check_later(total, functools.partial(require_finite, field, values))
        return
    # A finite sum proves finite entries and costs one reduction; only a suspicious sum pays for the
    # full look. A handful of numbers is read out faster than it is summed.
    if values.numel() <= 16:
        finite = all(
            map(math.isfinite, (values if values.dim() == 1 else values.flatten()).tolist())
        )
    else:
        finite = math.isfinite(values.sum().item())
    if finite:
        return
    bad = ~torch.isfinite(values)
    if bad.any():
        where = tuple(bad.nonzero()[0].tolist())
        value = values[where].item()
        raise NotFiniteError(
            f"{field} must be finite, got {value} at index {list(where)} ({int(bad.sum())} of "
            f"{values.numel()} values)"
        )


def require_squarable(field: str, values: Tensor) -> None:
    """Raise unless the numbers of a floating tensor are finite, and so are the squares of their
    differences: with others, no distance or variance can be worked out.
    """
    require_finite(field, values)
    most = values.abs().amax().item() if values.numel() else 0.0
    bound = math.sqrt(torch.finfo(values.dtype).max) / 2
    require(most <= bound, field, f"numbers up to {most:g}", f"of numbers up to {bound:.3g}")


def require_positive(field: str, values: Tensor) -> None:
    """Raise unless all of a tensor is finite and > 0."""
    require_finite(field, values)
    if not (values > 0).all():
        least = values.min().item()
        raise NotPositiveDefiniteError(f"{field} must be > 0, got a smallest value of {least:g}")


def require_least(least: Tensor, reason: str) -> None:
    """Raise, for a reason, unless the least variance [] is > 0."""
    if can_wait(least):
        check_later(least.log(), functools.partial(require_least, least, reason))
    elif not least.item() > 0:
        raise NotPositiveDefiniteError(reason)


def require_shape(field: str, values: Any, allowed: str, *shape: int | None) -> None:
    """Raise unless ``values`` is a tensor of this shape (``None`` stands for any length >= 1)."""
    if not isinstance(values, Tensor):
        raise ValueError(
            f"{field} must be a tensor of shape {allowed}, got {type(values).__name__}"
        )
    sizes = values.shape
    if len(sizes) != len(shape) or any(
        size < 1 or want not in (None, size) for size, want in zip(sizes, shape, strict=True)
    ):
        raise ValueError(f"{field} must be of shape {allowed}, got shape {list(sizes)}")


def require_floating(field: str, values: Tensor) -> None:
    """Raise unless a tensor is float32 or float64 (half precision cannot carry a covariance)."""
    if values.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{field} must be float32 or float64, got {values.dtype}")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line outside this package, and outside torch's calls of modules, that led
    here.
    """
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (
        "driftfilter",
        "torch",
    ):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def unchecked(cls: type[T], **fields: Any) -> T:
    """An instance without its checks, for results that are right by construction."""
    instance = object.__new__(cls)
    instance.__dict__.update(fields)
    return instance
