"""One planned request, and how its answer looks as a whole and as a stream.

Pure: knows what was asked and what the choices have given so far, not how they run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app.choice import Choice, Piece
from app.demands import NO_DEMANDS, Demands
from app.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    LogprobFormat,
    TokenNames,
    prompt_logprobs,
)
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
from app.openai_schema import ChatRequest, CompletionRequest


@dataclass(slots=True, kw_only=True)
class Generation:
    """One planned request.

    Attributes:
        header: what every body and chunk of the response repeats.
        params: the parsed request.
        choices: one per prompt and n, in the order of the response.
        arrived_s: `time.perf_counter()` when the request arrived.
        names: of tokens in the response.
        echoes: by prompt, its text where it is part of the output.
        traceparent: W3C trace context of the request, or None.
        demands: how soon and how fast the client wants it.
        first_token_s: seconds from its arrival to the first token of any choice, or None.
        keeps_text: the choices have to keep what they showed.
    """

    header: ResponseHeader
    params: CompletionRequest | ChatRequest
    choices: Sequence[Choice]
    arrived_s: float
    names: TokenNames
    echoes: Sequence[str] = ()
    traceparent: str | None = None
    demands: Demands = NO_DEMANDS
    first_token_s: float | None = None
    keeps_text: bool = False

    @property
    def wants_logprobs(self) -> bool:
        """Whether the response shows the log-probabilities of the output."""
        return self.params.num_logprobs is not None

    def logprob_format(self) -> LogprobFormat:
        """Return how one choice's log-probabilities are shown; it counts that choice's text."""
        kind = ChatLogprobs if isinstance(self.params, ChatRequest) else CompletionLogprobs
        return kind(self.names)

    def echo(
        self, choice: Choice, logprobs: LogprobFormat
    ) -> tuple[str, dict[str, Any] | None] | None:
        """What precedes a choice's output in its text, with log-probabilities; None: nothing."""
        if not self.echoes:
            return None
        text = self.echoes[choice.index // self.params.n]
        if not self.wants_logprobs:
            return text, None
        entries = [None, *(choice.prompt_logprobs.since(0) or ())]
        return text, logprobs.render(choice.prompt_token_ids, entries)

    def texts(self) -> list[str] | None:
        """What each choice has shown so far, where that is kept."""
        return [choice.shown for choice in self.choices] if self.keeps_text else None

    def usage(self) -> Usage:
        """Return the tokens of all choices so far."""
        prompts = [choice for choice in self.choices if choice.counts_prompt]
        cached = [choice.num_cached_tokens for choice in prompts]
        return Usage(
            prompt_tokens=sum(len(choice.prompt_token_ids) for choice in prompts),
            completion_tokens=sum(choice.num_tokens for choice in self.choices),
            cached_tokens=None if None in cached else sum(filter(None, cached)),
            reasoning_tokens=sum(choice.num_reasoning_tokens for choice in self.choices),
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

    def output(self, choice: Choice, pieces: Sequence[Piece]) -> ChoiceOutput:
        """Put a finished choice together."""
        names, text = self.names, "".join(piece.text for piece in pieces)
        token_ids = [token_id for piece in pieces for token_id in piece.token_ids]
        logprobs: dict[str, Any] | None = None
        if self.wants_logprobs or self.echoes:
            shape = self.logprob_format()
            echo = self.echo(choice, shape)
            if self.wants_logprobs:
                entries = [entry for piece in pieces for entry in piece.logprobs or ()]
                logprobs = shape.render(token_ids, entries)
            if echo is not None:
                text = echo[0] + text
                if logprobs is not None and echo[1] is not None:
                    logprobs = {name: echo[1][name] + logprobs[name] for name in logprobs}
        of_prompt: list[dict[str, Any] | None] | None = None
        if self.params.prompt_logprobs is not None:
            entries = [None, *(choice.prompt_logprobs.since(0) or ())]
            of_prompt = prompt_logprobs(names, choice.prompt_token_ids, entries)
        return ChoiceOutput(
            text=text,
            token_ids=token_ids,
            prompt_token_ids=choice.prompt_token_ids,
            finish_reason=choice.finish_reason or "stop",
            stop_string=choice.stop_string,
            logprobs=logprobs,
            prompt_logprobs=of_prompt,
            reasoning="".join(piece.message.reasoning for piece in pieces if piece.message),
            tool_calls=[c for piece in pieces if piece.message for c in piece.message.tool_calls],
        )
