"""Which worker a tenant belongs to: the one whose hash with the tenant's is highest.

A worker that joins takes its share of each of the others, one that leaves gives its own to all;
nobody else moves.
"""

import hashlib
from collections.abc import Sequence


def find_owner(key: str, workers: Sequence[str]) -> str:
    """The worker of a tenant."""
    return max(workers, key=lambda worker: hashlib.sha256(f"{worker} {key}".encode()).digest())
