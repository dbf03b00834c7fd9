"""Records that cross process boundaries: what a caller asks of a replica and what comes back.

Standard library only, frozen and picklable. Token values travel on the data plane (`TokenFrame`,
see token_stream.py); everything else on the control plane, as the arguments and the result of one
held-open Serve call per request.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class FinishReason(enum.StrEnum):
    """Why a request ended. Errors are raised, never a finish reason."""

    STOP = "stop"
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
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int = 16
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """New tokens of one request, in one engine step.

    Attributes:
        request_id: as in the request.
        start_index: output index of `token_ids[0]` (includes the request's `output_offset`).
        token_ids: new tokens; empty only together with a finish reason.
        result: set on the last delta.
    """

    request_id: str
    start_index: int
    token_ids: tuple[int, ...]
    result: GenerateResult | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """What a replica is doing, as the router and the metrics see it.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvents:
    """What one engine step produced: the engine's only output.

    Attributes:
        deltas: new tokens and endings, at most one per request.
        load: load after the step.
    """

    deltas: tuple[TokenDelta, ...]
    load: ReplicaLoad


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
    """

    model_id: str
    max_model_len: int
    max_request_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """A replica's complete state, as it tells a router: the first frame of an event link.

    Attributes:
        replica_id: who reports.
        sequence: number of the latest load event; the next one carries one more.
        load: what the replica is doing.
        model_info: what it serves.
    """

    replica_id: str
    sequence: int
    load: ReplicaLoad
    model_info: ModelInfo


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
class ServiceStatus:
    """What a router knows.

    Attributes:
        ready: at least one replica takes requests.
        replicas: load of each routable replica, by id.
        num_queued: requests that wait in the router.
        num_queued_tokens: prompt tokens of those.
        num_inflight: requests that the router sent and that have not ended.
        model_info: what the replicas serve, or None before the first report.
        startup: replicas that are starting.
    """

    ready: bool
    replicas: dict[str, ReplicaLoad]
    num_queued: int
    num_queued_tokens: int
    num_inflight: int
    model_info: ModelInfo | None
    startup: tuple[StartupProgress, ...] = ()


STARTUP_NAMESPACE = b"systole"
"""Namespace in Ray's key-value store under which starting replicas report."""


def startup_key(app_name: str) -> bytes:
    """Return the prefix of the keys of an application's starting replicas."""
    return f"startup/{app_name}/".encode()
