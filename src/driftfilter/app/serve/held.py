"""The tenants in memory: those asked last as they are, others packed, and no more than some bytes.

The store has them all: one that is let go of is read again when it is asked for.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, NamedTuple

from numpy.typing import NDArray

import driftfilter as df
from driftfilter.adapter.state import AdapterState
from driftfilter.app.serve.packing import Packed, pack, unpack
from driftfilter.app.serve.sizes import bytes_of

_AWAKE = 64  # tenants that were asked last: others are packed while they rest
_SMALL = 32 << 10  # bytes of a state that is not worth packing
_BESIDE = 600  # bytes of a packed tenant beside its data


class Tenant(NamedTuple):
    """What is known of a tenant."""

    state: AdapterState
    sequence: int = 0  # of the last step
    answer: NDArray[Any] | None = None  # to it
    digest: str = ""  # of its request
    size: int = 0  # bytes
    is_new: bool = False


class _Resting(NamedTuple):
    """A tenant without its state, and that packed."""

    tenant: Tenant
    packed: Packed


class Tenants:
    """Tenants by key, of at most ``limit`` bytes."""

    def __init__(self, adapter: df.Adapter, limit: int) -> None:
        self._adapter, self.limit, self.used = adapter, limit, 0
        self._held: OrderedDict[str, Tenant | _Resting] = OrderedDict()  # the oldest first
        self._awake: OrderedDict[str, None] = OrderedDict()  # those that may be packed

    def __len__(self) -> int:
        return len(self._held)

    def keys(self) -> Iterable[str]:
        """Whom they are of."""
        return self._held.keys()

    def get(self, key: str, like: AdapterState) -> Tenant | None:
        """A tenant that is here; ``like``: any state on the same filter."""
        found = self._held.get(key)
        if found is None:
            return None
        self._held.move_to_end(key)
        if isinstance(found, Tenant):
            return found
        self._adapter.restore(like)
        self._adapter.load_state_dict(unpack(found.packed, like))
        return self.hold(key, found.tenant._replace(state=self._adapter.snapshot()))

    def hold(self, key: str, tenant: Tenant) -> Tenant:
        """Keep a tenant as the one that was asked last."""
        self.drop(key)
        answer = 0 if tenant.answer is None else tenant.answer.nbytes
        tenant = tenant._replace(size=bytes_of(tenant.state) + answer)
        self._held[key] = tenant
        self.used += tenant.size
        if tenant.size > _SMALL and tenant.state.current.belief.mean.device.type == "cpu":
            self._awake[key] = None
        return tenant

    def drop(self, key: str) -> None:
        """Let go of a tenant."""
        self._awake.pop(key, None)
        found = self._held.pop(key, None)
        if found is not None:
            self.used -= found.size if isinstance(found, Tenant) else found.tenant.size

    def tidy(self) -> int:
        """Pack large ones that were not asked lately, and let go of those that were not asked
        longest; how many went.
        """
        while len(self._awake) > _AWAKE:
            self._pack(next(iter(self._awake)))
        before = len(self._held)
        while self.used > self.limit and self._held:
            self.drop(next(iter(self._held)))
        return before - len(self._held)

    def _pack(self, key: str) -> None:
        tenant = self._held[key]
        assert isinstance(tenant, Tenant)
        watched = self._adapter.monitor is not None
        packed = pack(tenant.state, self._adapter.recipe, watched)
        answer = 0 if tenant.answer is None else tenant.answer.nbytes
        size = len(packed.data) + answer + _BESIDE
        self.used += size - tenant.size
        rest = tenant._replace(state=AdapterState(), size=size)
        self._held[key] = _Resting(rest, packed)  # in its place in the order
        del self._awake[key]
