"""What an engine replica reports to Serve's controller for the autoscaling policy.

Its own load, and what the routers told it of theirs: they have no way to the policy of another
deployment. Invariant: numbers only, or Serve drops the reports for good.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from replicas.wire import ReplicaLoad, RouterDemand

DEMAND_PREFIX = "router_"
REPORTED_LOAD = (
    "num_running",
    "num_waiting",
    "num_slots",
    "num_free_pages",
    "num_pages",
    "page_size",
    "num_pending_prefill_tokens",
    "num_waiting_tokens",
    "num_pending_pairs",
    "max_chunk_tokens",
)
"""Fields of ReplicaLoad that are reported."""

_COSTS = frozenset({"step_s", "token_s", "pair_s", "context_s"})


class RouterDemands:
    """The last word of each router; a router that stays silent is forgotten."""

    def __init__(self, *, lease_s: float) -> None:
        """Know no router.

        Args:
            lease_s: seconds for which a router's word holds.
        """
        self._lease_s = lease_s
        self._known: dict[str, tuple[float, RouterDemand]] = {}

    def tell(self, router_id: str, demand: RouterDemand, now: float) -> None:
        """Take a router's word."""
        self._known[router_id] = (now + self._lease_s, demand)

    def total(self, now: float) -> RouterDemand:
        """Return the sum of counts and the mean of costs."""
        self._known = {name: item for name, item in self._known.items() if item[0] > now}
        demands = [demand for _, demand in self._known.values()]
        totals: dict[str, float] = {}
        for field in fields(RouterDemand):
            total = sum(getattr(demand, field.name) for demand in demands)
            is_mean = field.name in _COSTS and demands
            totals[field.name] = total / len(demands) if is_mean else total
        return RouterDemand(**totals)  # pyright: ignore[reportArgumentType]  # sums of ints


def autoscaling_stats(load: ReplicaLoad, demand: RouterDemand) -> Mapping[str, float]:
    """Return a report: load by field name, the routers' totals with `DEMAND_PREFIX`."""
    return {
        **{name: float(getattr(load, name)) for name in REPORTED_LOAD},
        **{
            DEMAND_PREFIX + field.name: float(getattr(demand, field.name))
            for field in fields(RouterDemand)
        },
    }
