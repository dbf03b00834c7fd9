"""Records that cross process boundaries: what a caller asks of a replica and what comes back.

Standard library only, frozen and picklable. Token values travel on the data plane (`TokenFrame`,
see token_stream.py); everything else on the control plane, as the arguments and the result of one
held-open Serve call per request.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

MAX_LOGPROBS = 20
"""Most alternatives whose log-probabilities a request may ask for, per token."""
MAX_LOGIT_BIAS = 300
"""Most entries of a request's `logit_bias`."""
MAX_BAD_WORDS = 64
"""Most banned token sequences of a request."""
MAX_BAD_WORD_TOKENS = 8
"""Longest banned token sequence."""
MAX_STOP_TOKEN_IDS = 128
"""Most ids in a request's `stop_token_ids`."""
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-3, 1e3
"""Within these, 32 bits hold its products with logits."""


class FinishReason(enum.StrEnum):
    """Why a request ended. Errors are raised, never a finish reason."""

    STOP = "stop"
    COMPLETE = "complete"
    """The grammar lets nothing follow; the last token is part of the text."""
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen, and when to stop.

    Attributes:
        temperature: >= 0; 0 is greedy.
        top_k: >= 0; 0 keeps the whole vocabulary.
        top_p: in (0, 1]; 1 keeps the whole vocabulary.
        max_tokens: >= 1, output tokens.
        seed: 64-bit seed. The draw at a position depends on (seed, position) only.
        stop_token_ids: token ids that end the output (the id itself is part of the output).
        ignore_eos: do not stop at the model's end-of-sequence ids (`stop_token_ids` still stop).
        min_p: in [0, 1]; tokens less likely than this times the likeliest one are cut off, after
            temperature and before top-k and top-p; 0 keeps the whole vocabulary.
        presence_penalty: taken off the logit of each token that the output holds; finite.
        frequency_penalty: taken off for each time that the output holds it; finite.
        repetition_penalty: from `MIN_REPETITION_PENALTY` to `MAX_REPETITION_PENALTY`; divides
            positive logits of tokens in prompt or output, multiplies negative ones; 1 changes
            nothing.
        logit_bias: (token id, number added to its logit), at most `MAX_LOGIT_BIAS`.
        allowed_token_ids: only these are drawn; empty: all.
        bad_words: token sequences that the output never holds, at most `MAX_BAD_WORDS`, each of 1
            to `MAX_BAD_WORD_TOKENS` tokens.
        min_tokens: nothing that stops the output is drawn before it has so many tokens.
        logprobs: give the log-probability of each output token, and of so many of the likeliest
            instead of it, in [0, MAX_LOGPROBS]; None: nothing. By the model's own logits, before
            temperature and everything above.
        prompt_logprobs: the same for the tokens of the prompt; None: nothing.
        prompt_logprobs_start: >= 1, position of the first prompt token that `prompt_logprobs`
            covers; nothing precedes the token at 0. What lies before may come from the prefix
            cache.
        grammar: the output follows it, see grammar.py; empty: none. Where what the parameters
            above leave is nothing of what it allows, it alone counts.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int = 16
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 1
    grammar: str = ""

    @property
    def has_penalties(self) -> bool:
        """Whether a token's logit depends on how often the text holds it."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )

    @property
    def depends_on_output(self) -> bool:
        """Whether a draw depends on the tokens drawn before it otherwise than through the model."""
        return self.has_penalties or any(len(word) > 1 for word in self.bad_words)

    @property
    def adjusts_logits(self) -> bool:
        """Whether anything but temperature, top-k and top-p changes the distribution."""
        return (
            self.has_penalties
            or self.min_p > 0
            or self.min_tokens > 0
            or bool(self.logit_bias or self.allowed_token_ids or self.bad_words)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """One token's log-probability.

    Attributes:
        logprob: of the token itself, natural logarithm.
        top: (token id, log-probability) of the likeliest, in descending order.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities of consecutive tokens, packed: most are never looked at one by one.

    Attributes:
        start: index of the first token: an output index, or a position in the prompt.
        num_top: alternatives of each token.
        data: per token its f32, then i32 ids and f32 values of the alternatives; little-endian.
    """

    start: int
    num_top: int
    data: bytes

    @property
    def token_bytes(self) -> int:
        """Size of one token's entry."""
        return 4 + 8 * self.num_top

    @property
    def end(self) -> int:
        """Index behind the last token."""
        return self.start + len(self.data) // self.token_bytes

    def tail(self, start: int) -> TokenLogprobs:
        """What belongs to tokens from index `start` on."""
        if start <= self.start:
            return self
        skipped = min(start, self.end)
        data = self.data[(skipped - self.start) * self.token_bytes :]
        return TokenLogprobs(start=skipped, num_top=self.num_top, data=data)

    def head(self, count: int) -> TokenLogprobs:
        """What belongs to the first `count` tokens."""
        return replace(self, data=self.data[: count * self.token_bytes])

    def joined(self, following: TokenLogprobs) -> TokenLogprobs:
        """With those of the tokens that follow."""
        assert following.start == self.end
        assert following.num_top == self.num_top
        return replace(self, data=self.data + following.data)

    def __iter__(self) -> Iterator[TokenLogprob]:
        layout = struct.Struct(f"<f{self.num_top}i{self.num_top}f")
        for logprob, *top in layout.iter_unpack(self.data):
            pairs = zip(top[: self.num_top], top[self.num_top :], strict=True)
            yield TokenLogprob(logprob=logprob, top=tuple(pairs))


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkAddress:
    """Where a caller receives tokens.

    Attributes:
        host: address of the caller's node, reachable from the replicas.
        port: TCP port of its token sink.
        sink_id: unique per boot of the sink.
        key: per-boot secret for the HMAC challenge; travels only inside authenticated Ray calls.
    """

    host: str
    port: int
    sink_id: str
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingHints:
    """What a caller wants, for the router only.

    Attributes:
        tenant: whose request it is; tenants that wait share the service equally. Never a key.
        ttft_target_s: a first token after so many seconds is too late, or None: the request may
            then be refused at once.
        tpot_target_s: wanted seconds per token after it, or None.
    """

    tenant: str = ""
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One sequence to generate.

    Attributes:
        request_id: unique per sequence (a request with n choices sends n of these).
        prompt_token_ids: at least one id.
        sampling: see `SamplingParams`.
        sink: where the tokens go.
        output_offset: index of the first token that this attempt produces; > 0 after a migration,
            when the tokens received so far are part of `prompt_token_ids`.
        timeout_s: time budget in seconds from receipt, or None. A budget, not a timestamp: clocks
            differ between hosts.
        priority: lower runs earlier.
        cache_salt: prefix-cache pages are shared only between requests with equal salt.
        excluded_replicas: replica ids that must not run it.
        traceparent: W3C trace context, or None.
        hints: what the router should know of it.
        page_keys: of the prompt's full pages, see page_keys.py; the router fills them in.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    sink: SinkAddress
    output_offset: int = 0
    timeout_s: float | None = None
    priority: int = 0
    cache_salt: str = ""
    excluded_replicas: tuple[str, ...] = ()
    traceparent: str | None = None
    hints: RoutingHints = RoutingHints()
    page_keys: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateResult:
    """How a request ended; the control call's return value.

    Attributes:
        request_id: as in the request.
        finish_reason: why it ended.
        num_output_tokens: tokens that this attempt produced; with as many the caller is done.
        num_prompt_tokens: length of the attempt's prompt.
        num_cached_tokens: prompt tokens found in the prefix cache.
        replica_id: the replica that ran it.
        queue_s: seconds between arrival at the engine and the first step that contained it.
        first_token_s: seconds between arrival at the engine and its first token, or None.
    """

    request_id: str
    finish_reason: FinishReason
    num_output_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    replica_id: str = ""
    queue_s: float = 0.0
    first_token_s: float | None = None


