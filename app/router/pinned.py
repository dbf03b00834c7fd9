"""Makes Serve send a call where the router core decided.

Serve pickles this class by value into every process that holds a handle to the engine, so it
imports ray only. It keeps no state.
"""

from __future__ import annotations

import random
from typing import cast, override

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class PinnedRequestRouter(RequestRouter):
    """Ranks `route["target"]` first, the other live replicas next, `route["excluded"]` last.

    `route` is the call's first argument. FIFOMixin is left out on purpose: it may hand one call's
    replica to another call.
    """

    @override
    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return ranks of candidates; Serve takes the first that accepts."""
        target: object = None
        excluded: tuple[str, ...] = ()
        if pending_request is not None:
            # Without this Serve retries in a tight loop while every candidate is full.
            pending_request.routing_context.should_backoff = True
            route: object = pending_request.args[0] if pending_request.args else None
            if isinstance(route, dict):
                target = cast(dict[str, object], route).get("target")
                excluded = cast(tuple[str, ...], cast(dict[str, object], route).get("excluded", ()))
        ranks: tuple[list[RunningReplica], ...] = ([], [], [])
        for replica in candidate_replicas:
            replica_id = replica.replica_id.unique_id
            rank = 0 if replica_id == target else 2 if replica_id in excluded else 1
            ranks[rank].append(replica)
        random.shuffle(ranks[1])
        return [rank for rank in ranks if rank]
