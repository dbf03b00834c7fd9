"""One engine replica as a Serve deployment: the engine loop, its token stream and its load events.

The event loop only hands requests in and events out; the engine runs on its own device thread, and
starts on a worker thread. Errors are returned, never raised across the call. Invariant: a call to
`generate` ends when its request has ended in the engine, and a cancelled call aborts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ray import serve
from ray.experimental.internal_kv import (
    _internal_kv_del,  # pyright: ignore[reportPrivateUsage]
    _internal_kv_put,  # pyright: ignore[reportPrivateUsage]
)

from replicas.autoscaling_stats import RouterDemands, autoscaling_stats
from replicas.config import EngineConfig, TracingConfig
from replicas.engine.device_memory import DeviceMemory
from replicas.engine.step_stats import StepStats
from replicas.engine.step_trace import StepTrace
from replicas.engine_metrics import EngineMetrics
from replicas.errors import (
    DeadlineExceeded,
    EngineDead,
    EngineError,
    EngineNotReady,
    ServingError,
)
from replicas.garbage import freeze_started
from replicas.grammar import Matcher
from replicas.load_events import LEASE_S, LoadEvents
from replicas.request_trace import record_request
from replicas.token_stream import TokenStream
from replicas.tracing import start_tracing
from replicas.wire import (
    STARTUP_NAMESPACE,
    GenerateRequest,
    GenerateResult,
    ModelInfo,
    ProfileResult,
    ReplicaLoad,
    RouterDemand,
    SinkAddress,
    StepEvents,
    startup_key,
)

logger = logging.getLogger(__name__)

HEALTH_INTERVAL_S = 1.0
PROGRESS_INTERVAL_S = 0.2
PROFILE_WRITE_S = 60.0
"""How long writing a trace may take."""
MAX_HANDOVER_S = 0.002
"""Longest pause of the device thread for the event loop to send tokens."""


class RunningEngine(Protocol):
    """What the deployment needs of an engine loop (`replicas.engine.engine_loop.EngineLoop`)."""

    @property
    def model_info(self) -> ModelInfo:
        """What it serves."""
        ...

    def make_matcher(self, request: GenerateRequest) -> Matcher | None:
        """Compile a request's grammar; thread-safe, may take long; raises a RequestError."""
        ...

    def submit(self, request: GenerateRequest, matcher: Matcher | None = None, /) -> None:
        """Take a request; thread-safe; raises a RequestError for what can never run."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request soon; thread-safe, idempotent."""
        ...

    def drop_prefix_cache(self) -> None:
        """Forget cached pages that are not in use; thread-safe."""
        ...

    def trace_steps(self, trace: StepTrace) -> None:
        """Trace the next steps; thread-safe; `trace.done` tells how many, once it is written."""
        ...

    def load(self) -> ReplicaLoad:
        """Return the load now."""
        ...

    @property
    def step_stats(self) -> StepStats:
        """What the steps took and held so far."""
        ...

    def device_memory(self) -> tuple[DeviceMemory, ...]:
        """Memory of each device that counts it; thread-safe."""
        ...

    def check_health(self) -> None:
        """Raise EngineDead when the device thread is dead or stuck."""
        ...

    def stop(self) -> None:
        """End the device thread."""
        ...


class StartEngine(Protocol):
    """Loads, compiles, warms up; blocks for minutes; returns the running engine."""

    def __call__(
        self,
        config: EngineConfig,
        on_step: Callable[[StepEvents], None],
        report_progress: Callable[[str, int, int], None],
        /,
    ) -> RunningEngine:
        """Start. `on_step` is called on the device thread, `report_progress` on this one."""
        ...


