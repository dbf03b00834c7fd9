"""The limits of a router: what serve_config.yaml says under `router`.

Pure data, checked when it is made.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.router.prefix_index import DEFAULT_MAX_KEYS


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Limits of one router.

    Attributes:
        max_queued_requests: requests that may wait here.
        max_queued_tokens: prompt tokens of those.
        max_waiting_per_replica: requests sent beyond a replica's slots, so that a slot that
            becomes free is refilled in the next step without a round trip.
        replica_wait_s: how long a new request waits for a replica while none is ready; 0 refuses.
        discovery_s: a router that has just started, or lost touch with a replica, refuses nothing
            for want of one: a replica that lives is heard of again within a second.
        migration_wait_s: the same as `replica_wait_s` for a request that was accepted before, by
            this router's queue or by a replica that it lost.
        max_silent_ticks: ticks (of about 1 s) without a word after which a replica counts as lost.
        max_backlog_s: a replica whose prompts will take longer than this gets no more; what waits
            here instead can still go anywhere, and in the best order.
        max_indexed_pages: keys in the index of the replicas' prefix caches.
        max_batch_wait_ms: how long a request that could go out at once is held, so that others can
            go with it; 0 holds nothing, which is best for generation.
        max_batch_size: so many are not held any longer.
    """

    max_queued_requests: int = 1024
    max_queued_tokens: int = 1 << 20
    max_waiting_per_replica: int = 2
    replica_wait_s: float = 0.0
    discovery_s: float = 3.0
    migration_wait_s: float = 30.0
    max_silent_ticks: int = 10
    max_backlog_s: float = 2.0
    max_indexed_pages: int = DEFAULT_MAX_KEYS
    max_batch_wait_ms: float = 0.0
    max_batch_size: int = 32

    def __post_init__(self) -> None:
        for name in (
            "max_queued_requests",
            "max_queued_tokens",
            "max_silent_ticks",
            "max_indexed_pages",
            "max_batch_size",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in (
            "max_waiting_per_replica",
            "replica_wait_s",
            "discovery_s",
            "migration_wait_s",
            "max_backlog_s",
            "max_batch_wait_ms",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
