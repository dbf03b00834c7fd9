"""A small real implementation of the token client: it "generates" from a script.

Honours max_tokens, end-of-sequence and stop ids like the engine does, and remembers what is
running, so that tests can see whether a request was given up.
"""

from __future__ import annotations

import asyncio
import dataclasses
import struct
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from replicas.errors import EngineNotReady, ServingError
from replicas.wire import (
    FinishReason,
    GenerateResult,
    ModelInfo,
    ProfileResult,
    ReplicaLoad,
    RoutingHints,
    SamplingParams,
    ServiceStatus,
    TokenDelta,
    TokenLogprobs,
)

EOS = 1
NO_HINTS = RoutingHints()


def fake_logprob(token_id: int) -> float:
    """What the fake model thinks of a token; exact in f32."""
    return -(token_id % 7 + 1) / 8


def fake_logprobs(token_ids: Sequence[int], start: int, num_top: int) -> TokenLogprobs:
    """Of these tokens, each beside the ids that follow it, of which each is half as likely."""
    data = b""
    for token_id in token_ids:
        values = [fake_logprob(token_id) - rank for rank in range(num_top)]
        ids = [token_id + rank for rank in range(num_top)]
        data += struct.pack(f"<f{num_top}i{num_top}f", fake_logprob(token_id), *ids, *values)
    return TokenLogprobs(start=start, num_top=num_top, data=data)


@dataclass(kw_only=True)
class Call:
    """One call of `generate`."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    request_id: str
    timeout_s: float | None
    cache_salt: str
    traceparent: str | None
    priority: int
    hints: RoutingHints


class FakeClient:
    """Generates `script(prompt, sampling)`, `tokens_per_delta` tokens at a time.

    Attributes:
        calls: every call so far.
        running: request ids whose generators are open.
        given_up: request ids whose generators were closed before their end.
        gate: deltas are handed out only while it is set.
        error_after: raise `error` after that many tokens.
    """

    def __init__(
        self,
        script: Callable[[Sequence[int], SamplingParams], Sequence[int]],
        *,
        model_info: ModelInfo,
        tokens_per_delta: int = 1,
        error: ServingError | Exception | None = None,
        error_after: int = 0,
        num_cached_tokens: int = 0,
    ) -> None:
        self.script = script
        self.state = ServiceStatus(
            ready=True,
            replicas={"replica-1": ReplicaLoad(num_slots=8)},
            num_queued=0,
            num_queued_tokens=0,
            num_inflight=0,
            model_info=model_info,
        )
        self.tokens_per_delta = tokens_per_delta
        self.error = error
        self.error_after = error_after
        self.num_cached_tokens = num_cached_tokens
        self.calls: list[Call] = []
        self.num_cache_drops = 0
        self.running: set[str] = set()
        self._started = asyncio.Condition()
        self.given_up: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()

    @property
    def num_open(self) -> int:
        return len(self.running)

    async def status(self) -> ServiceStatus:
        return self.state

    async def drop_prefix_cache(self) -> int:
        self.num_cache_drops += 1
        return len(self.state.replicas)

    async def profile(self, num_steps: int, max_s: float) -> list[ProfileResult | ServingError]:
        done = ProfileResult(replica_id="r", directory=f"/traces/{max_s:g}", num_steps=num_steps)
        return [done, EngineNotReady("starting")]

    async def drain(self, replica_id: str | None, *, is_drained: bool) -> ServiceStatus:
        drained = set(self.state.drained)
        if replica_id is None:
            self.state = dataclasses.replace(self.state, is_draining=is_drained)
        else:
            (drained.add if is_drained else drained.discard)(replica_id)
        ready = not self.state.is_draining and not self.state.replicas.keys() <= drained
        self.state = dataclasses.replace(self.state, ready=ready, drained=tuple(sorted(drained)))
        return self.state

    async def wait_running(self, num_requests: int) -> None:
        """Wait until that many requests run."""
        async with self._started:
            await self._started.wait_for(lambda: len(self.running) >= num_requests)

    async def close(self) -> None:
        assert not self.running

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
        assert request_id is not None
        assert request_id not in self.running
        prompt = tuple(prompt_token_ids)
        self.calls.append(
            Call(
                prompt=prompt,
                sampling=sampling,
                request_id=request_id,
                timeout_s=timeout_s,
                cache_salt=cache_salt,
                traceparent=traceparent,
                priority=priority,
                hints=hints,
            )
        )
        self.running.add(request_id)
        is_finished = False
        try:
            async with self._started:
                self._started.notify_all()
            tokens, reason = self._output(prompt, sampling)
            start = 0
            while True:
                await asyncio.sleep(0)
                await self.gate.wait()
                if self.error is not None and start >= self.error_after:
                    is_finished = True
                    raise self.error
                new = tuple(tokens[start : start + self.tokens_per_delta])
                is_finished = start + len(new) == len(tokens)
                result = self._result(request_id, prompt, tokens, reason)
                of_prompt = None
                if start == 0 and sampling.prompt_logprobs is not None:
                    first = sampling.prompt_logprobs_start
                    of_prompt = fake_logprobs(prompt[first:], first, sampling.prompt_logprobs)
                of_output = None
                if sampling.logprobs is not None:
                    of_output = fake_logprobs(new, start, sampling.logprobs)
                yield TokenDelta(
                    request_id=request_id,
                    start_index=start,
                    token_ids=new,
                    result=result if is_finished else None,
                    logprobs=of_output,
                    prompt_logprobs=of_prompt,
                )
                if is_finished:
                    return
                start += len(new)
        finally:
            self.running.discard(request_id)
            if not is_finished:
                self.given_up.append(request_id)

    def _output(
        self, prompt: tuple[int, ...], sampling: SamplingParams
    ) -> tuple[list[int], FinishReason]:
        tokens: list[int] = []
        for token in self.script(prompt, sampling):
            tokens.append(token)
            if token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos):
                return tokens, FinishReason.STOP
            if len(tokens) == sampling.max_tokens:
                break
        return tokens, FinishReason.LENGTH

    def _result(
        self, request_id: str, prompt: tuple[int, ...], tokens: list[int], reason: FinishReason
    ) -> GenerateResult:
        return GenerateResult(
            request_id=request_id,
            finish_reason=reason,
            num_output_tokens=len(tokens),
            num_prompt_tokens=len(prompt),
            num_cached_tokens=self.num_cached_tokens,
        )
