"""Circuit breakers: replicas on which calls fail, one after another, get none for a while.

A replica that dies says so by its silence. One that lives, reports, and fails whatever it is given
looks idle, and would draw every request to itself. Pure. Invariant: a replica without a failure
since its last success has no breaker.
"""

from __future__ import annotations

from dataclasses import dataclass

FAILURES_TO_OPEN = 2
"""Failures in a row; one may be chance, and is what a dying replica gives."""
FIRST_OPEN_S = 1.0
MAX_OPEN_S = 30.0
QUIET_S = 10.0
"""A replica that may be tried and has not failed for so long is trusted again: the request that
tries it may be a long one."""


@dataclass(slots=True)
class _Breaker:
    """Failures in a row, and until when no call is tried; in the past where it never opened."""

    num_failures: int = 0
    open_until: float = 0.0


class CircuitBreakers:
    """The breakers of all replicas that have failed, by replica id.

    Closed, a breaker changes nothing. Open, its replica takes no request. After that it is half
    open: the replica takes one request at a time until one succeeds, which closes it, or fails,
    which opens it for twice as long.
    """

    def __init__(self) -> None:
        self._breakers: dict[str, _Breaker] = {}

    def __len__(self) -> int:
        return len(self._breakers)

    def failed(self, replica_id: str, now: float) -> None:
        """Count a call that the replica failed, or that was lost on the way."""
        breaker = self._breakers.setdefault(replica_id, _Breaker())
        if now < breaker.open_until:
            return  # sent before it opened: the same trouble
        breaker.num_failures += 1
        breaker.open_until = now
        excess = breaker.num_failures - FAILURES_TO_OPEN
        if excess >= 0:
            breaker.open_until += min(FIRST_OPEN_S * 2.0**excess, MAX_OPEN_S)

    def succeeded(self, replica_id: str) -> None:
        """Close the breaker."""
        self._breakers.pop(replica_id, None)

    def max_outstanding(self, replica_id: str, now: float) -> int | None:
        """Return how many requests the replica may have: none, one, or None for any number."""
        breaker = self._breakers.get(replica_id)
        if breaker is None or breaker.num_failures < FAILURES_TO_OPEN:
            return None
        return 0 if now < breaker.open_until else 1

    def tend(self, now: float) -> tuple[str, ...]:
        """Drop what has been quiet for long; return the replicas whose limit may have changed."""
        tended = tuple(self._breakers)
        for replica_id in tended:
            if now - self._breakers[replica_id].open_until > QUIET_S:
                del self._breakers[replica_id]
        return tended
