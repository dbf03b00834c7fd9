"""What a client wants of the service beside the completion: how soon, how fast, how urgent.

Read from headers, which any OpenAI client can add: `x-slo-ttft-ms`, `x-slo-tpot-ms`, `x-timeout-ms`
and `x-priority`. Knows neither HTTP bodies nor the router.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from app.auth import hash_key
from replicas.errors import InvalidRequest
from replicas.wire import RoutingHints

MAX_PRIORITY = 100
TENANT_DIGITS = 16
NO_HINTS = RoutingHints()


@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """Of one HTTP request.

    Attributes:
        hints: what the router is told.
        timeout_s: the client waits no longer, or None.
        priority: lower runs earlier; from 0, so that a client can only step back.
    """

    hints: RoutingHints = NO_HINTS
    timeout_s: float | None = None
    priority: int = 0

    def within(self, limit_s: float | None) -> float | None:
        """Return the time budget: the client's, if it is below the server's."""
        if self.timeout_s is None or limit_s is None:
            return self.timeout_s if limit_s is None else limit_s
        return min(self.timeout_s, limit_s)


NO_DEMANDS = Demands()


def read_demands(headers: Mapping[str, str]) -> Demands:
    """Read a request's headers.

    Raises:
        InvalidRequest: a header is not a number in its range.
    """
    priority = _number(headers, "x-priority", low=0, high=MAX_PRIORITY) or 0
    return Demands(
        hints=RoutingHints(
            tenant=tenant_of(headers.get("authorization")),
            ttft_target_s=_seconds(headers, "x-slo-ttft-ms"),
            tpot_target_s=_seconds(headers, "x-slo-tpot-ms"),
        ),
        timeout_s=_seconds(headers, "x-timeout-ms"),
        priority=int(priority),
    )


def tenant_of(authorization: str | None) -> str:
    """Name whoever sent an Authorization header: part of its key's digest, never the key."""
    key = (authorization or "").partition(" ")[2].strip()
    return hash_key(key.encode())[:TENANT_DIGITS] if key else ""


def _seconds(headers: Mapping[str, str], name: str) -> float | None:
    milliseconds = _number(headers, name, low=0, high=math.inf)
    return None if milliseconds is None else milliseconds / 1e3


def _number(headers: Mapping[str, str], name: str, *, low: float, high: float) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high or value == math.inf:
        limit = f"in [{low:g}, {high:g}]" if high < math.inf else f">= {low:g}"
        raise InvalidRequest(f"header {name}: expected a number {limit}, got {text!r}", param=name)
    return value
