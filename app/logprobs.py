"""Log-probabilities as clients see them: OpenAI's two shapes, and vLLM's for prompts.

Knows how tokens are named. Pure. Invariant: what a stream's chunks hold, one after the other, is
what the whole response holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from app.tokenizer import Tokenizer
from replicas.wire import TokenLogprob

_LEAST = -9999.0
"""In place of minus infinity, which JSON does not have; as vLLM writes it."""

Entries = Iterable[TokenLogprob | None]
"""One per token; None for the first of a prompt, which nothing precedes."""


class LogprobFormat(Protocol):
    """Renders log-probabilities of consecutive tokens of one choice."""

    def render(self, token_ids: Sequence[int], entries: Entries) -> dict[str, Any]:
        """Return the JSON of the tokens that follow those of the last call."""
        ...


class TokenNames:
    """What tokens are called in a response."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        """Name by text, or with `as_ids` by `token_id:N`, which no two tokens share."""
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token_id: int) -> str:
        """The token's name."""
        if self._as_ids:
            return f"token_id:{token_id}"
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def raw(self, token_id: int) -> list[int]:
        """The bytes that it stands for."""
        return list(self._tokenizer.token_bytes(token_id))

    def text(self, token_id: int) -> str:
        """Its text, whatever it is called."""
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")


class ChatLogprobs:
    """The shape of chat completions."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names

    def render(self, token_ids: Sequence[int], entries: Entries) -> dict[str, Any]:
        """Return `content`: an object for each token."""
        content = [
            {
                **self._token(token_id, entry.logprob),
                "top_logprobs": [self._token(other, value) for other, value in entry.top],
            }
            for token_id, entry in zip(token_ids, entries, strict=True)
            if entry is not None
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        name, raw = self._names.name(token_id), self._names.raw(token_id)
        return {"token": name, "logprob": max(logprob, _LEAST), "bytes": raw}


class CompletionLogprobs:
    """The shape of completions: four lists. One object per choice, for the offsets."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._offset = 0

    def render(self, token_ids: Sequence[int], entries: Entries) -> dict[str, Any]:
        """Return the lists; a token's alternatives hold itself too, as OpenAI's do."""
        names = self._names
        shape: dict[str, list[Any]] = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        for token_id, entry in zip(token_ids, entries, strict=True):
            shape["tokens"].append(names.name(token_id))
            shape["text_offset"].append(self._offset)
            self._offset += len(names.text(token_id))
            logprob = None if entry is None else max(entry.logprob, _LEAST)
            shape["token_logprobs"].append(logprob)
            top: dict[str, float] | None = None
            if entry is not None:
                # The likelier of two with the same name stands for both.
                alternatives = [*entry.top, (token_id, entry.logprob)]
                top = {}
                for other, value in alternatives:
                    top.setdefault(names.name(other), max(value, _LEAST))
            shape["top_logprobs"].append(top)
        return shape


def prompt_logprobs(
    names: TokenNames, token_ids: Sequence[int], entries: Entries
) -> list[dict[str, Any] | None]:
    """Return vLLM's shape for prompts: an object by token id for each token but the first.

    `rank` is null where the token is not among the alternatives: it is not computed.
    """
    rendered: list[dict[str, Any] | None] = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        if entry is None:
            rendered.append(None)
            continue
        by_id: dict[str, Any] = {}
        for rank, (other, value) in enumerate([*entry.top, (token_id, entry.logprob)], start=1):
            by_id.setdefault(
                str(other),
                {
                    "logprob": max(value, _LEAST),
                    "rank": rank if rank <= len(entry.top) else None,
                    "decoded_token": names.text(other),
                },
            )
        rendered.append(by_id)
    return rendered
