"""Texts of requests become token ids, within the model's limits.

Knows no endpoint and no replica. Invariant: ids that leave here exist, and are no more than a
request may have.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.openai_schema import CompletionRequest, GenerationParams
from app.tokenizer import Tokenizer
from replicas.errors import ContextLengthExceeded, InvalidRequest
from replicas.wire import MAX_BAD_WORD_TOKENS, ModelInfo

_MAX_TRUNCATED = 16
"""Times the context that a prompt may have before it is cut."""


class Prompts:
    """Encodes for one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def encode(
        self, text: str | Sequence[int], info: ModelInfo, *, add_special_tokens: bool
    ) -> Sequence[int]:
        """Encode a text; token ids are checked and returned.

        Raises:
            ServingError: there are more tokens than a request may have, or one is out of range.
        """
        if isinstance(text, str):
            return await self._tokenizer.encode_within(
                text,
                max_tokens=info.max_request_tokens,
                add_special_tokens=add_special_tokens,
            )
        if len(text) > info.max_request_tokens:
            raise ContextLengthExceeded(
                f"{len(text)} tokens, at most {info.max_request_tokens} are possible"
            )
        for token_id in text:
            check_token_id(token_id, info, param="prompt")
        return text

    async def decode(self, token_ids: Sequence[int], info: ModelInfo) -> str:
        """Decode ids, special tokens included.

        Raises:
            ServingError: an id is out of range, or there are more than a request may have.
        """
        await self.encode(token_ids, info, add_special_tokens=False)
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's own names of tokens."""
        return self._tokenizer.token_strings(token_ids)

    async def encode_prompt(
        self, prompt: str | tuple[int, ...], request: CompletionRequest, info: ModelInfo
    ) -> Sequence[int]:
        """Encode the prompt of a completion, leaving room for an answer.

        Raises:
            ServingError: it is empty, too long, or has ids that do not exist.
        """
        if isinstance(prompt, str):
            token_ids = await self.encode_text(
                prompt, request, info, add_special_tokens=request.add_special_tokens
            )
            if not token_ids:
                raise InvalidRequest(
                    "the prompt is empty; it needs at least one token", param="prompt"
                )
            return token_ids
        max_tokens = info.max_request_tokens - 1
        kept = _truncated(prompt, request, max_tokens)
        if len(kept) > max_tokens:
            raise ContextLengthExceeded(
                f"the prompt has {len(kept)} tokens; at most {max_tokens} leave room for an answer",
                param="prompt",
            )
        check_token_id(max(kept), info, param="prompt")
        return kept

    async def encode_text(
        self, text: str, request: GenerationParams, info: ModelInfo, *, add_special_tokens: bool
    ) -> Sequence[int]:
        """Encode a text, cut down to what the request allows of it.

        Raises:
            ServingError: it is too long.
        """
        max_tokens = info.max_request_tokens - 1
        is_cut = request.truncate_prompt_tokens is not None
        token_ids = await self._tokenizer.encode_within(
            text,
            # What is cut off may be long, but not without a limit.
            max_tokens=_MAX_TRUNCATED * max_tokens if is_cut else max_tokens,
            add_special_tokens=add_special_tokens,
        )
        return _truncated(token_ids, request, max_tokens)

    def bad_words(self, request: GenerationParams) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of the bad words, as they begin a word and as they do not.

        Raises:
            InvalidRequest: one has too many tokens.
        """
        sequences: dict[tuple[int, ...], None] = {}
        for word in request.bad_words:
            for text in (word.lstrip(), " " + word.lstrip()):
                token_ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
                if not 1 <= len(token_ids) <= MAX_BAD_WORD_TOKENS:
                    raise InvalidRequest(
                        f"bad_words: {text!r} has {len(token_ids)} tokens; at most "
                        f"{MAX_BAD_WORD_TOKENS} are possible",
                        param="bad_words",
                    )
                sequences[token_ids] = None
        return tuple(sequences)


def _truncated(
    token_ids: Sequence[int], request: GenerationParams, max_tokens: int
) -> Sequence[int]:
    """Cut a prompt down to what the request allows of it."""
    count = request.truncate_prompt_tokens
    if count is None:
        return token_ids
    count = max_tokens if count == -1 else count
    if len(token_ids) <= count:
        return token_ids
    return token_ids[:count] if request.truncation_side == "right" else token_ids[-count:]


def check_token_id(token_id: int, info: ModelInfo, *, param: str) -> None:
    """Check that an id exists.

    Raises:
        InvalidRequest: it does not; `param` is named.
    """
    if token_id >= info.vocab_size:
        raise InvalidRequest(
            f"token id {token_id} is out of range: the vocabulary has ids 0 to "
            f"{info.vocab_size - 1}",
            param=param,
        )
