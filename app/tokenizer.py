"""The tokenizer of a model directory: text to ids, chats to prompts, ids back to text.

Reads `tokenizer.json` with the `tokenizers` library and the chat template with jinja2 directly:
importing transformers for the same result costs seconds of every replica's start. A test holds
both against `transformers.AutoTokenizer`. Immutable after loading, safe to use from threads.
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from app.chat import ChatTemplate
from app.detokenizer import (
    ByteLevelDetokenizer,
    Detokenizer,
    WindowedDetokenizer,
    byte_level_table,
)
from app.errors import ConfigError
from app.json_types import is_list, is_object
from replicas.errors import ContextLengthExceeded

# Texts up to this many characters are encoded on the event loop (about 1 ms at most): the hop to
# a thread costs more than that under load.
_INLINE_CHARS = 2_000

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class Tokenizer:
    """Encoding and decoding for one model.

    Attributes:
        chat_template: how a chat becomes a prompt, or None where the model has no template.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, *, chat_template: ChatTemplate | None
    ) -> None:
        self.chat_template = chat_template
        self._tokenizer = tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        self._longest_token_chars = max(map(len, vocab))
        self._all_bytes = byte_level_table(tokenizer)
        self._text_bytes = self._all_bytes and {
            i: value for i, value in self._all_bytes.items() if i not in self._special_ids
        }

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Load the tokenizer and the chat template of a model directory.

        Raises:
            ConfigError: a file is missing or malformed; the message names it.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"model: {directory} has no tokenizer.json")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"model: cannot read {path}: {error}") from error
        return cls(tokenizer, chat_template=_load_chat_template(directory))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encode a text. O(length); blocks for about 1 s per million characters."""
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return encoding.ids

    async def encode_within(
        self, text: str, *, max_tokens: int, add_special_tokens: bool
    ) -> list[int]:
        """Encode a text of at most `max_tokens` tokens without stalling the event loop.

        Raises:
            ContextLengthExceeded: the text has more tokens than that. A text that cannot fit even
                at one longest token after the other is refused without being encoded.
        """
        if len(text) > max_tokens * self._longest_token_chars:
            raise ContextLengthExceeded(
                f"the prompt has {len(text)} characters, more than {max_tokens} tokens can hold; "
                "shorten it"
            )
        if len(text) <= _INLINE_CHARS:
            token_ids = self.encode(text, add_special_tokens=add_special_tokens)
        else:
            token_ids = await asyncio.to_thread(
                self.encode, text, add_special_tokens=add_special_tokens
            )
        if len(token_ids) > max_tokens:
            raise ContextLengthExceeded(
                f"the prompt has {len(token_ids)} tokens; at most {max_tokens} leave room for an "
                "answer; shorten it"
            )
        return token_ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Decode ids in one go."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for, a special token as its name; alone they may be no
        text."""
        if self._all_bytes is not None:
            return self._all_bytes.get(token_id, b"")
        piece: str | None = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if match := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace("\u2581", " ").encode()

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's own names of tokens."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def showing(self, texts: Collection[str]) -> Tokenizer:
        """Return this tokenizer with some special tokens never skipped: a parser looks for them."""
        token_ids = {i for text in texts if (i := self._tokenizer.token_to_id(text)) is not None}
        shown = token_ids & self._special_ids
        if not shown:
            return self
        view = copy.copy(self)
        view._special_ids = self._special_ids - shown
        if self._all_bytes is not None and self._text_bytes is not None:
            view._text_bytes = {**self._text_bytes, **{i: self._all_bytes[i] for i in shown}}
        return view

    def detokenizer(self, *, skip_special_tokens: bool) -> Detokenizer:
        """Return a fresh incremental decoder for one output sequence."""
        table = self._text_bytes if skip_special_tokens else self._all_bytes
        if table is not None:
            return ByteLevelDetokenizer(table)
        skipped: frozenset[int] = self._special_ids if skip_special_tokens else frozenset()
        return WindowedDetokenizer(self._tokenizer, skipped)


def _load_chat_template(directory: Path) -> ChatTemplate | None:
    config = _read_json(directory / "tokenizer_config.json")
    source: Any = config.get("chat_template")
    tool_source: str | None = None
    jinja_path = directory / "chat_template.jinja"
    if jinja_path.is_file():
        source = jinja_path.read_text(encoding="utf-8")
    if is_list(source):  # several named templates: [{"name": ..., "template": ...}]
        named = {entry["name"]: entry["template"] for entry in source}
        source, tool_source = named.get("default"), named.get("tool_use")
    if (tool_path := directory / "additional_chat_templates" / "tool_use.jinja").is_file():
        tool_source = tool_path.read_text(encoding="utf-8")
    if source is None:
        return None
    special_tokens = {
        name: token for name in _NAMED_TOKENS if (token := _token_text(config.get(name)))
    }
    try:
        return ChatTemplate(source, special_tokens, tool_source=tool_source)
    except ValueError as error:
        raise ConfigError(f"model: {directory} has a malformed chat template: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"model: cannot read {path}: {error}") from error
    if not is_object(content):
        raise ConfigError(f"model: {path} must hold a JSON object")
    return content


def _token_text(token: Any) -> str | None:
    """A special token is written as its text or as an object with `content`."""
    if is_object(token):
        token = token.get("content")
    return token if isinstance(token, str) else None
