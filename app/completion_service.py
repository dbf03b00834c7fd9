"""From a request's JSON to its choices and back: everything of a completion but the HTTP.

Plans a request (parse, template, tokenise, limits), runs its choices on the token client and
gathers usage. Used by the HTTP endpoints and by `Ingress.generate`. Invariant: when a run ends,
by whatever way, no sequence of it is left on a replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from app.choice import Choice
from app.ingress_config import IngressConfig
from app.metrics import IngressMetrics
from app.openai_response import (
    ChatStream,
    ChoiceOutput,
    CompletionStream,
    ResponseHeader,
    StreamFormat,
    Usage,
    chat_body,
    completion_body,
)
from app.openai_schema import (
    ChatRequest,
    CompletionRequest,
    GenerationParams,
    parse_request,
)
from app.tokenizer import Tokenizer
from replicas.errors import (
    ContextLengthExceeded,
    EngineNotReady,
    InvalidRequest,
    ModelNotFound,
    ServingError,
)
from replicas.wire import ModelInfo, SamplingParams, ServiceStatus, TokenDelta


class TokenClient(Protocol):
    """The part of `app.client.LLMClient` that the ingress uses."""

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
        priority: int = 0,
        cache_salt: str = "",
        traceparent: str | None = None,
    ) -> AsyncGenerator[TokenDelta]:
        """Stream the tokens of one sequence; closing it aborts the sequence."""
        ...

    @property
    def num_open(self) -> int:
        """Sequences whose tokens are still expected."""
        ...

    async def status(self) -> ServiceStatus:
        """Ask the router."""
        ...

    async def close(self) -> None:
        """Release the sink and all connections."""
        ...


# A router that has not started yet does not answer.
_STATUS_TIMEOUT_S = 1.5

# Called with a choice, its new text and its new tokens.
Emit = Callable[[Choice, str, Sequence[int]], Awaitable[None]]


@dataclass(slots=True, kw_only=True)
class Generation:
    """One planned request.

    Attributes:
        header: what every body and chunk of the response repeats.
        params: the parsed request.
        choices: one per prompt and n, in the order of the response.
        arrived_s: `time.perf_counter()` when the request arrived.
        traceparent: W3C trace context of the request, or None.
        first_token_s: seconds from its arrival to the first token of any choice, or None.
    """

    header: ResponseHeader
    params: CompletionRequest | ChatRequest
    choices: Sequence[Choice]
    arrived_s: float
    traceparent: str | None = None
    first_token_s: float | None = None

    def usage(self) -> Usage:
        """Return the tokens of all choices so far."""
        prompts = [choice for choice in self.choices if choice.counts_prompt]
        cached = [choice.num_cached_tokens for choice in prompts]
        return Usage(
            prompt_tokens=sum(len(choice.prompt_token_ids) for choice in prompts),
            completion_tokens=sum(choice.num_tokens for choice in self.choices),
            cached_tokens=None if None in cached else sum(filter(None, cached)),
        )

    def stream_format(self) -> StreamFormat:
        """Return how the chunks of this response look."""
        kind = ChatStream if isinstance(self.params, ChatRequest) else CompletionStream
        return kind(
            self.header,
            include_usage=self.params.stream_options.include_usage,
            return_token_ids=self.params.return_token_ids,
        )

    def body(self, outputs: Sequence[ChoiceOutput]) -> bytes:
        """Render the whole response."""
        render = chat_body if isinstance(self.params, ChatRequest) else completion_body
        return render(
            self.header, outputs, self.usage(), return_token_ids=self.params.return_token_ids
        )


class CompletionService:
    """Plans and runs completions of one model."""

    def __init__(
        self,
        client: TokenClient,
        tokenizer: Tokenizer,
        config: IngressConfig,
        metrics: IngressMetrics,
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._config = config
        self._metrics = metrics
        self._model_info: ModelInfo | None = None

    async def model_info(self) -> ModelInfo:
        """Return what the first ready replica said of the model; it never changes after that.

        Raises:
            EngineNotReady: no replica has finished its warm-up yet.
        """
        if self._model_info is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STATUS_TIMEOUT_S):
                    self._model_info = (await self._client.status()).model_info
        if self._model_info is None:
            raise EngineNotReady(
                "the model is still loading; /ready tells when it can answer", retry_after_s=5
            )
        return self._model_info

    async def plan_completion(self, body: dict[str, Any]) -> Generation:
        """Plan POST /v1/completions.

        Raises:
            ServingError: the request is refused.
        """
        arrived_s = time.perf_counter()
        request = parse_request(CompletionRequest, body)
        info = await self._check_common(request)
        self._check_num_choices(len(request.prompt), request.n)
        prompts = [await self._encode(prompt, request, info) for prompt in request.prompt]
        is_explicit = "max_tokens" in request.model_fields_set
        limits = [
            _output_limit(len(prompt), request.max_tokens, info, is_explicit=is_explicit)
            for prompt in prompts
        ]
        return self._generation("cmpl", request, prompts, limits, info, arrived_s)

    async def plan_chat(self, body: dict[str, Any]) -> Generation:
        """Plan POST /v1/chat/completions.

        Raises:
            ServingError: the request is refused.
        """
        arrived_s = time.perf_counter()
        request = parse_request(ChatRequest, body)
        info = await self._check_common(request)
        self._check_num_choices(1, request.n)
        template = self._tokenizer.chat_template
        if template is None:
            raise InvalidRequest(
                f"the model '{self._config.model_id}' has no chat template; use /v1/completions"
            )
        prompt = await self._tokenizer.encode_within(
            template.render(request.messages),
            max_tokens=info.max_request_tokens - 1,
            add_special_tokens=False,
        )
        wanted = request.max_output_tokens
        limit = _output_limit(
            len(prompt),
            info.max_request_tokens if wanted is None else wanted,
            info,
            is_explicit=wanted is not None,
        )
        return self._generation("chatcmpl", request, [prompt], [limit], info, arrived_s)

    async def run(self, generation: Generation, emit: Emit) -> None:
        """Run all choices to their ends, handing out text as it becomes certain.

        Raises:
            ServingError: the first failure of a choice; the others are aborted.
        """
        choices = generation.choices
        if len(choices) == 1:
            await self._run_choice(generation, choices[0], emit)
        else:
            try:
                async with asyncio.TaskGroup() as group:
                    for choice in choices:
                        group.create_task(self._run_choice(generation, choice, emit))
            except* ServingError as errors:
                raise _first_leaf(errors) from None
        usage = generation.usage()
        self._metrics.prompt_tokens.inc(usage.prompt_tokens)
        self._metrics.cached_prompt_tokens.inc(usage.cached_tokens or 0)

    async def collect(self, generation: Generation) -> Sequence[ChoiceOutput]:
        """Run all choices and return their whole outputs."""
        texts: list[list[str]] = [[] for _ in generation.choices]
        token_ids: list[list[int]] = [[] for _ in generation.choices]

        async def keep(choice: Choice, text: str, new_token_ids: Sequence[int]) -> None:
            texts[choice.index].append(text)
            token_ids[choice.index] += new_token_ids

        await self.run(generation, keep)
        return [
            ChoiceOutput(
                text="".join(texts[choice.index]),
                token_ids=token_ids[choice.index],
                prompt_token_ids=choice.prompt_token_ids,
                finish_reason=choice.finish_reason or "stop",
            )
            for choice in generation.choices
        ]

    async def _run_choice(self, generation: Generation, choice: Choice, emit: Emit) -> None:
        metrics, clock = self._metrics, time.perf_counter
        deltas = self._client.generate(
            choice.prompt_token_ids,
            choice.sampling,
            request_id=choice.request_id,
            timeout_s=self._config.request_timeout_s,
            cache_salt=generation.params.cache_salt,
            traceparent=generation.traceparent,
        )
        first_s = last_s = None
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                now_s = clock()
                if first_s is None or last_s is None:
                    first_s = now_s
                    waited_s = now_s - generation.arrived_s
                    metrics.time_to_first_token.observe(waited_s)
                    if generation.first_token_s is None:
                        generation.first_token_s = waited_s
                else:
                    metrics.inter_token_latency.observe(now_s - last_s)
                last_s = now_s
                text, token_ids = choice.feed(delta)
                metrics.output_tokens.inc(len(token_ids))
                await emit(choice, text, token_ids)
                if choice.finish_reason is not None:
                    if choice.num_tokens > 1:
                        per_token_s = (last_s - first_s) / (choice.num_tokens - 1)
                        metrics.time_per_output_token.observe(per_token_s)
                    return

    async def _check_common(self, request: GenerationParams) -> ModelInfo:
        config = self._config
        if request.model is not None and request.model != config.model_id:
            raise ModelNotFound(
                f"the model '{request.model}' is not served here; this server serves "
                f"'{config.model_id}'",
                param="model",
            )
        info = await self.model_info()
        for token_id in request.stop_token_ids:
            _check_token_id(token_id, info, param="stop_token_ids")
        return info

    def _check_num_choices(self, num_prompts: int, n: int) -> None:
        if num_prompts * n > self._config.max_choices:
            raise InvalidRequest(
                f"{num_prompts} prompts with n={n} make {num_prompts * n} choices; a request may "
                f"have at most {self._config.max_choices}",
                param="prompt" if num_prompts > 1 else "n",
            )

    async def _encode(
        self, prompt: str | tuple[int, ...], request: CompletionRequest, info: ModelInfo
    ) -> Sequence[int]:
        max_tokens = info.max_request_tokens - 1
        if isinstance(prompt, str):
            token_ids = await self._tokenizer.encode_within(
                prompt, max_tokens=max_tokens, add_special_tokens=request.add_special_tokens
            )
            if not token_ids:
                raise InvalidRequest(
                    "the prompt is empty; it needs at least one token", param="prompt"
                )
            return token_ids
        if len(prompt) > max_tokens:
            raise ContextLengthExceeded(
                f"the prompt has {len(prompt)} tokens; at most {max_tokens} leave room for an "
                "answer",
                param="prompt",
            )
        _check_token_id(max(prompt), info, param="prompt")
        return prompt

    def _generation(
        self,
        kind: str,
        request: CompletionRequest | ChatRequest,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        info: ModelInfo,
        arrived_s: float,
    ) -> Generation:
        response_id = f"{kind}-{uuid.uuid4().hex}"
        seed = secrets.randbits(64) if request.seed is None else request.seed
        choices = [
            Choice(
                p * request.n + i,
                f"{response_id}-{p * request.n + i}",
                prompt_token_ids=prompt,
                sampling=request.sampling(max_tokens=limits[p], seed=seed, choice=i),
                detokenizer=self._tokenizer.detokenizer(
                    skip_special_tokens=request.skip_special_tokens
                ),
                stop_strings=request.stop,
                counts_prompt=i == 0,
            )
            for p, prompt in enumerate(prompts)
            for i in range(request.n)
        ]
        header = ResponseHeader(
            id=response_id,
            created=int(time.time()),
            model=self._config.model_id,
            system_fingerprint=f"fp_{info.fingerprint[:16]}",
        )
        return Generation(header=header, params=request, choices=choices, arrived_s=arrived_s)


def _output_limit(
    num_prompt_tokens: int, wanted: int, info: ModelInfo, *, is_explicit: bool
) -> int:
    """Return the most tokens to generate: what was asked for, or what there is room for.

    Raises:
        ContextLengthExceeded: the client named a number for which there is no room: answering
            with fewer tokens would be a silent truncation.
    """
    room = info.max_request_tokens - num_prompt_tokens
    if is_explicit and wanted > room:
        raise ContextLengthExceeded(
            f"{num_prompt_tokens} prompt tokens and max_tokens={wanted} exceed the context of "
            f"{info.max_request_tokens} tokens; max_tokens can be at most {room} here",
            param="max_tokens",
        )
    return min(wanted, room)


def _check_token_id(token_id: int, info: ModelInfo, *, param: str) -> None:
    if token_id >= info.vocab_size:
        raise InvalidRequest(
            f"token id {token_id} is out of range: the vocabulary has ids 0 to "
            f"{info.vocab_size - 1}",
            param=param,
        )


def _first_leaf(group: BaseExceptionGroup[ServingError]) -> ServingError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, ServingError)
    return error
