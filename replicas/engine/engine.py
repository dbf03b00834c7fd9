"""The engine's spine: schedule, launch step n+1, then fetch and post-process step n.

Composes scheduler and runner; contains no policy and no threads. Invariant: each request that was
added ends with exactly one delta that carries its result.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from replicas.engine.buckets import Bucket
from replicas.engine.request_check import check_request
from replicas.engine.scheduler import ScheduledSequence, Scheduler, StepPlan
from replicas.engine.sequence import Sequence, SequenceStatus
from replicas.engine.step_stats import StepStats
from replicas.errors import InvalidRequest
from replicas.grammar import BadGrammar, Matcher, Vocabulary
from replicas.page_keys import PageKey, hash_root
from replicas.wire import (
    FinishReason,
    GenerateRequest,
    GenerateResult,
    ModelInfo,
    ReplicaLoad,
    SamplingParams,
    StepEvents,
    TokenDelta,
    TokenLogprobs,
)

logger = logging.getLogger(__name__)


class SequenceLogprobs(NamedTuple):
    """Log-probabilities that a step computed of one sequence.

    Attributes:
        output: of its new tokens, counted from 0.
        prompt: of tokens of its prompt.
    """

    output: TokenLogprobs | None
    prompt: TokenLogprobs | None


_NO_LOGPROBS = SequenceLogprobs(output=None, prompt=None)


class StepOutput(NamedTuple):
    """What a step gave.

    Attributes:
        token_ids: new tokens of each scheduled sequence; junk where it does not sample.
        num_draft_tokens: drafts that the step verified.
        logprobs: by place among the scheduled sequences; of those that ask for them.
    """

    token_ids: list[list[int]]
    num_draft_tokens: int
    logprobs: Mapping[int, SequenceLogprobs] = {}


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

    def draw_guided(self, step: StepT, indices: tuple[int, ...]) -> StepT:
        """Start the draw of the sequences at these places of the latest step's plan.

        Only for sequences that follow a grammar; they know all their tokens but the one drawn.
        """
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
        postprocess: appending tokens, stop checks, releasing pages, masks of grammars.
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
        vocabulary: Vocabulary | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Run what the scheduler plans.

        Args:
            scheduler: owned from here on.
            runner: of the device.
            model_info: what callers are told of the model.
            vocabulary: for grammars; None: requests with one are refused.
            clock: seconds.
        """
        self.scheduler = scheduler
        self.model_info = model_info
        self.times = StepTimes()
        self.stats = StepStats()
        self._runner = runner
        self._vocabulary = vocabulary
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
        self._num_computed_tokens = 0
        self._num_prefill_tokens = 0
        self._num_prefill_pairs = 0
        self._num_context_tokens = 0

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
        check_request(request, self.model_info)

    def make_matcher(self, request: GenerateRequest) -> Matcher | None:
        """Compile the grammar of a request and take it through the output so far; thread-safe.

        Takes a millisecond, for a bad grammar seconds: not to be called where others wait.

        Raises:
            InvalidRequest: as by `validate`, or the grammar is malformed, or output of another
                replica breaks it.
        """
        sampling = request.sampling
        if not sampling.grammar:
            return None
        self.validate(request)
        assert self._vocabulary is not None
        try:
            matcher = self._vocabulary.matcher(sampling.grammar)
        except BadGrammar as error:
            raise InvalidRequest(f"bad grammar: {error}", param="structured_outputs") from None
        first_output = len(request.prompt_token_ids) - request.output_offset
        if not matcher.replay(request.prompt_token_ids[first_output:]):
            raise InvalidRequest(
                "the output so far does not follow the grammar", param="structured_outputs"
            )
        return matcher

    def add(self, request: GenerateRequest, matcher: Matcher | None = None) -> None:
        """Queue a validated request whose id no live request has.

        Args:
            request: see `validate`.
            matcher: what `make_matcher` returned for it, where it has a grammar.
        """
        assert request.request_id not in self._sequences, request.request_id
        assert (matcher is not None) == bool(request.sampling.grammar), request.request_id
        sequence = Sequence(
            request,
            arrival_number=self._num_arrivals,
            arrival_s=self._clock(),
            max_total_tokens=len(request.prompt_token_ids) + request.sampling.max_tokens,
            root_key=self._root_key(request),
            stop_token_ids=self._stop_token_ids(request.sampling),
            page_size=self.scheduler.page_size,
            matcher=matcher,
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

    def drop_prefix_cache(self) -> None:
        """Forget the cached pages that no running sequence uses."""
        self.scheduler.allocator.drop_cache()

    def step(self) -> StepEvents:
        """Launch the next step, then take in the one before it.

        The device works on step n+1 while the host handles step n. A stop that shows in n leaves
        tokens of n+1 that are dropped. Tokens of n+1 that follow a grammar are drawn behind it: by
        then what n gave them is known.
        """
        start = self._clock()
        plan = self.scheduler.schedule()
        planned = self._clock()
        launched = None if plan is None else (plan, self._runner.launch(plan))
        if plan is not None:
            self._note_starts(plan, planned)
        launched_at = self._clock()
        deltas = [self._end_delta(s, (), FinishReason.ABORT) for s in self._ended]
        self._ended.clear()
        fetched_at = launched_at
        if self._in_flight is not None:
            previous, handle = self._in_flight
            output = self._runner.fetch(handle)
            fetched_at = self._clock()
            self._count(previous)
            deltas += self._postprocess(previous, output)
        if launched is not None and (indices := _guided_indices(launched[0])):
            launched = launched[0], self._runner.draw_guided(launched[1], indices)
        self._in_flight = launched
        self.times = StepTimes(
            schedule=planned - start,
            launch=launched_at - planned,
            wait=fetched_at - launched_at,
            postprocess=self._clock() - fetched_at,
        )
        self.stats.add(self.times, plan, self._runner.last_bucket)
        cache = self.scheduler.allocator.take_changes()
        return StepEvents(deltas=tuple(deltas), load=self.load(), cache=cache)

    def load(self) -> ReplicaLoad:
        """What the engine is doing now."""
        scheduler, allocator = self.scheduler, self.scheduler.allocator
        pending = scheduler.pending_work()
        return ReplicaLoad(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_slots=scheduler.num_slots,
            num_free_pages=allocator.num_free,
            num_pages=allocator.num_usable,
            page_size=scheduler.page_size,
            num_pending_prefill_tokens=pending.num_prefill_tokens,
            num_steps=self._num_steps,
            num_preemptions=scheduler.num_preemptions,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_output_tokens=self._num_output_tokens,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
            num_compiles_after_warmup=self._runner.num_compiles_after_warmup,
            step_s=self.times.total,
            num_decodes=pending.num_decodes,
            num_decode_context_tokens=pending.num_context_tokens,
            num_waiting_tokens=pending.num_waiting_tokens,
            num_pending_pairs=pending.num_pairs,
            max_chunk_tokens=scheduler.max_mixed_tokens,
            num_computed_tokens=self._num_computed_tokens,
            num_prefill_tokens=self._num_prefill_tokens,
            num_prefill_pairs=self._num_prefill_pairs,
            num_context_tokens=self._num_context_tokens,
            busy_s=sum(self.stats.phase_s),
        )

    def _root_key(self, request: GenerateRequest) -> PageKey:
        return hash_root(self.model_info.fingerprint, request.cache_salt)

    def _count(self, plan: StepPlan) -> None:
        """Count the work of a step that was waited for.

        Not when it is launched: `busy_s` has its time only now, and who fits the one to the other
        from report to report would give each step's time to the next one's work.
        """
        self._num_steps += 1
        self._num_computed_tokens += plan.num_tokens
        if plan.num_tokens == len(plan.scheduled):
            self._num_context_tokens += sum([part.start for part in plan.scheduled])
            return
        for part in plan.scheduled:
            count = part.num_tokens
            if count - part.num_drafts == 1:
                self._num_context_tokens += count * part.start
            else:
                self._num_prefill_tokens += count
                self._num_prefill_pairs += count * (2 * part.start + count) // 2

    def _note_starts(self, plan: StepPlan, now: float) -> None:
        for sequence in plan.admitted:
            if sequence.first_step_s is None:
                sequence.first_step_s = now
                self._num_prompt_tokens += sequence.num_prompt_tokens
                self._num_cached_tokens += sequence.num_cached_tokens

    def _postprocess(self, plan: StepPlan, output: StepOutput) -> list[TokenDelta]:
        self._num_draft_tokens += output.num_draft_tokens
        if output.logprobs:
            return self._append_with_logprobs(plan, output)
        return [
            self._append(part, token_ids)
            for part, token_ids in zip(plan.scheduled, output.token_ids, strict=True)
            if part.samples and part.sequence.status is not SequenceStatus.FINISHED
        ]

    def _append_with_logprobs(self, plan: StepPlan, output: StepOutput) -> list[TokenDelta]:
        deltas: list[TokenDelta] = []
        for index, part in enumerate(plan.scheduled):
            if part.sequence.status is SequenceStatus.FINISHED:
                continue
            logprobs = output.logprobs.get(index, _NO_LOGPROBS)
            prompt_logprobs = self._new_prompt_logprobs(part.sequence, logprobs.prompt)
            if part.samples:
                delta = self._append(part, output.token_ids[index], logprobs.output)
                deltas.append(delta._replace(prompt_logprobs=prompt_logprobs))
            elif prompt_logprobs is not None:
                deltas.append(
                    TokenDelta(
                        request_id=part.sequence.request.request_id,
                        start_index=part.sequence.request.output_offset,
                        token_ids=(),
                        prompt_logprobs=prompt_logprobs,
                    )
                )
        return deltas

    @staticmethod
    def _new_prompt_logprobs(
        sequence: Sequence, computed: TokenLogprobs | None
    ) -> TokenLogprobs | None:
        """What was not delivered before: a preempted prompt is computed again."""
        if computed is None or computed.end <= sequence.next_prompt_logprob:
            return None
        new = computed.tail(sequence.next_prompt_logprob)
        assert new.start == sequence.next_prompt_logprob
        sequence.next_prompt_logprob = new.end
        return new

    def _append(
        self,
        part: ScheduledSequence,
        token_ids: list[int],
        logprobs: TokenLogprobs | None = None,
    ) -> TokenDelta:
        """Take in a sequence's new tokens; those behind the one that ends it are dropped."""
        sequence = part.sequence
        sequence.num_inflight -= 1
        sequence.num_inflight_drafts -= part.num_drafts
        known, reason = sequence.token_ids, None
        first = len(known)
        if first == sequence.num_prompt_tokens:
            sequence.first_token_s = self._clock()
        matcher = sequence.matcher
        for token_id in token_ids:
            if matcher is not None and not matcher.consume(token_id):
                reason = self._give_up(sequence, matcher)
                break
            known.append(token_id)
            if token_id in sequence.stop_token_ids:
                reason = FinishReason.STOP
                break
            if matcher is not None and matcher.is_complete:
                reason = FinishReason.COMPLETE
                break
            if len(known) >= sequence.max_total_tokens:
                reason = FinishReason.LENGTH
                break
        num_new = len(known) - first
        self._num_output_tokens += num_new
        if num_new > 1:
            self._num_accepted_tokens += num_new - 1
        new = tuple(token_ids if num_new == len(token_ids) else token_ids[:num_new])
        start = first - sequence.first_output
        if logprobs is not None:
            logprobs = replace(logprobs.head(num_new), start=start)
        if reason is not None:
            self.scheduler.finish(sequence)
            del self._sequences[sequence.request.request_id]
            return self._end_delta(sequence, new, reason)._replace(logprobs=logprobs)
        if num_new > 1 and sequence.status is SequenceStatus.RUNNING:
            # Accepted drafts have been computed beside the token before them.
            sequence.num_computed_tokens += num_new - 1
        # Most deltas of most steps: the constructor itself takes three times as long.
        fields = (sequence.request.request_id, start, new, None, logprobs, None)
        return tuple.__new__(TokenDelta, fields)  # pyright: ignore[reportUnknownMemberType]

    @staticmethod
    def _give_up(sequence: Sequence, matcher: Matcher) -> FinishReason:
        """End an output that cannot follow its grammar any further."""
        request_id = sequence.request.request_id
        logger.warning("%s cannot follow its grammar: %s", request_id, matcher.error)
        return FinishReason.ABORT

    def _stop_token_ids(self, sampling: SamplingParams) -> frozenset[int]:
        eos_token_ids = () if sampling.ignore_eos else self.model_info.eos_token_ids
        return frozenset(eos_token_ids) | frozenset(sampling.stop_token_ids)

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


def _guided_indices(plan: StepPlan) -> tuple[int, ...]:
    """Places of those whose tokens are drawn apart from the step, and wanted."""
    guided = [i for i, part in enumerate(plan.scheduled) if part.sequence.matcher is not None]
    return tuple(
        index
        for index in guided
        if plan.scheduled[index].samples
        and plan.scheduled[index].sequence.status is not SequenceStatus.FINISHED
    )
