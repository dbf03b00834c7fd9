"""Who decides how many replicas a simulated service has: our policy, Serve's, an oracle, nobody.

Each sees what it would see in production, but for the oracle, which knows every arrival to come.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Protocol

from ray.serve import autoscaling_policy as serve_policy
from ray.serve.config import AutoscalingConfig as ServeConfig

from app.autoscaling.capacity import ReplicaModel, Workload, replicas_needed
from app.autoscaling.config import AutoscalingConfig
from app.autoscaling.observation import observe
from app.autoscaling.policy import State, decide
from bench.router_sim.hardware import Hardware
from bench.router_sim.traces import PAGE_SIZE, SimRequest
from replicas.autoscaling_stats import RouterDemands, autoscaling_stats
from replicas.wire import ReplicaLoad, RouterDemand


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What a scaler sees at a moment.

    Attributes:
        now: simulated seconds.
        target: replicas ordered and not released.
        loads: of the replicas that serve.
        demands: of the routers.
        num_open: requests that have arrived and not ended.
    """

    now: float
    target: int
    loads: Sequence[ReplicaLoad]
    demands: Sequence[RouterDemand]
    num_open: int


class Scaler(Protocol):
    """Decides once a period."""

    def decide(self, fleet: Fleet) -> int:
        """Return the number of replicas to have."""
        ...


class Fixed:
    """Always the same number."""

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas

    def decide(self, fleet: Fleet) -> int:
        """Return it."""
        del fleet
        return self._num_replicas


class Ours:
    """The policy of app/autoscaling, fed as Serve feeds it."""

    def __init__(self, config: AutoscalingConfig) -> None:
        self._config = config
        self._state = State()

    def decide(self, fleet: Fleet) -> int:
        """Report, observe, decide."""
        demands = RouterDemands(lease_s=1.0)
        for number, demand in enumerate(fleet.demands):
            demands.tell(str(number), demand, 0.0)
        total = demands.total(0.0)
        seen = observe(
            [autoscaling_stats(load, total) for load in fleet.loads],
            now=fleet.now,
            target=fleet.target,
            num_running=len(fleet.loads),
            num_queued=0.0,
        )
        decision, self._state = decide(self._config, self._state, seen)
        return decision.target


class ServeDefault:
    """Ray Serve's own policy, its own code: open requests per replica, with its default delays."""

    def __init__(self, *, target_ongoing_requests: float, max_replicas: int) -> None:
        self._config = ServeConfig(
            min_replicas=1,
            max_replicas=max_replicas,
            target_ongoing_requests=target_ongoing_requests,
        )
        self._points: deque[tuple[float, int]] = deque()
        self._state: dict[str, Any] = {}

    def decide(self, fleet: Fleet) -> int:
        """Average over Serve's window and ask its functions."""
        config = self._config
        self._points.append((fleet.now, fleet.num_open))
        while self._points[0][0] < fleet.now - config.look_back_period_s:
            self._points.popleft()
        context: Any = SimpleNamespace(
            config=config,
            current_num_replicas=len(fleet.loads),
            target_num_replicas=fleet.target,
            total_num_requests=sum(count for _, count in self._points) / len(self._points),
        )
        wanted, _ = serve_policy._core_replica_queue_length_policy(context)
        scaled = serve_policy._apply_scaling_factors(wanted, len(fleet.loads), config)
        target, self._state = serve_policy._apply_delay_logic(
            max(0, scaled), fleet.target, config, self._state, _now=fleet.now
        )
        return min(max(target, 1), config.max_replicas)


class Oracle:
    """Knows every arrival: what each minute takes is up when it begins, and goes at its end."""

    WINDOW_S = 60.0

    def __init__(
        self,
        requests: Sequence[SimRequest],
        hardware: Hardware,
        config: AutoscalingConfig,
        *,
        hit_share: float,
    ) -> None:
        """Plan the whole run.

        Args:
            requests: all that will arrive, in order.
            hardware: of a replica.
            config: targets, bounds and boot time.
            hit_share: of the prompt tokens, what the prefix caches will hold.
        """
        self._boot_s = config.boot_s
        arrivals = [request.arrived_at for request in requests]
        model = replica_model(hardware)
        self._needed: list[int] = []
        end = arrivals[-1]
        while (start := len(self._needed) * self.WINDOW_S) <= end:
            first = bisect.bisect_left(arrivals, start)
            last = bisect.bisect_left(arrivals, start + self.WINDOW_S)
            load = workload(
                requests[first:last], hardware, seconds=self.WINDOW_S, hit_share=hit_share
            )
            count = 1
            if load is not None:
                count = replicas_needed(
                    load,
                    model,
                    ttft_s=config.ttft_target_s,
                    tpot_s=config.tpot_target_s,
                    kv_share=config.kv_target,
                    max_replicas=config.max_replicas,
                )
            self._needed.append(count)

    @property
    def peak(self) -> int:
        """The most that any minute takes."""
        return max(self._needed)

    def decide(self, fleet: Fleet) -> int:
        """Return the most that is needed until a replica ordered now is up."""
        return self.decide_at(fleet.now)

    def decide_at(self, now: float) -> int:
        """Return the same for a time."""
        first = int(now // self.WINDOW_S)
        last = int((now + self._boot_s + 1) // self.WINDOW_S)
        return max(self._needed[first : last + 1], default=1)


def replica_model(hardware: Hardware) -> ReplicaModel:
    """Return a modelled replica in the policy's terms."""
    return ReplicaModel(
        step_s=hardware.overhead_s + hardware.weights_s,
        token_s=hardware.token_s,
        context_s=hardware.context_s,
        chunk_tokens=hardware.chunk_tokens,
        num_slots=hardware.num_slots,
        kv_tokens=hardware.num_pages * PAGE_SIZE,
    )


def workload(
    requests: Sequence[SimRequest], hardware: Hardware, *, seconds: float, hit_share: float
) -> Workload | None:
    """Return what requests of a period are like; None where there are none."""
    if not requests:
        return None
    count = len(requests)
    prompts = sum(request.num_prompt_tokens for request in requests) / count
    outputs = sum(request.num_output_tokens for request in requests) / count
    pairs = sum(request.num_prompt_tokens**2 for request in requests) / (2 * count)
    uncached = (1 - hit_share) * prompts
    return Workload(
        requests_per_s=count / seconds,
        prefill_s=hardware.token_s * uncached + (1 - hit_share) * hardware.pair_s * pairs,
        uncached_tokens=uncached,
        output_tokens=outputs,
        context_tokens=prompts + outputs / 2,
    )
