"""Who may ask, and how often."""

import hashlib
import hmac
import time
from collections import OrderedDict
from pathlib import Path

from driftfilter.app.serve.problems import ProblemError
from driftfilter.base.checks import require

_KNOWN = 10_000  # tenants whose rate is remembered
LONGEST = 200  # characters of a tenant's name


def require_name(tenant: str) -> str:
    """The name of a tenant: it is never part of a path, but must be printable and short.

    U+FFFD stands for any bytes that are no UTF-8: names that differ would be one tenant.
    """
    if not 1 <= len(tenant) <= LONGEST or not tenant.isprintable() or "\ufffd" in tenant:
        raise ProblemError(400, "tenant", tenant, f"1 to {LONGEST} printable characters of UTF-8")
    return tenant


class Tokens:
    """Bearer tokens, one a line of a file; no file: everybody may ask."""

    def __init__(self, path: Path | None) -> None:
        text = "" if path is None else path.read_text(encoding="utf-8-sig")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        require(
            path is None or bool(lines), "--token-file", str(path), "a file of tokens, one a line"
        )
        self._digests = [hashlib.sha256(line.encode()).digest() for line in lines]

    def check(self, header: str | None) -> None:
        """Raise unless a header names one of the tokens; how long it takes tells nothing."""
        if not self._digests:
            return
        kind, _, token = (header or "").partition(" ")
        # A header is read byte by byte: as Latin-1, whatever it is.
        given = hashlib.sha256(token.strip().encode("latin-1", "replace")).digest()
        found = [hmac.compare_digest(given, digest) for digest in self._digests]
        if kind.lower() != "bearer" or not any(found):
            allowed = "Bearer, then a token of this service"
            raise ProblemError(401, "Authorization", kind, allowed)


class Rate:
    """At most so many requests a second of each tenant, in bursts of twice as many; 0: any."""

    def __init__(self, each: float) -> None:
        self.each = each
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # requests, when

    def check(self, tenant: str) -> None:
        """Raise if a tenant has asked too often."""
        if not self.each:
            return
        now, most = time.monotonic(), max(1.0, 2 * self.each)
        left, then = self._left.pop(tenant, (most, now))
        left = min(most, left + (now - then) * self.each)
        self._left[tenant] = (left - (left >= 1), now)
        if len(self._left) > _KNOWN:
            self._left.popitem(last=False)
        if left < 1:
            wait = (1 - left) / self.each
            allowed = f"asked at most {self.each:g} times a second"
            raise ProblemError(429, "tenant", tenant, allowed, retry_after=wait)


class Flight:
    """Bytes of bodies that have come and are not answered yet: at most so many, together."""

    def __init__(self, most: int) -> None:
        self.most, self.used = most, 0

    def take(self, size: int) -> None:
        """Let so many more in, or raise."""
        if self.used + size > self.most:
            allowed = f"at most {self.most - self.used} bytes while {self.used} wait"
            raise ProblemError(503, "body", size, allowed, retry_after=1)
        self.used += size

    def give_back(self, size: int) -> None:
        """So many are answered."""
        self.used -= size
