"""The whole client side of the service: submit, receive tokens in order, cancel, migrate.

`LLMClient` works in any asyncio program that is connected to the cluster: the ingress, another
Serve deployment, a driver. Invariant: a caller sees every output token once, in order, whatever
happens to the replicas that compute them.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import itertools
import logging
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import ray.util
from ray.exceptions import RayActorError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from app.frame_server import PortRange
from app.token_sink import TokenQueue, TokenSink
from replicas.errors import (
    DeadlineExceeded,
    EngineDead,
    EngineError,
    EngineNotReady,
    InvalidRequest,
    Overloaded,
    ServingError,
)
from replicas.wire import (
    FinishReason,
    GenerateRequest,
    GenerateResult,
    ProfileResult,
    RoutingHints,
    SamplingParams,
    ServiceStatus,
    TokenDelta,
)

logger = logging.getLogger(__name__)

MAX_MIGRATIONS = 2
RECONCILE_S = 10.0
"""How long tokens may be missing once the control call has ended, or while a link is down."""

NO_HINTS = RoutingHints()

DEADLINE_GRACE_S = 2.0
"""How long after the deadline the client waits to be told so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished output.

    Attributes:
        token_ids: all output tokens.
        result: how it ended.
    """

    token_ids: tuple[int, ...]
    result: GenerateResult


class _AttemptLostError(Exception):
    """The replica, or the way to it, is gone; what was received is good."""

    def __init__(self, reason: str, *, replica_id: str | None) -> None:
        super().__init__(reason)
        self.replica_id = replica_id


class LLMClient:
    """Generates with the replicas behind a router.

    Not thread-safe: use it from one event loop.
    """

    def __init__(
        self,
        router: DeploymentHandle[Any],
        *,
        host: str | None = None,
        sink_ports: PortRange | None = None,
    ) -> None:
        """Nothing starts until first use.

        Args:
            router: handle of a RouterDeployment.
            host: address of this node that replicas can reach; None: the one that Ray uses.
            sink_ports: first and last port on which tokens may arrive; None: any.
        """
        self._router = router
        self._host = host
        self._sink_ports = sink_ports
        self._generate_method: DeploymentHandle[Any] | None = None
        self._status_method: DeploymentHandle[Any] | None = None
        self._sink: TokenSink | None = None
        self._starting: asyncio.Task[TokenSink] | None = None
        self._attempt_numbers = itertools.count()
        self._controls: set[asyncio.Task[None]] = set()

    @property
    def num_open(self) -> int:
        """Attempts that are running; 0 when nothing is."""
        return 0 if self._sink is None else self._sink.num_open

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
        priority: int = 0,
        cache_salt: str = "",
        traceparent: str | None = None,
        hints: RoutingHints = NO_HINTS,
    ) -> AsyncGenerator[TokenDelta]:
        """Yield the output as it is made, in index order; the last delta has `result`.

        Closing or cancelling the generator aborts the request on the replica. When the replica is
        lost, another one continues, at most twice.

        Args:
            prompt_token_ids: at least one id.
            sampling: see `SamplingParams`.
            request_id: names the request in logs and deltas; drawn when None.
            timeout_s: budget in seconds for everything, queueing and migrations included.
            priority: lower runs earlier.
            cache_salt: prefix-cache pages are shared only between requests with equal salt.
            traceparent: W3C trace context.
            hints: whose request it is and how soon its tokens are wanted.

        Raises:
            ServingError: the request was refused, or failed.
        """
        sink = self._sink or await self._start()
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        request_id = request_id or uuid.uuid4().hex
        prompt = tuple(prompt_token_ids)
        if not prompt:
            raise InvalidRequest(
                "the prompt is empty: at least one token is needed", param="prompt"
            )
        received: list[int] = []
        excluded: tuple[str, ...] = ()
        for num_migrations in itertools.count():
            request = GenerateRequest(
                # Not the caller's id: two attempts, or two callers, must never mix their tokens.
                request_id=f"{request_id}~{sink.address.sink_id}{next(self._attempt_numbers):x}",
                prompt_token_ids=prompt + tuple(received),
                sampling=_remaining(sampling, len(received)),
                sink=sink.address,
                output_offset=len(received),
                timeout_s=None if deadline is None else max(0.0, deadline - loop.time()),
                priority=priority,
                cache_salt=cache_salt,
                excluded_replicas=excluded,
                traceparent=traceparent,
                hints=hints,
            )
            attempt = _Attempt(self, sink, request_id, request, deadline=deadline)
            try:
                while True:
                    delta = await attempt.queue.get()
                    received += delta.token_ids
                    if delta.result is None:
                        yield delta
                        continue
                    result = _whole(delta.result, len(prompt), len(received))
                    yield delta._replace(result=result)
                    return
            except _AttemptLostError as lost:
                if len(received) == sampling.max_tokens:
                    yield _ended_by_length(request_id, len(prompt), len(received), lost)
                    return
                if num_migrations == MAX_MIGRATIONS:
                    raise EngineDead(
                        f"the request lost {MAX_MIGRATIONS + 1} replicas in a row, last: {lost}",
                        replica_id=lost.replica_id,
                    ) from lost
                logger.warning("%s migrates after %d tokens: %s", request_id, len(received), lost)
                if lost.replica_id is not None:
                    excluded = (*excluded, lost.replica_id)
            finally:
                attempt.close()

    async def complete(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
        priority: int = 0,
        cache_salt: str = "",
        traceparent: str | None = None,
        hints: RoutingHints = NO_HINTS,
    ) -> Completion:
        """Return the whole output; arguments and errors as in `generate`."""
        token_ids: list[int] = []
        result: GenerateResult | None = None
        deltas = self.generate(
            prompt_token_ids,
            sampling,
            request_id=request_id,
            timeout_s=timeout_s,
            priority=priority,
            cache_salt=cache_salt,
            traceparent=traceparent,
            hints=hints,
        )
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                token_ids += delta.token_ids
                result = delta.result
        assert result is not None
        return Completion(token_ids=tuple(token_ids), result=result)

    async def status(self) -> ServiceStatus:
        """Return what the router knows: readiness, load, queue, model.

        Raises:
            ServingError: the router cannot be reached.
        """
        if self._status_method is None:
            self._status_method = self._method("status")
        response = contextvars.Context().run(self._status_method.remote)
        try:
            status: object = await cast("DeploymentResponse[Any]", response)
        except Exception as error:
            raise _serving_error(error) from error
        assert isinstance(status, ServiceStatus)
        return status

    async def drop_prefix_cache(self) -> int:
        """Have every replica forget cached pages that are not in use; return how many did.

        Raises:
            ServingError: the router cannot be reached.
        """
        response = contextvars.Context().run(self._method("drop_prefix_cache").remote)
        try:
            return cast(int, await cast("DeploymentResponse[Any]", response))
        except Exception as error:
            raise _serving_error(error) from error

    async def profile(self, num_steps: int, max_s: float) -> list[ProfileResult | ServingError]:
        """Have every replica trace its next steps; return what each has written, or why not.

        Raises:
            ServingError: the router cannot be reached.
        """
        response = contextvars.Context().run(self._method("profile").remote, num_steps, max_s)
        try:
            answers: object = await cast("DeploymentResponse[Any]", response)
        except Exception as error:
            raise _serving_error(error) from error
        return cast("list[ProfileResult | ServingError]", answers)

    async def drain(self, replica_id: str | None, *, is_drained: bool) -> ServiceStatus:
        """See `RouterDeployment.drain`.

        Raises:
            ServingError: the router cannot be reached.
        """
        response = contextvars.Context().run(self._method("drain").remote, replica_id, is_drained)
        try:
            return cast(ServiceStatus, await cast("DeploymentResponse[Any]", response))
        except Exception as error:
            raise _serving_error(error) from error

    async def close(self) -> None:
        """Stop receiving; requests that are running are aborted and end with an EngineError."""
        sink, self._sink = self._sink, None
        for control in tuple(self._controls):
            control.cancel()
        if sink is not None:
            await sink.close()

    def call(self, request: GenerateRequest) -> DeploymentResponse[Any]:
        """Submit one attempt; returns its control call."""
        if self._generate_method is None:
            self._generate_method = self._method("generate")
        # In an empty context: Serve matches concurrent calls of one parent request by the parent's
        # id, and may then never assign some of them.
        response = contextvars.Context().run(self._generate_method.remote, request)
        return cast("DeploymentResponse[Any]", response)

    def track(self, control: asyncio.Task[None]) -> None:
        """Keep a control call alive until it ends; it may outlive its stream by milliseconds."""
        self._controls.add(control)
        control.add_done_callback(self._controls.discard)

    def _method(self, name: str) -> DeploymentHandle[Any]:
        # Here, not in __init__: in a process with RAY_SERVE_THROUGHPUT_OPTIMIZED a handle binds to
        # the event loop that first uses it, and fails where none runs.
        return self._router.options(
            method_name=name,
            _by_reference=False,
            request_serialization="pickle",
            response_serialization="pickle",
        )

    async def _start(self) -> TokenSink:
        """Start the sink; concurrent first uses share one, and a cancelled one does not undo it."""
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._start_sink())
        return await asyncio.shield(self._starting)

    async def _start_sink(self) -> TokenSink:
        host = self._host or cast(str, ray.util.get_node_ip_address())  # pyright: ignore[reportUnknownMemberType]
        sink = TokenSink(host=host, ports=self._sink_ports)
        await sink.start()
        self._sink = sink
        return sink


class _Attempt:
    """One submission: its control call, its token queue, and the clock on missing tokens.

    Attributes:
        queue: the tokens; fails with a ServingError, or with _AttemptLostError.
    """

    def __init__(
        self,
        client: LLMClient,
        sink: TokenSink,
        request_id: str,
        request: GenerateRequest,
        *,
        deadline: float | None,
    ) -> None:
        self.queue = TokenQueue(request_id, first_index=request.output_offset)
        self.queue.on_connection = self._watch_connection
        self._id = request.request_id
        self._sink = sink
        self._timer: asyncio.TimerHandle | None = None
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._is_control_ended = False
        sink.open(self._id, self.queue)
        try:
            self._response = client.call(request)
        except BaseException:
            sink.discard(self._id)
            raise
        self._control = asyncio.create_task(self._run_control())
        client.track(self._control)
        if deadline is not None:
            # Replica and router enforce it; this is for when neither can be heard.
            loop = asyncio.get_running_loop()
            self._deadline_timer = loop.call_at(deadline + DEADLINE_GRACE_S, self._on_deadline)

    def close(self) -> None:
        """Stop listening; abort the request unless its last delta has arrived."""
        self._sink.discard(self._id)
        self._stop_timer()
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        if not self.queue.is_complete and not self._is_control_ended:
            self._response.cancel()
            self._control.cancel()

    async def _run_control(self) -> None:
        """Wait for the control call and tell the queue how it ended."""
        try:
            answer: object = await self._response
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                self._response.cancel()
                self.queue.fail(EngineError("the client was closed"))
                raise
            self._lose("the control call was cancelled", replica_id=self.queue.replica_id)
        except (RayActorError, TaskCancelledError) as error:
            # The router was lost: a lost engine replica it would have reported as EngineDead.
            self._lose(f"the control call was lost: {error}", replica_id=None)
        except Exception as error:
            self.queue.fail(_serving_error(error))
        else:
            self._settle(answer)
        finally:
            self._is_control_ended = True

    def _settle(self, answer: object) -> None:
        if isinstance(answer, GenerateResult):
            # The count is what matters: the tokens travel separately and may still be on their way.
            if not self.queue.is_complete:
                self._start_timer("its last tokens did not arrive", replica_id=answer.replica_id)
        elif isinstance(answer, EngineDead):
            self._lose(answer.message, replica_id=answer.replica_id or self.queue.replica_id)
        else:
            assert isinstance(answer, ServingError), type(answer)
            self.queue.fail(answer)

    def _watch_connection(self) -> None:
        if self.queue.is_connected:
            if not self._is_control_ended:
                self._stop_timer()
        else:
            reason = "its connection did not come back"
            self._start_timer(reason, replica_id=self.queue.replica_id)

    def _start_timer(self, reason: str, *, replica_id: str) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(RECONCILE_S, self._on_timer, reason, replica_id)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_deadline(self) -> None:
        self.queue.fail(DeadlineExceeded("the time budget was spent, and the service is silent"))

    def _on_timer(self, reason: str, replica_id: str) -> None:
        if not self.queue.is_complete:
            self._lose(f"{reason} within {RECONCILE_S:.0f} s", replica_id=replica_id)

    def _lose(self, reason: str, *, replica_id: str | None) -> None:
        self.queue.fail(_AttemptLostError(reason, replica_id=replica_id or None))


def _remaining(sampling: SamplingParams, num_received: int) -> SamplingParams:
    """Shorten a continued request. The seed stays: a draw depends on (seed, position) only.

    Logprobs of the prompt came before the first token.
    """
    if not num_received:
        return sampling
    return dataclasses.replace(
        sampling, max_tokens=sampling.max_tokens - num_received, prompt_logprobs=None
    )


def _whole(result: GenerateResult, num_prompt_tokens: int, num_received: int) -> GenerateResult:
    """Describe the request rather than its last attempt, whose prompt held earlier output."""
    return dataclasses.replace(
        result,
        num_output_tokens=num_received,
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=min(result.num_cached_tokens, num_prompt_tokens),
    )


def _ended_by_length(
    request_id: str, num_prompt_tokens: int, num_received: int, lost: _AttemptLostError
) -> TokenDelta:
    """End a request that has all its tokens, and whose replica died before it could say so."""
    result = GenerateResult(
        request_id=request_id,
        finish_reason=FinishReason.LENGTH,
        num_output_tokens=num_received,
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=0,
        replica_id=lost.replica_id or "",
    )
    return TokenDelta(request_id=request_id, start_index=num_received, token_ids=(), result=result)


def _serving_error(error: Exception) -> ServingError:
    """Map what Serve itself raises."""
    match error:
        case ServingError():
            return error
        case DeploymentUnavailableError():
            return EngineNotReady("the service is not deployed, or is stopping", retry_after_s=5.0)
        case BackPressureError():
            return Overloaded("the router's queue is full", retry_after_s=1.0)
        case RayActorError():
            return EngineNotReady(f"the router cannot be reached: {error}", retry_after_s=1.0)
        case _:
            return EngineError(f"the call to the router failed: {error!r}")
