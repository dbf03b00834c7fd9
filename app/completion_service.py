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
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from app.choice import Choice, Piece
from app.content_filter import ContentFilter
from app.generation import Generation
from app.generation_config import SamplingDefaults
from app.grammar_checker import GrammarChecker
from app.ingress_config import IngressConfig
from app.logprobs import TokenNames
from app.metrics import IngressMetrics
from app.openai_response import ChoiceOutput, ResponseHeader
from app.openai_schema import (
    ChatRequest,
    CompletionRequest,
    GenerationParams,
    parse_request,
)
from app.output_grammar import NO_FRAME, Constraint, Frame, write_grammar
from app.prompts import Prompts, check_token_id
from app.structured_schema import Demand
from app.token_client import TokenClient, not_ready, status_soon
from app.tokenizer import Tokenizer
from app.tool_calls.guided import guided_calls, message_frame
from app.tool_calls.reader import MessageFormat, MessageReader
from replicas.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotFound,
    ServingError,
)
from replicas.frames import LogprobBuffer
from replicas.wire import ModelInfo, SamplingParams

# Called with a choice, and its new text and tokens.
Emit = Callable[[Choice, Piece], Awaitable[None]]


class CompletionService:
    """Plans and runs completions of one model."""

    def __init__(
        self,
        client: TokenClient,
        tokenizer: Tokenizer,
        config: IngressConfig,
        metrics: IngressMetrics,
        defaults: SamplingDefaults | None = None,
        *,
        content_filter: ContentFilter | None = None,
    ) -> None:
        self.defaults = defaults or SamplingDefaults()
        self._filter = content_filter
        self._client = client
        self._tokenizer = tokenizer
        self.prompts = Prompts(tokenizer)
        self._config = config
        self._metrics = metrics
        self._model_info: ModelInfo | None = None
        self._grammars = GrammarChecker(Path(config.model_dir))
        template = tokenizer.chat_template
        self._format = MessageFormat.resolve(
            "" if template is None else template.source,
            calls=config.tool_call_style,
            reasoning=config.reasoning_style,
        )
        self._message_tokenizer = tokenizer.showing(self._format.markers)

    def reconfigure(self, config: IngressConfig) -> None:
        """Plan by other limits from the next request on; those that run end as they began."""
        self._config = config

    async def model_info(self) -> ModelInfo:
        """Return what the first ready replica said of the model; it never changes after that.

        Raises:
            EngineNotReady: no replica has finished its warm-up yet.
        """
        if self._model_info is None:
            self._model_info = (await status_soon(self._client)).model_info
            if self._model_info is not None and self._model_info.takes_grammars:
                self._grammars.start(self._model_info)
        if self._model_info is None:
            raise not_ready()
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
        prompts = [
            await self.prompts.encode_prompt(prompt, request, info) for prompt in request.prompt
        ]
        if self._filter is not None:
            for prompt in prompts:
                text = self._tokenizer.decode(prompt, skip_special_tokens=False)
                await self._filter.check_input(text, param="prompt")
        is_explicit = "max_tokens" in request.model_fields_set
        limits = [
            _output_limit(len(prompt), max(1, request.max_tokens), info, is_explicit=is_explicit)
            for prompt in prompts
        ]
        demand = request.demand()
        grammar = "" if demand is None else await self._grammar(*demand, info)
        generation = self._generation(
            "cmpl", request, prompts, limits, info, arrived_s, grammar=grammar
        )
        if request.echo:
            generation.echoes = [
                self._tokenizer.decode(prompt, skip_special_tokens=request.skip_special_tokens)
                for prompt in prompts
            ]
        return generation

    async def plan_chat(self, body: dict[str, Any]) -> Generation:
        """Plan POST /v1/chat/completions.

        Raises:
            ServingError: the request is refused.
        """
        arrived_s = time.perf_counter()
        request = parse_request(ChatRequest, body)
        info = await self._check_common(request)
        self._check_num_choices(1, request.n)
        text, prompt = await self.render_chat(request, info)
        if self._filter is not None:
            await self._filter.check_input(text, param="messages")
        wanted = request.max_output_tokens
        limit = _output_limit(
            len(prompt),
            info.max_request_tokens if wanted is None else wanted,
            info,
            is_explicit=wanted is not None,
        )
        continued = request.messages[-1].text if request.continue_final_message else ""
        is_inside_thought = self._format.is_inside_thought(text, continued)

        def new_reader() -> MessageReader | None:
            return self._format.reader(
                functions=[tool.function.name for tool in request.offered_tools],
                is_inside_thought=is_inside_thought,
                max_calls=None if request.parallel_tool_calls else 1,
                shows_reasoning=request.include_reasoning,
            )

        grammar = await self._chat_grammar(request, info, is_inside_thought=is_inside_thought)
        return self._generation(
            "chatcmpl",
            request,
            [prompt],
            [limit],
            info,
            arrived_s,
            new_reader=new_reader,
            grammar=grammar,
        )

    async def _chat_grammar(
        self, request: ChatRequest, info: ModelInfo, *, is_inside_thought: bool
    ) -> str:
        """The grammar of an answer: of its calls, if they are demanded, else of its content."""
        demand, form = request.demand(), self._format
        template = self._tokenizer.chat_template
        calls = guided_calls(
            request.offered_tools,
            request.tool_choice,
            style=form.calls,
            template="" if template is None else template.source,
            is_single=not request.parallel_tool_calls,
        )
        if calls is not None:
            if demand is not None:
                raise InvalidRequest(
                    f"'{demand.param}' cannot be used together with a demanded call or 'strict' "
                    "tools",
                    param=demand.param,
                )
            demand = Demand("tools", calls)
        if demand is None:
            return ""
        frame = message_frame(
            form.reasoning, is_inside_thought=is_inside_thought, is_call=calls is not None
        )
        return await self._grammar(*demand, info, frame=frame)

    async def _grammar(
        self, param: str, constraint: Constraint, info: ModelInfo, *, frame: Frame = NO_FRAME
    ) -> str:
        """Write a grammar and have it checked.

        Raises:
            InvalidRequest: it cannot be used; `param` is named.
        """
        if not info.takes_grammars:
            raise InvalidRequest(
                f"'{param}' cannot be used: structured output is off on this server "
                "(engine.structured_output), or does not know the model's tokenizer",
                param=param,
            )
        special = await self._grammars.special_tokens(info)
        grammar = write_grammar(constraint, frame=frame, special=special)
        await self._grammars.check(grammar, info, param=param)
        return grammar

    async def close(self) -> None:
        """End the process that checks grammars."""
        await self._grammars.close()

    async def render_chat(self, request: ChatRequest, info: ModelInfo) -> tuple[str, Sequence[int]]:
        """Turn a chat into its prompt: as text, and as tokens.

        Raises:
            InvalidRequest: the model has no chat template, it refuses the chat, or its calls of
                tools could not be told from text.
            ServingError: the chat does not fit.
        """
        text = self._chat_text(request)
        return text, await self.prompts.encode_text(text, request, info, add_special_tokens=False)

    def _chat_text(self, request: ChatRequest) -> str:
        template = self._tokenizer.chat_template
        if template is None:
            raise InvalidRequest(
                f"the model '{self._config.model_id}' has no chat template; use /v1/completions"
            )
        if request.offered_tools and self._format.calls == "none":
            raise InvalidRequest(
                f"'tools' cannot be used with the model '{self._config.model_id}': how it writes "
                "tool calls is not known (setting ingress.tool_call_style)",
                param="tools",
            )
        return template.render(
            request.messages,
            tools=request.offered_tools,
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final_message=request.continue_final_message,
            variables=request.chat_template_kwargs,
        )

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
                raise first_leaf(errors) from None
        usage = generation.usage()
        self._metrics.prompt_tokens.inc(usage.prompt_tokens)
        self._metrics.cached_prompt_tokens.inc(usage.cached_tokens or 0)

    async def collect(self, generation: Generation) -> Sequence[ChoiceOutput]:
        """Run all choices and return their whole outputs."""
        pieces: list[list[Piece]] = [[] for _ in generation.choices]

        async def keep(choice: Choice, piece: Piece) -> None:
            pieces[choice.index].append(piece)

        await self.run(generation, keep)
        return [generation.output(choice, pieces[choice.index]) for choice in generation.choices]

    async def _run_choice(self, generation: Generation, choice: Choice, emit: Emit) -> None:
        metrics, clock = self._metrics, time.perf_counter
        deltas = self._client.generate(
            choice.prompt_token_ids,
            choice.sampling,
            request_id=choice.request_id,
            timeout_s=generation.demands.within(self._config.request_timeout_s),
            priority=generation.demands.priority,
            cache_salt=generation.params.cache_salt,
            traceparent=generation.traceparent,
            hints=generation.demands.hints,
        )
        first_s = last_s = None
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                if not delta.token_ids and delta.result is None:
                    choice.feed(delta)  # a part of the prompt has been computed
                    continue
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
                piece = await self._screened(generation, choice, choice.feed(delta))
                metrics.output_tokens.inc(len(piece.token_ids))
                await emit(choice, piece)
                if choice.finish_reason is not None:
                    if choice.num_tokens > 1:
                        per_token_s = (last_s - first_s) / (choice.num_tokens - 1)
                        metrics.time_per_output_token.observe(per_token_s)
                    return

    async def _screened(self, generation: Generation, choice: Choice, piece: Piece) -> Piece:
        """Keep what is shown, where it is kept, and end a choice that the filter refuses."""
        if (self._filter is None and not generation.keeps_text) or not (new := piece.shown):
            return piece
        shown = choice.shown + new
        if self._filter is not None and await self._filter.refuses_output(shown):
            choice.finish_reason = "content_filter"
            return Piece("", (), None)
        choice.shown = shown
        return piece

    async def score(
        self, prompt: Sequence[int], continuation: Sequence[int], *, cache_salt: str
    ) -> dict[str, Any]:
        """Return the log-likelihood of a continuation, and of each of its tokens.

        What precedes it may come from the prefix cache, so many continuations of one prompt cost
        little more than themselves.

        Raises:
            ServingError: the request is refused or fails.
        """
        sampling = SamplingParams(
            max_tokens=1, prompt_logprobs=1, prompt_logprobs_start=len(prompt)
        )
        found = LogprobBuffer()
        deltas = self._client.generate(
            [*prompt, *continuation],
            sampling,
            request_id=f"score-{uuid.uuid4().hex}",
            timeout_s=self._config.request_timeout_s,
            cache_salt=cache_salt,
        )
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                if delta.prompt_logprobs is not None:
                    found.append(delta.prompt_logprobs)
        entries = list(found.since(0) or ())
        assert len(entries) == len(continuation)
        pairs = zip(continuation, entries, strict=True)
        return {
            "logprob": sum(entry.logprob for entry in entries),
            "num_tokens": len(entries),
            "token_ids": list(continuation),
            "token_logprobs": [entry.logprob for entry in entries],
            "is_greedy": all(entry.top[0][0] == token_id for token_id, entry in pairs),
        }

    def check_model(self, model: str | None) -> None:
        """Refuse a model that is not served here.

        Raises:
            ModelNotFound: it is another one.
        """
        if model is not None and model != self._config.model_id:
            raise ModelNotFound(
                f"the model '{model}' is not served here; this server serves "
                f"'{self._config.model_id}'",
                param="model",
            )

    async def _check_common(self, request: GenerationParams) -> ModelInfo:
        self.check_model(request.model)
        info = await self.model_info()
        for param, token_ids in (
            ("stop_token_ids", request.stop_token_ids),
            ("allowed_token_ids", request.allowed_token_ids),
            ("logit_bias", [token_id for token_id, _ in request.logit_bias]),
        ):
            for token_id in token_ids:
                check_token_id(token_id, info, param=param)
        return info

    def _check_num_choices(self, num_prompts: int, n: int) -> None:
        if num_prompts * n > self._config.max_choices:
            raise InvalidRequest(
                f"{num_prompts} prompts with n={n} make {num_prompts * n} choices; a request may "
                f"have at most {self._config.max_choices}",
                param="prompt" if num_prompts > 1 else "n",
            )

    def _generation(
        self,
        kind: str,
        request: CompletionRequest | ChatRequest,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        info: ModelInfo,
        arrived_s: float,
        *,
        new_reader: Callable[[], MessageReader | None] = lambda: None,
        grammar: str = "",
    ) -> Generation:
        response_id = f"{kind}-{uuid.uuid4().hex}"
        seed = secrets.randbits(64) if request.seed is None else request.seed
        bad_words = self.prompts.bad_words(request)
        for limit in limits:
            if request.min_tokens > limit:
                raise InvalidRequest(
                    f"min_tokens is {request.min_tokens}, but the output ends after {limit} tokens",
                    param="min_tokens",
                )
        choices = [
            Choice(
                p * request.n + i,
                f"{response_id}-{p * request.n + i}",
                prompt_token_ids=prompt,
                sampling=request.sampling(
                    max_tokens=limits[p],
                    seed=seed,
                    choice=i,
                    defaults=self.defaults,
                    bad_words=bad_words,
                    grammar=grammar,
                ),
                detokenizer=(
                    self._tokenizer if reader is None else self._message_tokenizer
                ).detokenizer(skip_special_tokens=request.skip_special_tokens),
                stop_strings=request.stop,
                counts_prompt=i == 0,
                includes_stop=request.include_stop_str_in_output,
                discards_output=isinstance(request, CompletionRequest) and request.max_tokens == 0,
                reader=reader,
            )
            for p, prompt in enumerate(prompts)
            for i in range(request.n)
            for reader in (new_reader(),)
        ]
        header = ResponseHeader(
            id=response_id,
            created=int(time.time()),
            model=self._config.model_id,
            system_fingerprint=f"fp_{info.fingerprint[:16]}",
        )
        names = TokenNames(self._tokenizer, as_ids=request.return_tokens_as_token_ids)
        return Generation(
            header=header, params=request, choices=choices, arrived_s=arrived_s, names=names
        )


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


def first_leaf(group: BaseExceptionGroup[ServingError]) -> ServingError:
    """The first error of a group of tasks."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, ServingError)
    return error
