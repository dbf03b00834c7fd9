"""What is kept of responses: for a while, within bounds, each visible to whose key made it only.

Pure: time is an argument; bodies are bytes of JSON that only cancelling looks into. Invariant:
never more entries or bytes than the limits allow; the oldest go first.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import orjson

LEASE_S = 60.0
"""A response that runs and whose ingress has not been heard of for so long is lost."""


class Signal(enum.Enum):
    """What whoever runs a response is told."""

    RUN = "run"
    CANCEL = "cancel"
    DELETE = "delete"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """Bounds of the store, over all keys.

    Attributes:
        ttl_s: how long a response is kept, seconds from its last change.
        max_count: responses.
        max_bytes: their bodies and conversations together.
    """

    ttl_s: float = 3600.0
    max_count: int = 10_000
    max_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        if self.ttl_s <= 0:
            raise ValueError(f"ttl_s must be > 0, got {self.ttl_s}")
        for name in ("max_count", "max_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")


DEFAULT_LIMITS = StoreLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """One response.

    Attributes:
        body: JSON of the response object.
        items: JSON list of its whole conversation but its own output.
    """

    body: bytes
    items: bytes


@dataclass(slots=True)
class _Entry:
    owner: str
    response: StoredResponse
    stored_at: float
    heard_at: float
    is_running: bool
    signal: Signal = field(default=Signal.RUN)

    @property
    def num_bytes(self) -> int:
        return len(self.response.body) + len(self.response.items)


class ResponseStore:
    """Responses by id. Dictionaries keep the order of insertion, which is that of eviction."""

    def __init__(self, limits: StoreLimits) -> None:
        self._limits = limits
        self._entries: dict[str, _Entry] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(
        self,
        owner: str,
        response_id: str,
        response: StoredResponse,
        now: float,
        *,
        is_running: bool,
    ) -> bool:
        """Keep a response, in place of what was known of it; return whether it is kept.

        One that was cancelled meanwhile stays so, and one that was deleted stays deleted. One that
        alone exceeds the limits is not kept.
        """
        known = self._entries.get(response_id)
        if known is not None:
            if known.owner != owner:
                return False
            self._remove(response_id)
            if known.signal is Signal.DELETE:
                return False
            if known.signal is Signal.CANCEL:
                response = StoredResponse(body=_cancelled(response.body), items=response.items)
        self._expire(now)
        entry = _Entry(owner, response, now, now, is_running)
        limits = self._limits
        if entry.num_bytes > limits.max_bytes:
            return False
        while self.num_bytes + entry.num_bytes > limits.max_bytes or len(self) >= limits.max_count:
            self._remove(next(iter(self._entries)))
        self._entries[response_id] = entry
        self.num_bytes += entry.num_bytes
        return True

    def get(self, owner: str, response_id: str, now: float) -> StoredResponse | None:
        """Return a response; None: there is none, or it is another's."""
        entry = self._find(owner, response_id, now)
        if entry is None:
            return None
        if entry.is_running and now - entry.heard_at > LEASE_S:
            return StoredResponse(body=_lost(entry.response.body), items=entry.response.items)
        return entry.response

    def delete(self, owner: str, response_id: str, now: float) -> bool:
        """Forget a response, and end it if it runs; return whether there was one."""
        entry = self._find(owner, response_id, now)
        if entry is None:
            return False
        if entry.is_running:
            # Its ingress has to hear of it; nobody else does.
            entry.signal = Signal.DELETE
        else:
            self._remove(response_id)
        return True

    def cancel(self, owner: str, response_id: str, now: float) -> StoredResponse | None:
        """End a response that runs; return it as it is now, or None if there is none.

        One that has ended stays as it is.
        """
        entry = self._find(owner, response_id, now)
        if entry is None:
            return None
        if entry.is_running and entry.signal is Signal.RUN:
            entry.signal = Signal.CANCEL
            self.num_bytes -= entry.num_bytes
            body = _cancelled(entry.response.body)
            entry.response = StoredResponse(body=body, items=entry.response.items)
            self.num_bytes += entry.num_bytes
        return self.get(owner, response_id, now)

    def poll(self, response_id: str, now: float) -> Signal:
        """Say what is to become of a response; asked by whoever runs it, while it runs."""
        entry = self._entries.get(response_id)
        if entry is None:  # evicted, or this store was restarted: the answer is still wanted
            return Signal.RUN
        entry.heard_at = now
        return entry.signal

    def _find(self, owner: str, response_id: str, now: float) -> _Entry | None:
        self._expire(now)
        entry = self._entries.get(response_id)
        if entry is None or entry.owner != owner or entry.signal is Signal.DELETE:
            return None
        return entry

    def _expire(self, now: float) -> None:
        # In the order of their last changes, so the first that is young enough ends the search.
        while self._entries:
            response_id, entry = next(iter(self._entries.items()))
            if now - entry.stored_at <= self._limits.ttl_s:
                return
            self._remove(response_id)

    def _remove(self, response_id: str) -> None:
        self.num_bytes -= self._entries.pop(response_id).num_bytes


def _cancelled(body: bytes) -> bytes:
    response: dict[str, Any] = orjson.loads(body)
    return orjson.dumps({**response, "status": "cancelled", "incomplete_details": None})


def _lost(body: bytes) -> bytes:
    response: dict[str, Any] = orjson.loads(body)
    error = {"code": "server_error", "message": "the process that ran this response was lost"}
    return orjson.dumps({**response, "status": "failed", "error": error})
