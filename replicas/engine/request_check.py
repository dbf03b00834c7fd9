"""What a request must satisfy for the engine to run it; everything else is refused by name.

Pure; knows the model's limits only. Invariant: a request that passes never fails inside a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from replicas.errors import ContextLengthExceeded, InvalidRequest
from replicas.wire import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_REPETITION_PENALTY,
    MAX_STOP_TOKEN_IDS,
    MIN_REPETITION_PENALTY,
    GenerateRequest,
    ModelInfo,
    SamplingParams,
)


def check_request(request: GenerateRequest, info: ModelInfo) -> None:
    """Refuse what could never run.

    Raises:
        InvalidRequest: an empty prompt, a token id out of range, a bad sampling parameter.
        ContextLengthExceeded: prompt or prompt + max_tokens over the limits.
    """
    if not request.prompt_token_ids:
        raise InvalidRequest("the prompt is empty; send at least one token", param="prompt")
    _check_ids(request.prompt_token_ids, info, "prompt")
    _check_sampling(request.sampling, info)
    _check_min_tokens(request)
    _check_length(len(request.prompt_token_ids), request.sampling.max_tokens, info)


def _check_sampling(sampling: SamplingParams, info: ModelInfo) -> None:
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
    if not 0 <= sampling.min_p <= 1:
        raise InvalidRequest(f"min_p must be in [0, 1], got {sampling.min_p}", param="min_p")
    for name in ("presence_penalty", "frequency_penalty"):
        value: float = getattr(sampling, name)
        if not math.isfinite(value):
            raise InvalidRequest(f"{name} must be finite, got {value}", param=name)
    penalty = sampling.repetition_penalty
    if not MIN_REPETITION_PENALTY <= penalty <= MAX_REPETITION_PENALTY:
        raise InvalidRequest(
            f"repetition_penalty must be in [{MIN_REPETITION_PENALTY:g}, "
            f"{MAX_REPETITION_PENALTY:g}], got {penalty}",
            param="repetition_penalty",
        )
    _check_bias(sampling, info)
    _check_logprobs(sampling)
    if sampling.grammar and not info.takes_grammars:
        raise InvalidRequest(
            "this deployment has no structured output: engine.structured_output is off, or its "
            "tokenizer cannot be used for it",
            param="structured_outputs",
        )


def _check_min_tokens(request: GenerateRequest) -> None:
    """After a migration, output that the prompt holds counts too."""
    sampling = request.sampling
    max_tokens = sampling.max_tokens + request.output_offset
    if not 0 <= sampling.min_tokens <= max_tokens:
        raise InvalidRequest(
            f"min_tokens must be in [0, max_tokens], got {sampling.min_tokens} with a max_tokens "
            f"of {max_tokens}",
            param="min_tokens",
        )


def _check_bias(sampling: SamplingParams, info: ModelInfo) -> None:
    for name, values, limit in (
        ("logit_bias", sampling.logit_bias, MAX_LOGIT_BIAS),
        ("bad_words", sampling.bad_words, MAX_BAD_WORDS),
        ("stop_token_ids", sampling.stop_token_ids, MAX_STOP_TOKEN_IDS),
    ):
        if len(values) > limit:
            raise InvalidRequest(
                f"{name} may have {limit} entries at most, got {len(values)}", param=name
            )
    for token_id, bias in sampling.logit_bias:
        if not math.isfinite(bias):
            raise InvalidRequest(
                f"the bias of token {token_id} must be finite, got {bias}", param="logit_bias"
            )
    for word in sampling.bad_words:
        if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
            raise InvalidRequest(
                f"a bad word must have 1 to {MAX_BAD_WORD_TOKENS} tokens, got {len(word)}",
                param="bad_words",
            )
        _check_ids(word, info, "bad_words")
    _check_ids((token_id for token_id, _ in sampling.logit_bias), info, "logit_bias")
    _check_ids(sampling.allowed_token_ids, info, "allowed_token_ids")


def _check_logprobs(sampling: SamplingParams) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        value: int | None = getattr(sampling, name)
        if value is not None and not 0 <= value <= MAX_LOGPROBS:
            raise InvalidRequest(f"{name} must be in [0, {MAX_LOGPROBS}], got {value}", param=name)
    if sampling.prompt_logprobs_start < 1:
        raise InvalidRequest(
            f"prompt_logprobs_start must be at least 1, got {sampling.prompt_logprobs_start}",
            param="prompt_logprobs",
        )


def _check_ids(token_ids: Iterable[int], info: ModelInfo, param: str) -> None:
    bad = next((i for i in token_ids if not 0 <= i < info.vocab_size), None)
    if bad is not None:
        raise InvalidRequest(
            f"token id {bad} is out of range; ids are in [0, {info.vocab_size})", param=param
        )


def _check_length(num_prompt: int, max_tokens: int, info: ModelInfo) -> None:
    num_total = num_prompt + max_tokens
    if num_total > info.max_model_len:
        raise ContextLengthExceeded(
            f"this model's context is {info.max_model_len} tokens; the prompt has {num_prompt} "
            f"and max_tokens is {max_tokens}; shorten one of them",
            param="prompt",
        )
    if num_total > info.max_request_tokens:
        raise ContextLengthExceeded(
            f"the KV cache of this deployment holds {info.max_request_tokens} tokens; the "
            f"prompt has {num_prompt} and max_tokens is {max_tokens}",
            param="prompt",
        )
