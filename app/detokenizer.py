"""Turns token ids into text as they arrive, never cutting a character in two.

One object per output sequence. Invariant: the pieces, joined and flushed, are what the tokenizer
decodes from all ids at once (where their bytes are valid UTF-8), however the ids were cut into
deltas.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Protocol

import tokenizers

_REPLACEMENT = "\ufffd"
_WINDOW_LIMIT = 16


class Detokenizer(Protocol):
    """Incremental decoding of one sequence."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text that these ids complete; an unfinished character waits."""
        ...

    def flush(self) -> str:
        """Return what still waits, an unfinished character as U+FFFD."""
        ...


class ByteLevelDetokenizer:
    """For byte-level vocabularies (GPT-2, Llama 3, Qwen, SmolLM2): every id is a fixed byte string.

    One dictionary look-up per token and an incremental UTF-8 decoder: 0.4 us a token.
    """

    def __init__(self, token_bytes: Mapping[int, bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text that these ids complete."""
        get = self._token_bytes.get
        return self._decoder.decode(b"".join([get(token_id, b"") for token_id in token_ids]))

    def flush(self) -> str:
        """Return an unfinished character as U+FFFD."""
        return self._decoder.decode(b"", final=True)


class WindowedDetokenizer:
    """For any other vocabulary (SentencePiece): decode a short window of ids twice and subtract.

    A token's text can depend on its left neighbours (a word mark that becomes a space only inside
    the text, bytes that join into a character), so the new text is decode(window + new) minus
    decode(window), where the window begins at the last place where the text was whole. About
    3 us a token. Byte tokens that never form a character come out as U+FFFD, a few tokens late.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, skipped_ids: Container[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped_ids = skipped_ids
        self._window: list[int] = []
        self._num_emitted_ids = 0
        self._emitted = ""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text that these ids complete."""
        skipped = self._skipped_ids
        return "".join([self._feed_one(i) for i in token_ids if i not in skipped])

    def flush(self) -> str:
        """Return an unfinished character as U+FFFD."""
        return self._advance(self._decode(self._window))

    def _feed_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        # Bytes that never become a character must not hold the rest of the text back for ever.
        unfinished = text.endswith(_REPLACEMENT) and not self._is_stuck()
        return "" if unfinished else self._advance(text)

    def _is_stuck(self) -> bool:
        return len(self._window) - self._num_emitted_ids > _WINDOW_LIMIT

    def _advance(self, text: str) -> str:
        piece = text[len(self._emitted) :]
        if piece:
            # The ids that were new become the left context of the next ones.
            self._window = self._window[self._num_emitted_ids :]
            self._emitted = self._decode(self._window)
        self._num_emitted_ids = len(self._window)
        return piece

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def byte_level_table(tokenizer: tokenizers.Tokenizer) -> dict[int, bytes] | None:
    """Map every id to its bytes, or return None where the vocabulary is not byte-level.

    Follows the ByteLevel decoder of `tokenizers`: a token whose characters all stand for bytes is
    those bytes, any other (an added token with a space in it) is its own UTF-8.
    """
    if tokenizer.decoder is None:
        return None
    decoder: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    stages: list[dict[str, Any]] = decoder.get("decoders", [decoder])
    if [stage.get("type") for stage in stages] != ["ByteLevel"]:
        return None
    byte_of = {char: byte for byte, char in _byte_alphabet()}
    table: dict[int, bytes] = {}
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        try:
            table[token_id] = bytes([byte_of[char] for char in token])
        except KeyError:
            table[token_id] = token.encode()
    return table


def _byte_alphabet() -> Iterable[tuple[int, str]]:
    """Pairs (byte, character) of GPT-2's printable alphabet for bytes.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, for the
    characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    yield from ((byte, chr(byte)) for byte in sorted(printable))
    yield from ((byte, chr(0x100 + i)) for i, byte in enumerate(others))
