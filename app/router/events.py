"""What a router's core is told, and what it answers to that: plain data.

The vocabulary of `app.router.core`, of whoever drives it and of the simulator.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from replicas.errors import ServingError
from replicas.wire import CacheChange, ReplicaLoad

NO_CHANGE = CacheChange()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestArrived:
    """A request wants a replica.

    Attributes:
        request_id: unique among all requests that have not ended.
        num_prompt_tokens: >= 1.
        max_tokens: most output tokens.
        deadline: router clock, seconds, or None.
        priority: lower goes first.
        excluded: replicas that must not run it.
        tenant: whose it is, for fairness; not a secret.
        page_keys: of the prompt's full pages, see replicas/page_keys.py.
        ttft_target_s: wanted time to first token, or None.
        tpot_target_s: wanted time per output token, or None.
    """

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    deadline: float | None = None
    priority: int = 0
    excluded: frozenset[str] = frozenset()
    tenant: str = ""
    page_keys: tuple[bytes, ...] = ()
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """A request is over, for whatever reason: finished, failed, cancelled. Idempotent.

    Attributes:
        request_id: which one.
        num_output_tokens: what it produced, or None when nobody knows.
    """

    request_id: str
    num_output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ReplicaReported:
    """A replica introduced itself, or repaired its stream: it takes requests.

    Attributes:
        replica_id: who reports.
        sequence: of its latest event.
        load: what it is doing.
        cached_pages: keys of all pages that its prefix cache holds.
        offloaded_pages: keys of pages that only its host tier holds.
    """

    replica_id: str
    sequence: int
    load: ReplicaLoad
    cached_pages: tuple[bytes, ...] = ()
    offloaded_pages: tuple[bytes, ...] = ()


class LoadChanged(NamedTuple):
    """A replica's event; `sequence` is one more than that of its last.

    Attributes:
        replica_id: whose.
        sequence: its number.
        load: what it is doing.
        cache: what became of its cached pages since the last event.
        tier: the same of its host tier, where it has one.
    """

    replica_id: str
    sequence: int
    load: ReplicaLoad
    cache: CacheChange = NO_CHANGE
    tier: CacheChange | None = None


@dataclass(frozen=True, slots=True)
class ReplicaSuspected:
    """A sign of trouble, or of draining: send nothing until it reports; what it runs may go on.

    Attributes:
        replica_id: which one.
        has_failed: a call to it was lost or failed, which its circuit breaker counts.
    """

    replica_id: str
    has_failed: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaRemoved:
    """A replica is gone with everything that it ran."""

    replica_id: str


@dataclass(frozen=True, slots=True)
class Ticked:
    """About a second has passed, or `next_wakeup` has come."""

    is_second: bool = True


@dataclass(frozen=True, slots=True)
class ReplicaDrained:
    """An operator wants the replica to get no new requests, or to get them again."""

    replica_id: str
    is_drained: bool


Event = (
    RequestArrived
    | RequestEnded
    | ReplicaReported
    | LoadChanged
    | ReplicaSuspected
    | ReplicaRemoved
    | ReplicaDrained
    | Ticked
)


@dataclass(frozen=True, slots=True)
class Send:
    """Send the request to the replica; it is booked there.

    Attributes:
        ttft_s: predicted seconds from now to its first token; None: nothing is predicted.
    """

    request_id: str
    replica_id: str
    ttft_s: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Fail:
    """Answer the request with the error; it is forgotten. It may have been sent before."""

    request_id: str
    error: ServingError


@dataclass(frozen=True, slots=True)
class Resubscribe:
    """The replica's event stream has a gap: ask for a report."""

    replica_id: str


Action = Send | Fail | Resubscribe
