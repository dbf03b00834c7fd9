"""Grammars that an output must follow, compiled and run by llguidance.

The only module that imports llguidance; knows neither requests nor devices. A grammar is a text: a
Lark grammar in llguidance's dialect, or what `grammar_of_*` return. A vocabulary is what a model's
tokens stand for, a matcher the state of one output. Invariant: after each token a matcher either
allows some token, or `is_complete`, or has an `error`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import llguidance
import numpy as np
import numpy.typing as npt

SLOW_MASK_S = 0.005
"""What a token may cost a grammar on average, seconds of one thread. Ordinary ones take a tenth."""
_ALLOWANCE_S = 0.5
"""What it may cost beyond that, in all: lexers are built as the text goes."""

_LIMITS: Final = llguidance.LLParserLimits(verbose_errors=False)


class BadGrammar(ValueError):
    """A grammar that cannot be compiled; the message says where and why."""


class NoVocabulary(ValueError):
    """A model directory whose tokenizer llguidance cannot read."""


class Vocabulary:
    """A model's tokens as grammars see them; safe to use from threads."""

    def __init__(
        self, tokenizer_json: str, *, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        """Read a tokenizer; takes 0.4 s for 49,152 tokens and 2 s for 152,000.

        Args:
            tokenizer_json: content of tokenizer.json.
            vocab_size: of the model, which may have more tokens than the tokenizer.
            eos_token_ids: allowed where the text may end, and nowhere else.

        Raises:
            NoVocabulary: llguidance does not know this kind of tokenizer.
        """
        self.vocab_size = vocab_size
        try:
            self._tokenizer = llguidance.LLTokenizer(
                tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None
            )
        except Exception as error:  # the library raises what its parts raise
            raise NoVocabulary(f"structured output cannot use the tokenizer: {error}") from error

    @classmethod
    def load(cls, directory: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
        """Read the tokenizer of a model directory.

        Raises:
            NoVocabulary: there is none, or of an unknown kind.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise NoVocabulary(f"structured output needs a tokenizer, but {path} is not there")
        text = path.read_text(encoding="utf-8")
        return cls(text, vocab_size=vocab_size, eos_token_ids=eos_token_ids)

    @property
    def num_words(self) -> int:
        """Words of a mask."""
        return -(-self.vocab_size // 32)

    def special_tokens(self) -> dict[str, int]:
        """Ids of the tokens that no text contains, by name: a grammar must ask for them."""
        names: dict[str, int] = {}
        for token_id in range(self.vocab_size):
            if self._tokenizer.is_special_token(token_id):
                name = self._tokenizer.decode_str([token_id])
                if name and name != f"<[{token_id}]>":  # what fills the model's vocabulary up
                    names[name] = token_id
        return names

    def matcher(self, grammar: str) -> Matcher:
        """Compile a grammar: 1 ms for most, seconds for the worst; the interpreter is let go.

        Raises:
            BadGrammar: it is malformed, or too large.
        """
        compiled = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if compiled.is_error():
            raise BadGrammar(_first_lines(compiled.get_error()))
        return Matcher(compiled)


class Matcher:
    """Where in its grammar one output is; used by one thread at a time."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher
        self._error = ""
        self._spent_s = -_ALLOWANCE_S

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow."""
        return self._matcher.is_stopped()

    @property
    def is_accepting(self) -> bool:
        """Whether the output may end here."""
        return self._matcher.is_accepting()

    @property
    def error(self) -> str:
        """Why the output cannot go on, or nothing."""
        return self._error or _first_lines(self._matcher.get_error())

    def fill_mask(self, words: npt.NDArray[np.int32]) -> None:
        """Set a bit for each token that may come next, 32 to a word, the lowest first.

        Sets `error` where that takes too much time or memory: the bits are then meaningless.
        """
        begin_s = time.thread_time()  # a crowded machine is not the grammar's fault
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.size * words.itemsize)
        self._spent_s = max(
            -_ALLOWANCE_S, self._spent_s + time.thread_time() - begin_s - SLOW_MASK_S
        )
        if self._spent_s > 0:
            self._error = "finding out which tokens it allows takes too much time"

    def consume(self, token_id: int) -> bool:
        """Take the output's next token; False: it is not allowed, or there was an error before."""
        return not self._error and self._matcher.consume_token(token_id)

    def replay(self, token_ids: Iterable[int]) -> bool:
        """Take tokens of an output that began elsewhere."""
        return all(self.consume(token_id) for token_id in token_ids)


def grammar_of_json_schema(schema: Mapping[str, Any]) -> str:
    """The grammar of JSON texts that a schema admits."""
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))


def grammar_of_regex(pattern: str) -> str:
    """The grammar of texts that a regular expression matches as a whole."""
    return llguidance.LLMatcher.grammar_from_regex(pattern)


def grammar_of_choices(choices: Iterable[str]) -> str:
    """The grammar of some given texts."""
    return f"start: {' | '.join(quoted(choice) for choice in choices)}\n"


def quoted(text: str) -> str:
    """A text as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def _first_lines(message: str) -> str:
    """What a client should see of an error: not the position in text of ours that wraps its own."""
    if message.startswith("NoExtension"):
        return "no text is what it asks for"
    text = re.sub(r"^at \d+\(\d+\): |<non-verbose/>", "", message)
    text = " ".join(text.split())
    return text if len(text) <= 300 else f"{text[:297]}..."