class TokenDelta(NamedTuple):
    """New tokens of one request, in one engine step.

    Attributes:
        request_id: as in the request.
        start_index: output index of `token_ids[0]` (includes the request's `output_offset`).
        token_ids: new tokens; empty only together with a finish reason or `prompt_logprobs`.
        result: set on the last delta.
        logprobs: of the new tokens, where the request asks for them.
        prompt_logprobs: of prompt tokens that this step computed, where the request asks for them;
            all come before or with the first output token.
    """

    request_id: str
    start_index: int
    token_ids: tuple[int, ...]
    result: GenerateResult | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None


class ReplicaLoad(NamedTuple):
    """What a replica is doing, as the router and the metrics see it. Made by every step, by name.

    Attributes:
        num_running: sequences that hold a slot.
        num_waiting: sequences that wait in the engine.
        num_slots: slots in all.
        num_free_pages: pages that a new sequence could take (cached but unreferenced included).
        num_pages: usable pages in all.
        page_size: tokens per page.
        num_pending_prefill_tokens: prompt tokens of admitted sequences not yet computed.
        num_steps: steps launched since start.
        num_preemptions: since start.
        num_prompt_tokens: prompt tokens of all requests since start.
        num_cached_tokens: of those, found in the prefix cache.
        num_output_tokens: since start.
        num_draft_tokens: guesses of the next tokens that steps verified, since start.
        num_accepted_tokens: of those, that were right and became output tokens.
        num_compiles_after_warmup: must read 0.
        step_s: duration of the last step, seconds.
        num_decodes: running sequences whose prompt is computed.
        num_decode_context_tokens: tokens of those: what a decode step attends to.
        num_waiting_tokens: tokens of sequences that wait in the engine; the prefix cache may hold
            some of them.
        num_pending_pairs: (token, position before it) pairs that `num_pending_prefill_tokens` and
            `num_waiting_tokens` will attend to.
        max_chunk_tokens: most prompt tokens in a step that has decode rows.
        num_computed_tokens: tokens of all steps since start, prompts and decode rows.
        num_prefill_tokens: of those, of prompts.
        num_prefill_pairs: pairs, as above, that the prompt tokens attended to.
        num_context_tokens: context tokens that the decode rows attended to.
        busy_s: sum of all steps' durations, seconds. With the four counts before it, this is what
            the router fits its step model to: differences survive lost events.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_slots: int = 0
    num_free_pages: int = 0
    num_pages: int = 0
    page_size: int = 0
    num_pending_prefill_tokens: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_compiles_after_warmup: int = 0
    step_s: float = 0.0
    num_decodes: int = 0
    num_decode_context_tokens: int = 0
    num_waiting_tokens: int = 0
    num_pending_pairs: int = 0
    max_chunk_tokens: int = 0
    num_computed_tokens: int = 0
    num_prefill_tokens: int = 0
    num_prefill_pairs: int = 0
    num_context_tokens: int = 0
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterDemand:
    """What a router is asked for, as the autoscaling policy sees it; counts since its start.

    Attributes:
        num_requests: that arrived, refused ones included; a migrated one counts once.
        num_prompt_tokens: of those.
        num_sent: requests that were given to a replica.
        num_uncached_tokens: prompt tokens of those that the replica had to compute.
        num_pairs: (token, position before it) pairs that they attend to.
        num_ended: requests whose output is known.
        num_output_tokens: of those.
        num_queued: requests that wait in the router now.
        num_queued_tokens: prompt tokens of those.
        step_s, token_s, pair_s, context_s: fitted costs of a replica's steps, seconds.
    """

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_sent: int = 0
    num_uncached_tokens: int = 0
    num_pairs: int = 0
    num_ended: int = 0
    num_output_tokens: int = 0
    num_queued: int = 0
    num_queued_tokens: int = 0
    step_s: float = 0.0
    token_s: float = 0.0
    pair_s: float = 0.0
    context_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CacheChange:
    """What became of the pages of a replica's prefix cache since its last event.

    Attributes:
        stored: keys of pages that can be found from now on.
        dropped: keys of pages that cannot any more. A key is in one of the two at most.
    """

    stored: tuple[bytes, ...] = ()
    dropped: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvents:
    """What one engine step produced: the engine's only output.

    Attributes:
        deltas: new tokens and endings, at most one per request.
        load: load after the step.
        cache: pages that were stored and dropped since the step before.
    """

    deltas: tuple[TokenDelta, ...]
    load: ReplicaLoad
    cache: CacheChange = CacheChange()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a caller must know of the model that a replica runs.

    Attributes:
        model_id: name of the model directory; the served name is the app's affair.
        max_model_len: longest prompt + output, tokens.
        max_request_tokens: longest prompt + output that the KV pages hold; <= max_model_len.
        vocab_size: token ids are in [0, vocab_size).
        eos_token_ids: ids that end a sequence unless `ignore_eos`.
        fingerprint: of weights, numerics and programs: equal ones give equal tokens.
        takes_grammars: an output can be made to follow a grammar.
    """

    model_id: str
    max_model_len: int
    max_request_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    fingerprint: str
    takes_grammars: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """A replica's complete state, as it tells a router: the first frame of an event link.

    Attributes:
        replica_id: who reports.
        sequence: number of the latest load event; the next one carries one more.
        load: what the replica is doing.
        model_info: what it serves.
        cached_pages: keys of the pages in its prefix cache, the newest if there are very many.
    """

    replica_id: str
    sequence: int
    load: ReplicaLoad
    model_info: ModelInfo
    cached_pages: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupProgress:
    """How far a starting replica is.

    Attributes:
        replica_id: which one.
        stage: what it is doing, e.g. "load weights".
        done: units finished.
        total: units in all; 0 when unknown.
    """

    replica_id: str
    stage: str
    done: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileResult:
    """A profiler's trace that a replica has written.

    Attributes:
        replica_id: which one.
        directory: on its node.
        num_steps: steps in it.
    """

    replica_id: str
    directory: str
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatus:
    """What a router knows.

    Attributes:
        ready: requests are answered: a replica takes them, or one will be started for them.
        replicas: load of each routable replica, by id, drained ones too.
        num_queued: requests that wait in the router.
        num_queued_tokens: prompt tokens of those.
        num_inflight: requests that the router sent and that have not ended.
        model_info: what the replicas serve, or None before the first report.
        startup: replicas that are starting.
        is_draining: an operator wants no new requests to be taken.
        drained: ids of replicas that an operator wants to get none.
    """

    ready: bool
    replicas: dict[str, ReplicaLoad]
    num_queued: int
    num_queued_tokens: int
    num_inflight: int
    model_info: ModelInfo | None
    startup: tuple[StartupProgress, ...] = ()
    is_draining: bool = False
    drained: tuple[str, ...] = ()


STARTUP_NAMESPACE = b"systole"
"""Namespace in Ray's key-value store under which starting replicas report."""


def startup_key(app_name: str) -> bytes:
    """Return the prefix of the keys of an application's starting replicas."""
    return f"startup/{app_name}/".encode()
