"""One choice of a response: tokens in, text out, until something ends it.

Synchronous and free of I/O. Invariant: text, token count and finish reason depend on the token
sequence alone, not on how it was cut into deltas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from app.detokenizer import Detokenizer
from app.stop_strings import StopStringMatcher
from app.tool_calls.message import MessageDelta
from app.tool_calls.reader import MessageReader
from replicas.errors import EngineError
from replicas.frames import LogprobBuffer
from replicas.wire import (
    FinishReason,
    GenerateResult,
    SamplingParams,
    TokenDelta,
    TokenLogprobs,
)


class Piece(NamedTuple):
    """What one delta adds to a choice.

    Attributes:
        text: that is certain now; of a chat, content.
        token_ids: tokens that count.
        logprobs: of these tokens, where asked for.
        message: where there is new reasoning or a new tool call.
    """

    text: str
    token_ids: Sequence[int]
    logprobs: TokenLogprobs | None
    message: MessageDelta | None = None

    @property
    def shown(self) -> str:
        """All its text: reasoning, content, and calls."""
        if self.message is None:
            return self.text
        calls = (f"{call.name}{call.arguments}" for call in self.message.tool_calls)
        return "".join((self.message.reasoning, self.text, *calls))


class Choice:
    """The state of one output sequence.

    Attributes:
        index: position among the response's choices.
        request_id: the engine's name for the sequence.
        prompt_token_ids: its prompt.
        sampling: its sampling parameters.
        counts_prompt: whether its prompt counts in the usage: once for all choices of a prompt.
        num_tokens: tokens that belong to the output so far.
        num_reasoning_tokens: how many of them are reasoning.
        num_cached_tokens: prompt tokens found in the prefix cache; None until the engine says so
            with its last delta, which never comes after a stop string.
        finish_reason: "stop", "length", "tool_calls" or "content_filter" once the output has ended.
        stop_string: the stop string that ended it, or None.
        stop_token_id: the token that ended it, or None.
        prompt_logprobs: of the prompt, from position 1; complete with the first output token.
        shown: all that was given out of it, where somebody keeps it there.
    """

    __slots__ = (
        "_detokenizer",
        "_discards_output",
        "_includes_stop",
        "_matcher",
        "_reader",
        "counts_prompt",
        "finish_reason",
        "index",
        "num_cached_tokens",
        "num_reasoning_tokens",
        "num_tokens",
        "prompt_logprobs",
        "prompt_token_ids",
        "request_id",
        "sampling",
        "shown",
        "stop_token_id",
    )

    def __init__(
        self,
        index: int,
        request_id: str,
        *,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        detokenizer: Detokenizer,
        stop_strings: Sequence[str],
        counts_prompt: bool,
        includes_stop: bool = False,
        discards_output: bool = False,
        reader: MessageReader | None = None,
    ) -> None:
        """Expect the output of a sequence.

        Args:
            index: see the attributes, as all that is not below.
            request_id: see the attributes.
            prompt_token_ids: see the attributes.
            sampling: see the attributes.
            detokenizer: fresh.
            stop_strings: end the text; looked for behind the first `sampling.min_tokens` tokens.
            counts_prompt: see the attributes.
            includes_stop: a stop string, or the text of a token that stops, is part of the text.
            discards_output: nothing was asked for but the prompt's logprobs.
            reader: tells reasoning and tool calls from content; None: all is content.
        """
        self.index = index
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.sampling = sampling
        self.counts_prompt = counts_prompt
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.num_cached_tokens: int | None = None
        self.finish_reason: str | None = None
        self.shown = ""
        self._detokenizer = detokenizer
        self.stop_token_id: int | None = None
        self.prompt_logprobs = LogprobBuffer()
        self._includes_stop = includes_stop
        self._discards_output = discards_output
        self._reader = reader
        self._matcher = None
        if stop_strings:
            self._matcher = StopStringMatcher(stop_strings, is_included=includes_stop)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the output, or None."""
        return None if self._matcher is None else self._matcher.matched

    def feed(self, delta: TokenDelta) -> Piece:
        """Take new tokens; return the text that is certain now, and the tokens that count.

        Sets `finish_reason` when the output ends: at a stop string (tokens after it are dropped,
        and the caller should abort the sequence), or with the delta's result.

        Raises:
            EngineError: the engine aborted a sequence that nobody here gave up.
        """
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs.append(delta.prompt_logprobs)
        if self._discards_output and delta.token_ids:
            self.finish_reason = "length"
            return Piece("", (), None)
        message: MessageDelta | None = None
        if self._reader is None:
            text, token_ids = self._feed(delta.token_ids, delta.result)
        else:
            message, token_ids = self._read(self._reader, delta)
            text = message.content
        logprobs = delta.logprobs
        if logprobs is not None and len(token_ids) < len(delta.token_ids):
            logprobs = logprobs.head(len(token_ids))
        if message is not None and not message.reasoning and not message.tool_calls:
            message = None
        return Piece(text, token_ids, logprobs, message)

    def _read(self, reader: MessageReader, delta: TokenDelta) -> tuple[MessageDelta, Sequence[int]]:
        # One by one: the usage counts those that are reasoning, and those up to the last call.
        token_ids, count = delta.token_ids, 0
        while self.finish_reason is None and count < max(1, len(token_ids)):
            is_last = count + 1 >= len(token_ids)
            was_reasoning = reader.is_reasoning
            text, kept = self._feed(token_ids[count : count + 1], delta.result if is_last else None)
            reader.feed(text)
            if was_reasoning or reader.is_reasoning:
                self.num_reasoning_tokens += len(kept)
            if reader.is_full:
                self.finish_reason = "stop"
            count += 1
        if self.finish_reason is not None:
            reader.finish()
            if self.finish_reason == "stop" and reader.num_calls:
                self.finish_reason = "tool_calls"
        return reader.take(), token_ids[:count]

    def _feed(
        self, token_ids: Sequence[int], result: GenerateResult | None
    ) -> tuple[str, Sequence[int]]:
        if result is None:
            if self._matcher is None:
                self.num_tokens += len(token_ids)
                return self._detokenizer.feed(token_ids), token_ids
            return self._feed_until_stop_string(self._matcher, token_ids)
        return self._finish(token_ids, result.finish_reason, result.num_cached_tokens)

    def _finish(
        self, token_ids: Sequence[int], reason: FinishReason, num_cached_tokens: int
    ) -> tuple[str, Sequence[int]]:
        if reason is FinishReason.ABORT:
            raise EngineError("the engine aborted the request; send it again")
        self.num_cached_tokens = num_cached_tokens
        # A token that stops the output is one of its tokens, but not part of its text.
        ends_with_stop_token = reason is FinishReason.STOP and len(token_ids) > 0
        if ends_with_stop_token:
            self.stop_token_id = token_ids[-1]
        is_hidden = ends_with_stop_token and not self._includes_stop
        visible = token_ids[:-1] if is_hidden else token_ids
        if self._matcher is None:
            text = self._detokenizer.feed(visible) + self._detokenizer.flush()
        else:
            text, kept = self._feed_until_stop_string(self._matcher, visible)
            if self.finish_reason is not None:
                return text, kept
            self.num_tokens -= len(visible)
            text += self._matcher.feed(self._detokenizer.flush()) + self._matcher.flush()
            if self._matcher.matched is not None:
                reason = FinishReason.STOP
        self.num_tokens += len(token_ids)
        self.finish_reason = "length" if reason is FinishReason.LENGTH else "stop"
        return text, token_ids

    def _feed_until_stop_string(
        self, matcher: StopStringMatcher, token_ids: Sequence[int]
    ) -> tuple[str, Sequence[int]]:
        # One by one: the usage counts the tokens up to the one that completes a stop string.
        text = ""
        for count, token_id in enumerate(token_ids, start=1):
            piece = self._detokenizer.feed((token_id,))
            if self.num_tokens + count <= self.sampling.min_tokens:
                text += piece
                continue
            text += matcher.feed(piece)
            if matcher.matched is not None:
                self.num_tokens += count
                self.finish_reason = "stop"
                return text, token_ids[:count]
        self.num_tokens += len(token_ids)
        return text, token_ids
