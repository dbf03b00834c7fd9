"""Requests that wait in the queue for a replica that is better than one that is ready.

Knows neither replicas nor costs: the core says which request is held, and until when.
"""

from __future__ import annotations

import math

MAX_HELD = 32
"""So many requests at most are held at a time."""
MIN_HOLD_S = 0.01


class HeldRequests:
    """Until when each held request stays where it is, by its id."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def __contains__(self, request_id: str) -> bool:
        """Whether a request is held."""
        return request_id in self._until

    @property
    def is_full(self) -> bool:
        """Whether nothing more can be held."""
        return len(self._until) >= MAX_HELD

    @property
    def next_due(self) -> float:
        """When the first is to be looked at again, on the router clock; infinity without any."""
        return min(self._until.values(), default=math.inf)

    def hold(self, request_id: str, *, now: float, for_s: float) -> None:
        """Hold a request for some time, at least a moment."""
        self._until[request_id] = now + max(for_s, MIN_HOLD_S)

    def let_go(self, now: float) -> None:
        """Forget those whose time is up."""
        if self._until:
            self._until = {name: at for name, at in self._until.items() if at > now}

    def clear(self) -> None:
        """Forget all: nothing is queued."""
        self._until.clear()
