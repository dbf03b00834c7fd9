"""One choice of a response: tokens in, text out, until something ends it.

Synchronous and free of I/O. Invariant: text, token count and finish reason depend on the token
sequence alone, not on how it was cut into deltas.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.detokenizer import Detokenizer
from app.stop_strings import StopStringMatcher
from replicas.errors import EngineError
from replicas.wire import FinishReason, SamplingParams, TokenDelta


class Choice:
    """The state of one output sequence.

    Attributes:
        index: position among the response's choices.
        request_id: the engine's name for the sequence.
        prompt_token_ids: its prompt.
        sampling: its sampling parameters.
        counts_prompt: whether its prompt counts in the usage: once for all choices of a prompt.
        num_tokens: tokens that belong to the output so far.
        num_cached_tokens: prompt tokens found in the prefix cache; None until the engine says so
            with its last delta, which never comes after a stop string.
        finish_reason: "stop" or "length" once the output has ended.
    """

    __slots__ = (
        "_detokenizer",
        "_matcher",
        "counts_prompt",
        "finish_reason",
        "index",
        "num_cached_tokens",
        "num_tokens",
        "prompt_token_ids",
        "request_id",
        "sampling",
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
    ) -> None:
        self.index = index
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.sampling = sampling
        self.counts_prompt = counts_prompt
        self.num_tokens = 0
        self.num_cached_tokens: int | None = None
        self.finish_reason: str | None = None
        self._detokenizer = detokenizer
        self._matcher = StopStringMatcher(stop_strings) if stop_strings else None

    def feed(self, delta: TokenDelta) -> tuple[str, Sequence[int]]:
        """Take new tokens; return the text that is certain now, and the tokens that count.

        Sets `finish_reason` when the output ends: at a stop string (tokens after it are dropped,
        and the caller should abort the sequence), or with the delta's result.

        Raises:
            EngineError: the engine aborted a sequence that nobody here gave up.
        """
        token_ids = delta.token_ids
        if delta.result is None:
            if self._matcher is None:
                self.num_tokens += len(token_ids)
                return self._detokenizer.feed(token_ids), token_ids
            return self._feed_until_stop_string(self._matcher, token_ids)
        return self._finish(token_ids, delta.result.finish_reason, delta.result.num_cached_tokens)

    def _finish(
        self, token_ids: Sequence[int], reason: FinishReason, num_cached_tokens: int
    ) -> tuple[str, Sequence[int]]:
        if reason is FinishReason.ABORT:
            raise EngineError("the engine aborted the request; send it again")
        self.num_cached_tokens = num_cached_tokens
        # A token that stops the output is one of its tokens, but not part of its text.
        ends_with_stop_token = reason is FinishReason.STOP and len(token_ids) > 0
        visible = token_ids[:-1] if ends_with_stop_token else token_ids
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
        self.finish_reason = "stop" if reason is FinishReason.STOP else "length"
        return text, token_ids

    def _feed_until_stop_string(
        self, matcher: StopStringMatcher, token_ids: Sequence[int]
    ) -> tuple[str, Sequence[int]]:
        # One by one: the usage counts the tokens up to the one that completes a stop string.
        text = ""
        for count, token_id in enumerate(token_ids, start=1):
            text += matcher.feed(self._detokenizer.feed((token_id,)))
            if matcher.matched is not None:
                self.num_tokens += count
                self.finish_reason = "stop"
                return text, token_ids[:count]
        self.num_tokens += len(token_ids)
        return text, token_ids
