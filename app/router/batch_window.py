"""The window in which requests that could go out at once are held, so as to go out together.

Pure. Engines batch by themselves, so for generation it only adds latency and is off by default; it
pays where a call costs more than its wait. Invariant: nothing is held that waits for a replica.
"""

from __future__ import annotations

import math


class BatchWindow:
    """Opens with a request that finds nobody waiting, and closes when nobody waits any more.

    In between it holds, until its time is up, it has `max_size` requests, or one of them has no
    time to spare. From then on it lets everything through: what waits longer, waits for a replica.
    """

    def __init__(self, *, wait_s: float, max_size: int) -> None:
        """Hold requests for at most `wait_s`, and at most `max_size` of them."""
        self._wait_s = wait_s
        self._max_size = max_size
        self._holds_until: float | None = None  # None: closed; -inf: lets everything through

    @property
    def is_used(self) -> bool:
        """Whether anything is ever held."""
        return self._wait_s > 0

    @property
    def next_due(self) -> float:
        """When it will let its requests go by itself, or infinity."""
        until = self._holds_until
        return math.inf if until is None or until == -math.inf else until

    def join(self, now: float, *, start_by: float) -> None:
        """Take in a request that must start by `start_by`; half of that time may be spent here."""
        if self._holds_until is None:
            self._holds_until = now + self._wait_s
        self._holds_until = min(self._holds_until, now + max(0.0, start_by - now) / 2)

    def holds(self, now: float, size: int) -> bool:
        """Whether `size` requests are kept for now."""
        return self._holds_until is not None and now < self._holds_until and size < self._max_size

    def let_go(self) -> None:
        """Hold nothing until everybody has gone."""
        self._holds_until = -math.inf

    def close(self) -> None:
        """Note that nobody waits."""
        self._holds_until = None
