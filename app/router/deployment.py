"""The router as a Serve deployment: drives the pure core, and does what it decides.

Holds one Serve call open per request and hop. Errors are returned, never raised across the call.
Invariant: the core hears of the end of every request that it was told of.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import json
import logging
import math
import random
import time
from typing import Any, cast

import ray.util
from ray import serve
from ray.exceptions import RayActorError
from ray.experimental.internal_kv import (
    _internal_kv_get,  # pyright: ignore[reportPrivateUsage]
    _internal_kv_list,  # pyright: ignore[reportPrivateUsage]
)
from ray.serve.exceptions import DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from app.autoscaling.config import AutoscalingConfig
from app.frame_server import PortRange
from app.light_settings import LIGHT_ROUTER_SETTINGS, UserConfig, apply_light_settings
from app.router.cold_start import ColdStart
from app.router.config import RouterConfig
from app.router.core import RouterCore
from app.router.event_sink import EventSink
from app.router.events import (
    Event,
    Fail,
    ReplicaDrained,
    ReplicaSuspected,
    RequestArrived,
    RequestEnded,
    Resubscribe,
    Send,
    Ticked,
)
from app.router.metrics import RouterMetrics
from app.router.trace import RouterTrace
from replicas.config import TracingConfig
from replicas.errors import EngineDead, EngineNotReady, ServingError
from replicas.garbage import freeze_started
from replicas.page_keys import hash_prompt, hash_root
from replicas.tracing import start_tracing
from replicas.wire import (
    STARTUP_NAMESPACE,
    GenerateRequest,
    GenerateResult,
    ProfileResult,
    ServiceStatus,
    StartupProgress,
    startup_key,
)

logger = logging.getLogger(__name__)

TICK_S = 1.0
PROFILE_TIMEOUT_S = 70.0
"""Beyond the trace itself: writing it, and the way."""
DISCOVERY_S = 0.1
"""How often replicas are sought while none is known."""
SUBSCRIBE_TIMEOUT_S = 5.0
DRAIN_RETRY_AFTER_S = 5.0
STALE_PROGRESS_S = 600.0
"""A starting replica that has not reported for this long has died."""
MAX_REFUSALS = 3
"""Replicas, starting or leaving, that may refuse a request before the caller hears of it."""


class _Call:
    """A request between its arrival and its end."""

    __slots__ = ("answer", "predicted_ttft_s", "response", "target")

    def __init__(self) -> None:
        # Resolved with the target's id by `Send`, or with an error by `Fail`.
        self.target: asyncio.Future[str | ServingError] = asyncio.get_running_loop().create_future()
        self.response: DeploymentResponse[Any] | None = None
        self.answer: ServingError | None = None
        self.predicted_ttft_s: float | None = None


class RouterDeployment:
    """One router replica. Bind undecorated; its options come from the configuration."""

    def __init__(
        self,
        engine: DeploymentHandle[Any],
        config: RouterConfig | None = None,
        *,
        tracing: TracingConfig | None = None,
        autoscaling: AutoscalingConfig | None = None,
        sink_ports: PortRange | None = None,
    ) -> None:
        """Begin to look for replicas.

        Args:
            engine: handle of the engine deployment, whose request router is PinnedRequestRouter.
            config: limits; None takes the defaults.
            tracing: where the spans of requests go; None: nowhere.
            autoscaling: tells when there may be no replica, and when one may be asked for.
            sink_ports: first and last port on which the replicas' events may arrive; None: any.
        """
        context = serve.get_replica_context()
        self._app_name = context.app_name
        self._tracing = start_tracing(
            tracing or TracingConfig(), service="router", instance=context.replica_id.unique_id
        )
        limits = config or RouterConfig()
        self._core = RouterCore(limits, random.Random())
        self._loop = asyncio.get_running_loop()
        self._user_config = UserConfig(
            "the router",
            lambda given: apply_light_settings(limits, given, LIGHT_ROUTER_SETTINGS),
        )
        self._calls: dict[str, _Call] = {}
        self._is_draining = False
        self._wakeup: asyncio.TimerHandle | None = None
        self._wakeup_at = math.inf
        host = cast(str, ray.util.get_node_ip_address())  # pyright: ignore[reportUnknownMemberType]
        self._events = EventSink(self._feed, host=host, ports=sink_ports)
        # gRPC and pickle: 1.8 ms a call against 5.8 ms for an actor call.
        self._engine: DeploymentHandle[Any] = engine.options(
            _by_reference=False, request_serialization="pickle", response_serialization="pickle"
        )
        self._generate = self._engine.options(method_name="generate")
        self._cold_start = ColdStart(self._engine, autoscaling)
        self._metrics = RouterMetrics()
        self._started = self._loop.create_task(self._events.start())
        self._tasks = [
            self._loop.create_task(self._keep_subscribed()),
            self._loop.create_task(self._keep_ticking()),
        ]
        freeze_started()

    async def generate(self, request: GenerateRequest) -> GenerateResult | ServingError:
        """Run one request on a replica, held open to its end; its tokens bypass the router.

        Returns:
            How it ended; Overloaded, EngineNotReady or DeadlineExceeded when no replica took it;
            EngineDead with the replica's id when the replica was lost while it ran.
        """
        if self._tracing is None:
            return await self._run(request, None)
        trace = RouterTrace(self._tracing, request)
        answer: GenerateResult | ServingError | None = None
        try:
            answer = await self._run(
                dataclasses.replace(request, traceparent=trace.traceparent), trace
            )
            return answer
        finally:
            trace.ended(answer)

    async def _run(
        self, request: GenerateRequest, trace: RouterTrace | None
    ) -> GenerateResult | ServingError:
        """Try replicas until one has taken the request, or too many have refused it."""
        reopens_in_s = self._cold_start.shut_for_s(has_replicas=self._core.has_replicas)
        if reopens_in_s is not None:
            return EngineNotReady(
                "the schedule has shut the service down", retry_after_s=reopens_in_s
            )
        if self._is_draining and not request.excluded_replicas:  # those were accepted before
            return EngineNotReady("the service is draining", retry_after_s=DRAIN_RETRY_AFTER_S)
        deadline = None if request.timeout_s is None else self._loop.time() + request.timeout_s
        excluded = request.excluded_replicas
        request = dataclasses.replace(request, page_keys=self._hash_pages(request))
        while True:
            answer = await self._attempt(request, deadline, excluded, trace)
            refused_by = answer.replica_id if isinstance(answer, EngineNotReady) else None
            if refused_by is None or len(excluded) - len(request.excluded_replicas) == MAX_REFUSALS:
                self._metrics.observe_answer(answer)
                return answer
            excluded = (*excluded, refused_by)

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take the limits of Serve's `user_config` in place of those of `args`, without a restart.

        Raises:
            ConfigError: see `UserConfig.take`.
        """
        config = self._user_config.take(user_config)
        if config is not None:
            self._core.configure(config)

    async def status(self) -> ServiceStatus:
        """Return what the router knows now."""
        core, drained = self._core, self._core.fleet.drained
        replicas = {replica_id: view.load for replica_id, view in core.routable.items()}
        startup = () if replicas else await asyncio.to_thread(_read_startup, self._app_name)
        will_start = self._cold_start.is_possible(has_replicas=bool(replicas))
        if self._events.model_info is None and will_start:
            self._cold_start.ask()  # only a replica can say what is served
        takes_requests = not replicas.keys() <= drained
        return ServiceStatus(
            ready=not self._is_draining
            and (takes_requests or (will_start and self._events.model_info is not None)),
            replicas=replicas,
            num_queued=core.num_queued,
            num_queued_tokens=core.num_queued_tokens,
            num_inflight=core.num_booked,
            model_info=self._events.model_info,
            startup=startup,
            is_draining=self._is_draining,
            drained=tuple(sorted(drained)),
        )

    async def drain(self, replica_id: str | None, is_drained: bool) -> ServiceStatus:
        """Give a replica, or with None the whole service, no new requests, or give them again.

        What runs or waits goes on; what waits for a replica that there is no more is refused. The
        order is forgotten when the router is restarted.
        """
        if replica_id is None:
            self._is_draining = is_drained
        else:
            self._feed(ReplicaDrained(replica_id, is_drained))
        return await self.status()

    async def drop_prefix_cache(self) -> int:
        """Have every replica forget cached pages that are not in use; return how many did."""
        dropping = self._engine.broadcast("drop_prefix_cache")  # pyright: ignore[reportUnknownMemberType]
        answers: list[Any] = await dropping.results_async(
            timeout_s=SUBSCRIBE_TIMEOUT_S, return_exceptions=True
        )
        return sum(isinstance(answer, str) for answer in answers)

    async def profile(self, num_steps: int, max_s: float) -> list[ProfileResult | ServingError]:
        """Have every replica trace its next steps; return what each has written, or why not."""
        tracing = self._engine.broadcast("profile", num_steps, max_s)  # pyright: ignore[reportUnknownMemberType]
        answers: list[Any] = await tracing.results_async(
            timeout_s=max_s + PROFILE_TIMEOUT_S, return_exceptions=True
        )
        return [
            answer
            if isinstance(answer, ProfileResult | ServingError)
            else EngineDead(f"no profile: {answer!r}")
            for answer in answers
        ]

    async def check_health(self) -> None:
        """Raise when a background task has died; the router does not work without them."""
        await asyncio.shield(self._started)
        for task in self._tasks:
            if task.done():
                task.result()

    def _hash_pages(self, request: GenerateRequest) -> tuple[bytes, ...]:
        """Name the prompt's pages as the replicas do, once for router and engine."""
        info, page_size = self._events.model_info, self._core.page_size
        if info is None or not page_size:
            return ()
        root = hash_root(info.fingerprint, request.cache_salt)
        return hash_prompt(root, request.prompt_token_ids, page_size=page_size)

    async def _attempt(
        self,
        request: GenerateRequest,
        deadline: float | None,
        excluded: tuple[str, ...],
        trace: RouterTrace | None,
    ) -> GenerateResult | ServingError:
        request_id = request.request_id
        call = _Call()
        num_output_tokens: int | None = None
        self._calls[request_id] = call
        queued_ns, began_s = time.time_ns(), time.perf_counter()
        try:
            self._feed(
                RequestArrived(
                    request_id=request_id,
                    num_prompt_tokens=len(request.prompt_token_ids),
                    max_tokens=request.sampling.max_tokens,
                    deadline=deadline,
                    priority=request.priority,
                    excluded=frozenset(excluded),
                    tenant=request.hints.tenant,
                    page_keys=request.page_keys,
                    ttft_target_s=request.hints.ttft_target_s,
                    tpot_target_s=request.hints.tpot_target_s,
                )
            )
            decision_s = time.perf_counter() - began_s
            target = await call.target
            self._metrics.observe_decision(time.perf_counter() - began_s, decision_s=decision_s)
            if trace is not None:
                trace.decided(target, queued_ns=queued_ns, decision_s=decision_s)
            if isinstance(target, ServingError):
                return target
            if deadline is not None:
                timeout_s = max(0.0, deadline - self._loop.time())
                request = dataclasses.replace(request, timeout_s=timeout_s)
            answer = await self._send(call, request, target, excluded)
            if isinstance(answer, GenerateResult):
                num_output_tokens = answer.num_output_tokens
                self._metrics.observe_ttft(call.predicted_ttft_s, answer.first_token_s)
            return answer
        finally:
            del self._calls[request_id]
            self._feed(RequestEnded(request_id, num_output_tokens))

    async def _send(
        self, call: _Call, request: GenerateRequest, target: str, excluded: tuple[str, ...]
    ) -> GenerateResult | ServingError:
        route = {"target": target, "excluded": excluded}
        # In an empty context: Serve matches concurrent calls of one parent request by the parent's
        # id, and may then never assign some of them.
        response = contextvars.Context().run(self._generate.remote, route, request)
        call.response = cast("DeploymentResponse[Any]", response)
        try:
            answer: object = await call.response
        except RayActorError as error:  # died, or unavailable: gRPC cannot tell
            self._feed(ReplicaSuspected(target, has_failed=True))
            return EngineDead(f"replica {target} was lost: {error}", replica_id=target)
        except (RequestCancelledError, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # the caller left
                # Not left to Serve: the empty context has cut the link to the parent request.
                call.response.cancel()
                raise
            # The core gave the replica up, or the replica's side of the call was cancelled.
            return call.answer or EngineDead(f"replica {target} left", replica_id=target)
        if isinstance(answer, EngineNotReady | EngineDead):
            has_failed = isinstance(answer, EngineDead)
            self._feed(ReplicaSuspected(answer.replica_id or target, has_failed=has_failed))
        assert isinstance(answer, GenerateResult | ServingError), type(answer)
        return answer

    def _feed(self, event: Event) -> None:
        """Give the core an event and do what it says."""
        for action in self._core.on(event, self._loop.time()):
            match action:
                case Send(request_id, replica_id, ttft_s):
                    self._calls[request_id].predicted_ttft_s = ttft_s
                    self._resolve(request_id, replica_id)
                case Fail(request_id, error):
                    self._resolve(request_id, error)
                case Resubscribe(replica_id):
                    self._events.reset(replica_id)
        self._set_wakeup()

    def _resolve(self, request_id: str, answer: str | ServingError) -> None:
        call = self._calls[request_id]
        if not call.target.done():
            call.target.set_result(answer)
        elif isinstance(answer, ServingError) and call.response is not None:
            call.answer = answer
            call.response.cancel()

    def _set_wakeup(self) -> None:
        due_at = self._core.next_wakeup()
        if due_at == self._wakeup_at:
            return
        if self._wakeup is not None:
            self._wakeup.cancel()
        self._wakeup_at = due_at
        self._wakeup = None if due_at == math.inf else self._loop.call_at(due_at, self._wake)

    def _wake(self) -> None:
        self._wakeup, self._wakeup_at = None, math.inf
        self._feed(Ticked(is_second=False))

    def __del__(self) -> None:
        """Export the last spans; Serve calls this once every ongoing request has ended."""
        if tracing := getattr(self, "_tracing", None):
            tracing.shutdown()

    async def _keep_ticking(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._feed(Ticked())
            is_wanted = self._core.num_queued > 0 and not self._core.has_replicas
            if is_wanted and self._cold_start.is_possible(has_replicas=False):
                self._cold_start.ask()
            self._metrics.observe_core(self._core)

    async def _keep_subscribed(self) -> None:
        """Renew the leases of our subscriptions (replicas/load_events.py) through Serve."""
        await self._started
        while True:
            with contextlib.suppress(DeploymentUnavailableError, TimeoutError):
                renewal = self._engine.broadcast(  # pyright: ignore[reportUnknownMemberType]
                    "subscribe", self._events.address, self._core.demand()
                )
                # A hung replica must not delay the renewal of the others.
                task = asyncio.ensure_future(
                    renewal.results_async(timeout_s=SUBSCRIBE_TIMEOUT_S, return_exceptions=True)
                )
                await asyncio.wait((task,), timeout=TICK_S)
                task.add_done_callback(_log_renewal)
            await asyncio.sleep(TICK_S if self._core.has_replicas else DISCOVERY_S)


def _log_renewal(task: asyncio.Task[list[Any]]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.debug("subscription was not renewed everywhere: %r", error)


def _read_startup(app_name: str) -> tuple[StartupProgress, ...]:
    """Return the progress of the replicas that are starting; blocks for a round trip."""
    found: list[StartupProgress] = []
    for key in _internal_kv_list(startup_key(app_name), namespace=STARTUP_NAMESPACE):
        value = _internal_kv_get(key, namespace=STARTUP_NAMESPACE)
        if value:  # else it was withdrawn since
            fields: dict[str, Any] = json.loads(value)
            if time.time() - fields.pop("reported_at") < STALE_PROGRESS_S:
                found.append(StartupProgress(**fields))
    return tuple(found)
