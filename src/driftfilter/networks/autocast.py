"""Precision of a network's own operations: autocast put aside for the algebra, and given back for a
call.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from driftfilter.base.fork_lock import ForkLock

_LOCK = ForkLock()


AUTOCAST = ("cpu", "cuda")  # kinds of devices whose autocast is put aside and given back


_AUTOCAST: ContextVar[tuple[tuple[str, torch.dtype], ...]] = ContextVar(
    "autocast", default=()
)  # device type and dtype


@contextmanager
def full_precision(own: torch.dtype | None = None) -> Iterator[None]:
    """The algebra of a filter in the dtypes of its tensors, whatever autocast the caller is under:
    see ``as_called``.

    With a dtype of its ``own`` the module is under that autocast instead, with float32 under none.
    """
    found = _autocast_now()
    kinds = [kind for kind in AUTOCAST if kind != "cuda" or torch.cuda.is_available()]
    wanted = found if own is None else tuple((kind, own) for kind in kinds)
    if own == torch.float32:
        wanted = ()
    if not wanted and not found:
        yield
        return
    before = _AUTOCAST.set(wanted)
    try:
        with ExitStack() as stack:
            for kind, _ in found:
                stack.enter_context(torch.autocast(kind, enabled=False))
            yield
    finally:
        _AUTOCAST.reset(before)


@contextmanager
def as_called() -> Iterator[None]:
    """The autocast that ``full_precision`` has put aside, for a call of the module itself."""
    with ExitStack() as stack:
        for kind, dtype in _AUTOCAST.get():
            stack.enter_context(torch.autocast(kind, dtype))
        yield


def autocast_of_model() -> tuple[tuple[str, torch.dtype], ...]:
    """The autocast that a call of the module would be under: device types and dtypes."""
    return _autocast_now() + _AUTOCAST.get()


def _autocast_now() -> tuple[tuple[str, torch.dtype], ...]:
    return tuple(
        (kind, torch.get_autocast_dtype(kind))
        for kind in AUTOCAST
        if torch.is_autocast_enabled(kind)
    )


def under_autocast(kind: str) -> bool:
    """Whether a call of the module on this kind of device would be under autocast."""
    return any(kind == found for found, _ in autocast_of_model())


@contextmanager
def forward_mode() -> Iterator[None]:
    """torch's forward mode has one state for all threads, and no rule for fused attention or
    compiled code.
    """
    with _LOCK, sdpa_kernel(SDPBackend.MATH), torch.compiler.set_stance("force_eager"):
        fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)


def cast(inputs: Any, dtype: torch.dtype) -> Any:
    """Floating inputs in the dtype of a module; under autocast only float64, which autocast leaves
    alone.
    """
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        return inputs
    automatic = torch.is_autocast_enabled(inputs.device.type) and inputs.dtype != torch.float64
    return inputs if automatic else inputs.to(dtype)


def dtype_of(module: nn.Module) -> torch.dtype:
    """The dtype of the module's first floating parameter; float32 if it has none."""
    floating = (
        parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()
    )
    return next(floating, torch.float32)
