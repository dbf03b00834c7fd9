"""The engine's spine: schedule, launch step n+1, then fetch and post-process step n.

Composes scheduler and runner; contains no policy and no threads. Invariant: each request that was
added ends with exactly one delta that carries its result.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from replicas.engine.buckets import Bucket
from replicas.engine.page_allocator import PageKey, hash_root
from replicas.engine.scheduler import ScheduledSequence, Scheduler, StepPlan
from replicas.engine.sequence import Sequence, SequenceStatus
from replicas.engine.step_stats import StepStats
from replicas.errors import ContextLengthExceeded, InvalidRequest
from replicas.wire import (
    FinishReason,
    GenerateRequest,
    GenerateResult,
    ModelInfo,
    ReplicaLoad,
    StepEvents,
    TokenDelta,
)


class StepOutput(NamedTuple):
    """What a step gave.

    Attributes:
        token_ids: new tokens of each scheduled sequence; junk where it does not sample.
        num_draft_tokens: drafts that the step verified.
    """

    token_ids: list[list[int]]
    num_draft_tokens: int


class Runner[StepT](Protocol):
    """What the engine needs of a device: `ModelRunner`, or a fake with constant step time."""

    @property
    def num_compiles_after_warmup(self) -> int:
        """Compilations since warm-up."""
        ...

    @property
    def last_bucket(self) -> Bucket | None:
        """What the latest launch was padded to; None before the first."""
        ...

    def launch(self, plan: StepPlan) -> StepT:
        """Start a step."""
        ...

    def fetch(self, step: StepT) -> StepOutput:
        """Wait for a step."""
        ...


@dataclass(slots=True)
class StepTimes:
    """Where the last step's time went, seconds.

    Attributes:
        schedule: planning.
        launch: packing and dispatch.
        wait: blocked on the device.
        postprocess: appending tokens, stop checks, releasing pages.
    """

    schedule: float = 0.0
    launch: float = 0.0
    wait: float = 0.0
    postprocess: float = 0.0

    @property
    def total(self) -> float:
        """Duration of the whole step."""
        return self.schedule + self.launch + self.wait + self.postprocess


class Engine[StepT]:
    """Runs sequences on one device; used by one thread, except `validate`."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner[StepT],
        *,
        model_info: ModelInfo,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.model_info = model_info
        self.times = StepTimes()
        self.stats = StepStats()
        self._runner = runner
        self._clock = clock
        self._sequences: dict[str, Sequence] = {}
        self._in_flight: tuple[StepPlan, StepT] | None = None
        self._ended: list[Sequence] = []
        self._num_arrivals = 0
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_output_tokens = 0
        self._num_draft_tokens = 0
        self._num_accepted_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to schedule, fetch or report."""
        return self.scheduler.has_work or self._in_flight is not None or bool(self._ended)

    def validate(self, request: GenerateRequest) -> None:
        """Refuse what could never run; thread-safe.

        Raises:
            InvalidRequest: an empty prompt, a token id out of range, a bad sampling parameter.
            ContextLengthExceeded: prompt or prompt + max_tokens over the limits.
        """
        info, sampling = self.model_info, request.sampling
        num_prompt = len(request.prompt_token_ids)
        if num_prompt == 0:
            raise InvalidRequest("the prompt is empty; send at least one token", param="prompt")
        if min(request.prompt_token_ids) < 0 or max(request.prompt_token_ids) >= info.vocab_size:
            bad = next(t for t in request.prompt_token_ids if not 0 <= t < info.vocab_size)
            raise InvalidRequest(
                f"token id {bad} is out of range; ids are in [0, {info.vocab_size})", param="prompt"
            )
        if sampling.max_tokens < 1:
            raise InvalidRequest(
                f"max_tokens must be at least 1, got {sampling.max_tokens}", param="max_tokens"
            )
        if not (0 <= sampling.temperature < float("inf")):
            raise InvalidRequest(
                f"temperature must be finite and >= 0, got {sampling.temperature}",
                param="temperature",
            )
        if not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
            raise InvalidRequest(
                f"top_p must be in (0, 1] and top_k >= 0, got {sampling.top_p}, {sampling.top_k}",
                param="top_p",
            )
        num_total = num_prompt + sampling.max_tokens
        if num_total > info.max_model_len:
            raise ContextLengthExceeded(
                f"this model's context is {info.max_model_len} tokens; the prompt has {num_prompt} "
                f"and max_tokens is {sampling.max_tokens}; shorten one of them",
                param="prompt",
            )
        if num_total > info.max_request_tokens:
            raise ContextLengthExceeded(
                f"the KV cache of this deployment holds {info.max_request_tokens} tokens; the "
                f"prompt has {num_prompt} and max_tokens is {sampling.max_tokens}",
                param="prompt",
            )

    def add(self, request: GenerateRequest) -> None:
        """Queue a validated request whose id no live request has."""
        assert request.request_id not in self._sequences, request.request_id
        sequence = Sequence(
            request,
            arrival_number=self._num_arrivals,
            arrival_s=self._clock(),
            max_total_tokens=len(request.prompt_token_ids) + request.sampling.max_tokens,
            root_key=self._root_key(request),
        )
        self._num_arrivals += 1
        self._sequences[request.request_id] = sequence
        self.scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """End a request now; unknown ids are ignored. Its last delta comes with the next step."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self.scheduler.finish(sequence)
            self._ended.append(sequence)

    def step(self) -> StepEvents:
        """Launch the next step, then take in the one before it.

        The device works on step n+1 while the host handles step n. A stop that shows in n leaves
        tokens of n+1 that are dropped.
        """
        start = self._clock()
        plan = self.scheduler.schedule()
        planned = self._clock()
        launched = None if plan is None else (plan, self._runner.launch(plan))
        if plan is not None:
            self._note_first_steps(plan, planned)
        launched_at = self._clock()
        deltas = [self._end_delta(s, (), FinishReason.ABORT) for s in self._ended]
        self._ended.clear()
        fetched_at = launched_at
        if self._in_flight is not None:
            previous, handle = self._in_flight
            output = self._runner.fetch(handle)
            fetched_at = self._clock()
            deltas += self._postprocess(previous, output)
        self._in_flight = launched
        self.times = StepTimes(
            schedule=planned - start,
            launch=launched_at - planned,
            wait=fetched_at - launched_at,
            postprocess=self._clock() - fetched_at,
        )
        self.stats.add(self.times, plan, self._runner.last_bucket)
        return StepEvents(deltas=tuple(deltas), load=self.load())

    def load(self) -> ReplicaLoad:
        """What the engine is doing now."""
        scheduler, allocator = self.scheduler, self.scheduler.allocator
        return ReplicaLoad(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_slots=scheduler.num_slots,
            num_free_pages=allocator.num_free,
            num_pages=allocator.num_usable,
            page_size=scheduler.page_size,
            num_pending_prefill_tokens=scheduler.num_pending_prefill_tokens,
            num_steps=self._num_steps,
            num_preemptions=scheduler.num_preemptions,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_output_tokens=self._num_output_tokens,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
            num_compiles_after_warmup=self._runner.num_compiles_after_warmup,
            step_s=self.times.total,
        )

    def _root_key(self, request: GenerateRequest) -> PageKey:
        return hash_root(self.model_info.fingerprint, request.cache_salt)

    def _note_first_steps(self, plan: StepPlan, now: float) -> None:
        self._num_steps += 1
        for part in plan.scheduled:
            sequence = part.sequence
            if sequence.first_step_s is None:
                sequence.first_step_s = now
                self._num_prompt_tokens += sequence.num_prompt_tokens
                self._num_cached_tokens += sequence.num_cached_tokens

    def _postprocess(self, plan: StepPlan, output: StepOutput) -> list[TokenDelta]:
        self._num_draft_tokens += output.num_draft_tokens
        deltas: list[TokenDelta] = []
        for part, token_ids in zip(plan.scheduled, output.token_ids, strict=True):
            if part.samples and part.sequence.status is not SequenceStatus.FINISHED:
                deltas.append(self._append(part, token_ids))
        return deltas

    def _append(self, part: ScheduledSequence, token_ids: list[int]) -> TokenDelta:
        """Take in a sequence's new tokens; those behind the one that ends it are dropped."""
        sequence = part.sequence
        sequence.num_inflight -= 1
        sequence.num_inflight_drafts -= part.num_drafts
        first, reason = len(sequence.token_ids), None
        if first == sequence.num_prompt_tokens:
            sequence.first_token_s = self._clock()
        for token_id in token_ids:
            sequence.token_ids.append(token_id)
            reason = self._finish_reason(sequence, token_id)
            if reason is not None:
                break
        num_new = len(sequence.token_ids) - first
        self._num_output_tokens += num_new
        self._num_accepted_tokens += num_new - 1
        new = tuple(token_ids[:num_new])
        if reason is not None:
            self.scheduler.finish(sequence)
            del self._sequences[sequence.request.request_id]
            return self._end_delta(sequence, new, reason)
        if sequence.status is SequenceStatus.RUNNING:
            # Accepted drafts have been computed beside the token before them.
            sequence.num_computed_tokens += num_new - 1
            self.scheduler.register_full_pages(sequence)
        return TokenDelta(
            request_id=sequence.request.request_id,
            start_index=sequence.request.output_offset + sequence.num_output_tokens - num_new,
            token_ids=new,
        )

    def _finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        sampling = sequence.request.sampling
        is_eos = token_id in self.model_info.eos_token_ids and not sampling.ignore_eos
        if is_eos or token_id in sampling.stop_token_ids:
            return FinishReason.STOP
        if len(sequence.token_ids) >= sequence.max_total_tokens:
            return FinishReason.LENGTH
        return None

    def _end_delta(
        self, sequence: Sequence, token_ids: tuple[int, ...], reason: FinishReason
    ) -> TokenDelta:
        request, first, token = sequence.request, sequence.first_step_s, sequence.first_token_s
        result = GenerateResult(
            request_id=request.request_id,
            finish_reason=reason,
            num_output_tokens=sequence.num_output_tokens,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_cached_tokens=sequence.num_cached_tokens,
            queue_s=(self._clock() if first is None else first) - sequence.arrival_s,
            first_token_s=None if token is None else token - sequence.arrival_s,
        )
        return TokenDelta(
            request_id=request.request_id,
            start_index=request.output_offset + sequence.num_output_tokens - len(token_ids),
            token_ids=token_ids,
            result=result,
        )