class EngineDeployment:
    """One replica. Bind undecorated; the deployment's options come from the configuration."""

    _engine: RunningEngine | None = None  # also when the constructor fails, for __del__

    def __init__(
        self,
        config: EngineConfig,
        start_engine: StartEngine | None = None,
        *,
        tracing: TracingConfig | None = None,
    ) -> None:
        """Begin to start the engine; `check_health` waits for it, so Serve routes nothing before.

        Args:
            config: what to run.
            start_engine: how to start it; None: the JAX engine.
            tracing: where the spans of requests go; None: nowhere.
        """
        context = serve.get_replica_context()
        self._replica_id = context.replica_id.unique_id
        self._app_name = context.app_name
        self._config = config
        self._start_engine = start_engine
        self._loop = asyncio.get_running_loop()
        self._stream = TokenStream(self._replica_id, self._abort)
        self._events: LoadEvents | None = None
        self._demands = RouterDemands(lease_s=2 * LEASE_S)
        self._metrics = EngineMetrics()
        self._tracing = start_tracing(
            tracing or TracingConfig(), service="engine", instance=self._replica_id
        )
        self._watch: asyncio.Task[None] | None = None
        self._sent = threading.Event()
        self._started = self._loop.create_task(self._start())

    async def generate(
        self, route: dict[str, object], request: GenerateRequest
    ) -> GenerateResult | ServingError:
        """Run one request to its end; its tokens go to its sink.

        Args:
            route: where the router sent it; for Serve's request router, see app/router/pinned.py.
            request: what to generate.

        Returns:
            How it ended, or why it could not run.
        """
        engine = self._engine
        if engine is None:
            return EngineNotReady(
                "the replica is starting or stopping",
                retry_after_s=1.0,
                replica_id=self._replica_id,
            )
        started_at = time.monotonic()
        start_ns = time.time_ns()
        try:
            outcome = self._stream.open(request)
        except ServingError as error:
            return error
        is_over = False
        answer: GenerateResult | ServingError | None = None
        ending = "cancelled"
        try:
            async with asyncio.timeout(request.timeout_s):
                if request.sampling.grammar:
                    engine.submit(request, await asyncio.to_thread(engine.make_matcher, request))
                else:
                    engine.submit(request)
                answer = await outcome
            is_over = True
            ending = "error" if isinstance(answer, ServingError) else answer.finish_reason.value
            return answer
        except TimeoutError:
            ending = "deadline"
            answer = DeadlineExceeded(
                f"the request did not finish within its time budget of {request.timeout_s} s"
            )
            return answer
        except ServingError as error:
            ending = "refused"
            if isinstance(error, EngineError):
                error.replica_id = self._replica_id
            answer = error
            return answer
        finally:
            if not is_over:
                engine.abort(request.request_id)
                self._stream.close(request.request_id)
            duration_s = time.monotonic() - started_at
            self._metrics.observe_request(ending, duration_s, answer)
            if self._tracing is not None:
                record_request(
                    self._tracing,
                    request,
                    answer,
                    replica_id=self._replica_id,
                    start_ns=start_ns,
                    end_ns=start_ns + round(duration_s * 1e9),
                )

    async def subscribe(self, address: SinkAddress, demand: RouterDemand | None = None) -> str:
        """Push load to a router's event sink until it stops renewing; return the replica's id.

        Args:
            address: of the router's event sink.
            demand: what the router is asked for, to be passed on to the autoscaling policy.
        """
        if demand is not None:
            self._demands.tell(address.sink_id, demand, self._loop.time())
        if self._events is not None:
            self._events.subscribe(address)
        return self._replica_id

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Report to the autoscaling policy; Serve calls this where a deployment autoscales."""
        load = ReplicaLoad() if self._engine is None else self._engine.load()
        return dict(autoscaling_stats(load, self._demands.total(self._loop.time())))

    async def wake(self) -> str:
        """Return the replica's id.

        A call that waits because there is no replica is what makes Serve start one.
        """
        return self._replica_id

    async def drop_prefix_cache(self) -> str:
        """Forget cached pages that are not in use; return the replica's id."""
        if self._engine is not None:
            self._engine.drop_prefix_cache()
        return self._replica_id

    async def profile(self, num_steps: int, max_s: float) -> ProfileResult | ServingError:
        """Trace the next steps with jax's profiler, into a directory of this node.

        Args:
            num_steps: to trace.
            max_s: the trace ends after so long, whatever has run by then.
        """
        engine = self._engine
        if engine is None:
            return EngineNotReady("the replica is starting or stopping", retry_after_s=1.0)
        name = f"{self._replica_id}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
        directory = Path(self._config.profile_directory) / name
        trace = StepTrace(directory=directory, num_steps=num_steps, max_s=max_s)
        engine.trace_steps(trace)
        try:
            async with asyncio.timeout(max_s + PROFILE_WRITE_S):
                traced = await asyncio.wrap_future(trace.done)
        except (RuntimeError, TimeoutError) as error:
            reason = str(error) or "the device thread does not answer"
            return EngineError(f"no profile: {reason}", replica_id=self._replica_id)
        return ProfileResult(
            replica_id=self._replica_id, directory=str(directory), num_steps=traced
        )

    async def check_health(self) -> None:
        """Wait until the engine has started, then raise EngineDead unless its heartbeat is fresh.

        Serve awaits the first call before it routes to the replica, without a time limit.
        """
        await asyncio.shield(self._started)
        assert self._engine is not None
        self._engine.check_health()

    def __del__(self) -> None:
        """Stop the engine; Serve calls this once every ongoing request has ended."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        if self._tracing is not None:
            self._tracing.shutdown()
        if self._watch is not None:
            self._watch.cancel()
        if self._events is not None:
            self._events.shutdown()
        self._stream.shutdown()
        engine.stop()

    async def _start(self) -> None:
        start_engine = self._start_engine
        if start_engine is None:
            # Here, not above: jax must see the devices that Ray assigned to this actor.
            from replicas.engine.startup import start_engine_loop

            start_engine = start_engine_loop
        progress = ProgressReport(self._app_name, self._replica_id)
        engine = await asyncio.to_thread(
            start_engine, self._config, self._on_step_of_thread, progress.report
        )
        await asyncio.to_thread(progress.clear)
        freeze_started()
        self._events = LoadEvents(self._replica_id, engine.model_info, engine.load)
        self._engine = engine
        self._watch = self._loop.create_task(self._watch_engine(engine))

    def _on_step_of_thread(self, events: StepEvents) -> None:
        """Hand a step's events over, and let the event loop send its tokens before this goes on.

        The device has its next step already. Without the pause this thread plans the one after
        that first, and the interpreter lock makes the tokens wait for a millisecond.
        """
        self._sent.clear()
        with contextlib.suppress(RuntimeError):  # the loop closes before the device thread ends
            self._loop.call_soon_threadsafe(self._on_step, events)
            if events.deltas:
                self._sent.wait(MAX_HANDOVER_S)

    def _on_step(self, events: StepEvents) -> None:
        self._stream.publish(events.deltas)
        # The transports write at the end of this turn of the loop.
        self._loop.call_soon(self._sent.set)
        if self._events is not None:
            self._events.on_step(events.load, events.cache)

    def _abort(self, request_id: str) -> None:
        if self._engine is not None:
            self._engine.abort(request_id)

    async def _watch_engine(self, engine: RunningEngine) -> None:
        """Keep the metrics fresh; when the engine dies, tell the callers before Serve finds out."""
        while True:
            self._metrics.observe_load(engine.load())
            self._metrics.observe_steps(engine.step_stats)
            self._metrics.observe_stream(self._stream)
            self._metrics.observe_memory(engine.device_memory())
            try:
                engine.check_health()
            except EngineDead as error:
                logger.exception("the engine of replica %s is dead", self._replica_id)
                events, self._events = self._events, None  # so that no renewal revives it
                assert events is not None
                events.shutdown()
                self._stream.fail(EngineDead(error.message, replica_id=self._replica_id))
                return
            await asyncio.sleep(HEALTH_INTERVAL_S)


class ProgressReport:
    """Start-up progress in the cluster's key-value store, where the router finds it.

    A starting replica takes no calls, so it cannot be asked.
    """

    def __init__(self, app_name: str, replica_id: str) -> None:
        self._replica_id = replica_id
        self._key = startup_key(app_name) + replica_id.encode()
        self._stage = ""
        self._reported_at = 0.0

    def report(self, stage: str, done: int, total: int) -> None:
        """Publish; called on the starting thread; at most every 0.2 s within a stage."""
        now = time.monotonic()
        if stage == self._stage and done < total and now - self._reported_at < PROGRESS_INTERVAL_S:
            return
        self._stage, self._reported_at = stage, now
        logger.info("starting: %s %d/%d", stage, done, total)
        value = {
            "replica_id": self._replica_id,
            "stage": stage,
            "done": done,
            "total": total,
            "reported_at": time.time(),
        }
        _internal_kv_put(
            self._key, json.dumps(value).encode(), overwrite=True, namespace=STARTUP_NAMESPACE
        )

    def clear(self) -> None:
        """Withdraw the report: the replica has started."""
        _internal_kv_del(self._key, namespace=STARTUP_NAMESPACE)
