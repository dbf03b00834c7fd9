"""Small real implementations that tests run instead of the heavy ones."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from replicas.config import EngineConfig
from replicas.engine.device_memory import DeviceMemory
from replicas.engine.step_stats import StepStats
from replicas.engine.step_trace import StepTrace
from replicas.errors import ContextLengthExceeded, EngineDead
from replicas.wire import (
    FinishReason,
    GenerateRequest,
    GenerateResult,
    ModelInfo,
    ReplicaLoad,
    StepEvents,
    TokenDelta,
)

CHIP_VARIABLES = ("TPU_VISIBLE_CHIPS", "TPU_CHIPS_PER_HOST_BOUNDS", "TPU_HOST_BOUNDS")
KILL_TOKEN = 666
"""A prompt that begins with it kills the replica's process when its fifth token is due."""


def fake_token(last_token: int, position: int, *, seed: int, vocab_size: int = 1000) -> int:
    """The fake model: a token depends on the one before, the position and the seed only."""
    return (last_token * 31 + position * 7 + seed) % vocab_size


def fake_output(prompt: tuple[int, ...], num_tokens: int, *, seed: int = 0) -> tuple[int, ...]:
    """What an undisturbed fake engine answers."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(fake_token(tokens[-1], len(tokens), seed=seed))
    return tuple(tokens[len(prompt) :])


@dataclass(frozen=True)
class FakeEngineOptions:
    """Size and speed of a fake engine."""

    step_s: float = 0.005
    num_slots: int = 16
    num_pages: int = 1024
    page_size: int = 16
    max_model_len: int = 4096
    kill_marker: str | None = None
    start_gate: str | None = None
    dies_at_step: int | None = None
    report_dir: str | None = None
    """Where each engine writes which TPU chips it may use."""


@dataclass
class _FakeSequence:
    request: GenerateRequest
    arrived_at: float
    started_at: float = 0.0
    first_token_at: float | None = None
    tokens: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.tokens)

    @property
    def num_pages_16(self) -> int:
        return self.num_tokens // 16 + 1


class FakeEngineLoop:
    """An engine loop without a model: one token per running request and step, on its own thread."""

    def __init__(
        self, options: FakeEngineOptions, on_step: Callable[[StepEvents], None] | None
    ) -> None:
        self.model_info = ModelInfo(
            model_id="fake",
            max_model_len=options.max_model_len,
            max_request_tokens=options.max_model_len,
            vocab_size=1000,
            eos_token_ids=(0,),
            fingerprint="fake",
        )
        self._options = options
        self._on_step = on_step
        self._lock = threading.Condition()
        self._waiting: deque[_FakeSequence] = deque()
        self._running: list[_FakeSequence] = []
        self._aborted: set[str] = set()
        self._is_stopping = False
        self._death: str | None = None
        self._num_steps = 0
        self._num_output_tokens = 0
        self._num_prompt_tokens = 0
        self._num_prefill_tokens = 0
        self._num_context_tokens = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, request: GenerateRequest) -> None:
        num_tokens = len(request.prompt_token_ids) + request.sampling.max_tokens
        if num_tokens > self._options.max_model_len:
            raise ContextLengthExceeded(
                f"{num_tokens} tokens, the context holds {self._options.max_model_len}"
            )
        with self._lock:
            self._num_prompt_tokens += len(request.prompt_token_ids)
            self._waiting.append(_FakeSequence(request, time.monotonic()))
            self._lock.notify()

    def abort(self, request_id: str) -> None:
        with self._lock:
            self._aborted.add(request_id)
            self._lock.notify()

    def drop_prefix_cache(self) -> None:
        pass

    def trace_steps(self, trace: StepTrace) -> None:
        trace.done.set_exception(RuntimeError("a fake engine has no profiler"))

    def load(self) -> ReplicaLoad:
        with self._lock:
            return self._load()

    @property
    def step_stats(self) -> StepStats:
        return StepStats()

    def device_memory(self) -> tuple[DeviceMemory, ...]:
        return (DeviceMemory(device="0", used_bytes=10, peak_bytes=20, limit_bytes=30),)

    def check_health(self) -> None:
        if self._death is not None:
            raise EngineDead(self._death)

    def stop(self) -> None:
        with self._lock:
            self._is_stopping = True
            self._lock.notify()
        self._thread.join()

    def die(self, reason: str) -> None:
        """Stop stepping without ending any request, as a device failure does."""
        with self._lock:
            self._death = reason

    def step(self) -> StepEvents:
        """One step, without the pause."""
        with self._lock:
            while self._waiting and len(self._running) < self._options.num_slots:
                sequence = self._waiting.popleft()
                sequence.started_at = time.monotonic()
                self._num_prefill_tokens += len(sequence.request.prompt_token_ids)
                self._running.append(sequence)
            self._num_context_tokens += sum(sequence.num_tokens for sequence in self._running)
            deltas = [self._advance(sequence) for sequence in self._running]
            ended = {delta.request_id for delta in deltas if delta.result is not None}
            self._running = [s for s in self._running if s.request.request_id not in ended]
            for sequence in tuple(self._waiting):
                if sequence.request.request_id in self._aborted:
                    self._waiting.remove(sequence)
                    deltas.append(self._end(sequence, (), FinishReason.ABORT))
            self._aborted.clear()
            self._num_steps += 1
            return StepEvents(deltas=tuple(deltas), load=self._load())

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(
                    lambda: self._is_stopping or self._waiting or self._running, timeout=None
                )
                if self._is_stopping:
                    return
            time.sleep(self._options.step_s)
            if self._num_steps == self._options.dies_at_step:
                self._death = "the device failed"
            if self._death is None:
                events = self.step()
                if self._on_step is not None:
                    self._on_step(events)

    def _advance(self, sequence: _FakeSequence) -> TokenDelta:
        request = sequence.request
        if request.request_id in self._aborted:
            return self._end(sequence, (), FinishReason.ABORT)
        self._maybe_kill(sequence)
        tokens = (*request.prompt_token_ids, *sequence.tokens)
        token = fake_token(tokens[-1], len(tokens), seed=request.sampling.seed)
        sequence.tokens.append(token)
        if sequence.first_token_at is None:
            sequence.first_token_at = time.monotonic()
        self._num_output_tokens += 1
        if token in request.sampling.stop_token_ids:
            return self._end(sequence, (token,), FinishReason.STOP)
        if len(sequence.tokens) == request.sampling.max_tokens:
            return self._end(sequence, (token,), FinishReason.LENGTH)
        start_index = request.output_offset + len(sequence.tokens) - 1
        return TokenDelta(
            request_id=request.request_id, start_index=start_index, token_ids=(token,)
        )

    def _maybe_kill(self, sequence: _FakeSequence) -> None:
        """Die as a crashed process does, once per marker file."""
        marker = self._options.kill_marker
        if (
            marker is not None
            and sequence.request.prompt_token_ids[0] == KILL_TOKEN
            and len(sequence.tokens) == 4
            and not os.path.exists(marker)
        ):
            with open(marker, "x"):
                os.kill(os.getpid(), signal.SIGKILL)

    def _end(
        self, sequence: _FakeSequence, token_ids: tuple[int, ...], reason: FinishReason
    ) -> TokenDelta:
        request, first = sequence.request, sequence.first_token_at
        result = GenerateResult(
            request_id=request.request_id,
            finish_reason=reason,
            num_output_tokens=len(sequence.tokens),
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=0,
            queue_s=max(0.0, sequence.started_at - sequence.arrived_at),
            first_token_s=None if first is None else first - sequence.arrived_at,
        )
        return TokenDelta(
            request_id=request.request_id,
            start_index=request.output_offset + len(sequence.tokens) - len(token_ids),
            token_ids=token_ids,
            result=result,
        )

    def _load(self) -> ReplicaLoad:
        used = sum(sequence.num_pages_16 for sequence in self._running)
        return ReplicaLoad(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_slots=self._options.num_slots,
            num_free_pages=self._options.num_pages - used,
            num_pages=self._options.num_pages,
            page_size=self._options.page_size,
            num_pending_prefill_tokens=sum(
                len(sequence.request.prompt_token_ids) for sequence in self._waiting
            ),
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            step_s=self._options.step_s,
            num_decodes=len(self._running),
            num_decode_context_tokens=sum(sequence.num_tokens for sequence in self._running),
            max_chunk_tokens=self._options.max_model_len,
            num_computed_tokens=self._num_prefill_tokens + self._num_output_tokens,
            num_prefill_tokens=self._num_prefill_tokens,
            num_context_tokens=self._num_context_tokens,
            busy_s=self._num_steps * self._options.step_s,
        )


def write_chips(directory: Path) -> None:
    """Note the chips that Ray gave this process, and the bounds that libtpu would go by."""
    seen = {name: os.environ.get(name) for name in CHIP_VARIABLES}
    node = ray.get_runtime_context().get_node_id()
    text = json.dumps({"node": node, "pid": os.getpid(), **seen})
    (directory / f"{os.getpid()}.json").write_text(text)


@dataclass(frozen=True)
class StartFakeEngine:
    """Starts a fake engine in place of `start_engine_loop`; picklable, so it can be bound."""

    options: FakeEngineOptions = FakeEngineOptions()

    def __call__(
        self,
        config: EngineConfig,
        on_step: Callable[[StepEvents], None],
        report_progress: Callable[[str, int, int], None],
        /,
    ) -> FakeEngineLoop:
        del config
        if self.options.report_dir is not None:
            write_chips(Path(self.options.report_dir))
        report_progress("load weights", 1, 2)
        while self.options.start_gate and not os.path.exists(self.options.start_gate):
            time.sleep(0.05)
        report_progress("load weights", 2, 2)
        return FakeEngineLoop(self.options, on_step)


class FakeResponse:
    """A DeploymentResponse: awaitable once the call it stands for has ended, and cancellable."""

    def __init__(self, call: Awaitable[Any]) -> None:
        self._task = asyncio.ensure_future(call)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._task.__await__()

    def cancel(self) -> None:
        self._task.cancel()


class FakeHandle:
    """A DeploymentHandle to one object of this process."""

    def __init__(self, target: Any, method_name: str = "__call__") -> None:
        self._target = target
        self._method_name = method_name

    def options(self, *, method_name: str | None = None, **_: object) -> FakeHandle:
        return FakeHandle(self._target, method_name or self._method_name)

    def remote(self, *args: Any, **kwargs: Any) -> FakeResponse:
        return FakeResponse(getattr(self._target, self._method_name)(*args, **kwargs))


class TcpProxy:
    """A network between a replica and a sink that can be cut, closed to newcomers, and stalled."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_open = True
        self.num_connections = 0
        self.flow = asyncio.Event()
        self.flow.set()

    async def start(self) -> int:
        """Listen; returns the port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Reset every connection, losing what is on the way."""
        for writer in self._writers:
            writer.transport.abort()

    async def close(self) -> None:
        self.cut()
        assert self._server is not None
        self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.cut()  # what an accepting task had opened meanwhile
        await asyncio.sleep(0)  # lets the transports close their sockets

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        if not self.is_open:
            writer.transport.abort()
            return
        self._writers.add(writer)
        accepting = asyncio.current_task()
        assert accepting is not None
        self._tasks.add(accepting)
        accepting.add_done_callback(self._tasks.discard)
        target_reader, target_writer = await asyncio.open_connection(*self._target)
        self._writers.add(target_writer)
        for source, sink in ((reader, target_writer), (target_reader, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                await self.flow.wait()
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        finally:
            sink.transport.abort()
