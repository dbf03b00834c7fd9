"""The device thread: requests in through one queue, events out through one callback.

The only thread and queue code of the engine. Invariant: everything that touches the engine after
start-up runs on the device thread, except `Engine.validate`, which reads constants.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from replicas.engine.device_memory import Device, DeviceMemory, read_device_memory
from replicas.engine.engine import Engine
from replicas.engine.step_stats import StepStats
from replicas.engine.step_trace import Profiler, StepTrace, StepTracer
from replicas.errors import EngineDead, EngineNotReady, InvalidRequest
from replicas.grammar import Matcher
from replicas.wire import GenerateRequest, ModelInfo, ReplicaLoad, StepEvents

logger = logging.getLogger(__name__)

_IDLE_BEAT_S = 1.0
"""How often an idle loop shows that it lives."""

_MAX_UNWATCHED_S = 2.0
"""Silence between two looks counts at most so much: when the whole process was stopped, the device
thread was, too."""

_SWITCH_INTERVAL_S = 2e-4

_STOP = object()
_DROP_PREFIX_CACHE = object()


class _Submission(NamedTuple):
    request: GenerateRequest
    matcher: Matcher | None


class EngineLoop:
    """Runs an engine's steps on a thread of its own for as long as there is work."""

    def __init__(
        self,
        engine: Engine[Any],
        on_step: Callable[[StepEvents], None],
        *,
        max_silence_s: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
        profiler: Profiler | None = None,
        devices: Sequence[Device] = (),
    ) -> None:
        """Wrap a warmed-up engine; `start` must follow.

        Args:
            engine: used by the device thread only from here on.
            on_step: called on the device thread after each step; must be quick, never block.
            max_silence_s: a step that takes longer than this counts as hung.
            clock: seconds, for the silence.
            profiler: traces steps when asked to; None: it cannot.
            devices: asked for their memory.
        """
        self._engine = engine
        self._on_step = on_step
        self._max_silence_s = max_silence_s
        self._tracer = StepTracer(profiler)
        self._devices = tuple(devices)
        self._idle_beat_s = min(_IDLE_BEAT_S, max_silence_s / 3)
        self._inbox: queue.SimpleQueue[_Submission | str | object] = queue.SimpleQueue()
        self._load = engine.load()
        self._num_beats = 0
        self._seen_beats = 0
        self._clock = clock
        self._looked_at_s = clock()
        self._silence_s = 0.0
        self._watch_lock = threading.Lock()
        self._error: BaseException | None = None
        self._is_stopping = False
        self._live_ids: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def model_info(self) -> ModelInfo:
        """What callers must know of the model."""
        return self._engine.model_info

    def start(self) -> None:
        """Start the device thread."""
        # The device thread and the event loop hand each other work of well under a millisecond;
        # Python's default makes either wait 5 ms for the other.
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self._looked_at_s = self._clock()
        self._thread.start()

    def make_matcher(self, request: GenerateRequest) -> Matcher | None:
        """Compile a request's grammar for `submit`; thread-safe, may take long.

        Raises:
            InvalidRequest: see `Engine.make_matcher`.
        """
        return self._engine.make_matcher(request)

    def submit(self, request: GenerateRequest, matcher: Matcher | None = None) -> None:
        """Queue a request; thread-safe.

        Args:
            request: what to generate.
            matcher: of its grammar, where it has one.

        Raises:
            RequestError: it could never run, or a live request has its id.
            EngineDead: the device thread has ended by an error.
            EngineNotReady: the loop is stopping.
        """
        if self._error is not None:
            raise EngineDead(f"the device thread ended: {self._error!r}")
        if self._is_stopping:
            raise EngineNotReady("the engine is stopping", retry_after_s=1.0)
        self._engine.validate(request)
        if request.request_id in self._live_ids:
            raise InvalidRequest(f"request id {request.request_id!r} is in use")
        self._live_ids.add(request.request_id)
        self._inbox.put(_Submission(request, matcher))

    def abort(self, request_id: str) -> None:
        """End a request at the next step; thread-safe, unknown ids are ignored."""
        self._inbox.put(request_id)

    def drop_prefix_cache(self) -> None:
        """Forget cached pages that are not in use, before the next step; thread-safe."""
        self._inbox.put(_DROP_PREFIX_CACHE)

    def trace_steps(self, trace: StepTrace) -> None:
        """Have the profiler trace the next steps; `trace.done` tells when; thread-safe."""
        self._inbox.put(trace)

    def load(self) -> ReplicaLoad:
        """Load after the last step."""
        return self._load

    @property
    def step_stats(self) -> StepStats:
        """What the steps took and held; read-only, and a step may be half counted."""
        return self._engine.stats

    def device_memory(self) -> tuple[DeviceMemory, ...]:
        """Memory of each device that counts it; thread-safe."""
        return read_device_memory(self._devices)

    def check_health(self) -> None:
        """Return if the device thread lives. To be called about once a second; thread-safe.

        Raises:
            EngineDead: it ended, or has not finished a step for `max_silence_s`.
        """
        if self._error is not None:
            raise EngineDead(f"the device thread ended: {self._error!r}")
        if (silence_s := self._observe_silence()) > self._max_silence_s:
            raise EngineDead(f"the device thread has been silent for {silence_s:.0f} s")

    def _observe_silence(self) -> float:
        """Return the seconds since the thread's last sign of life, as far as this process ran."""
        with self._watch_lock:
            now, beats = self._clock(), self._num_beats
            if beats != self._seen_beats:
                self._seen_beats, self._silence_s = beats, 0.0
            else:
                self._silence_s += min(now - self._looked_at_s, _MAX_UNWATCHED_S)
            self._looked_at_s = now
            return self._silence_s

    def stop(self) -> None:
        """End the device thread after the current step; live requests get no further deltas.

        A thread that hangs is not waited for: it ends with the process.
        """
        self._is_stopping = True
        self._inbox.put(_STOP)
        if self._thread.is_alive() and self._silence_s <= self._max_silence_s:
            self._thread.join(timeout=self._max_silence_s)

    def _run(self) -> None:
        _name_thread("engine")
        try:
            while self._take_inbox():
                has_work = self._engine.has_work
                if has_work:
                    events = self._engine.step()
                    self._load = events.load
                    self._live_ids.difference_update(
                        delta.request_id for delta in events.deltas if delta.result is not None
                    )
                    self._on_step(events)
                self._tracer.advance(has_stepped=has_work)
                self._num_beats += 1
        except BaseException as error:
            logger.exception("the device thread failed; the replica must be replaced")
            self._error = error
        finally:
            self._tracer.end()

    def _take_inbox(self) -> bool:
        """Hand queued requests and aborts to the engine; waits only when there is no work."""
        try:
            item = self._inbox.get(block=not self._engine.has_work, timeout=self._idle_beat_s)
            while True:
                if item is _STOP:
                    return False
                self._take(item)
                item = self._inbox.get_nowait()
        except queue.Empty:
            return True

    def _take(self, item: _Submission | str | object) -> None:
        if isinstance(item, str):
            self._engine.abort(item)
        elif isinstance(item, _Submission):
            self._engine.add(item.request, item.matcher)
        elif isinstance(item, StepTrace):
            self._tracer.begin(item)
        elif item is _DROP_PREFIX_CACHE:
            self._engine.drop_prefix_cache()


def _name_thread(name: str) -> None:
    """Name this thread for `top -H` and the like; Linux only."""
    with contextlib.suppress(OSError):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
