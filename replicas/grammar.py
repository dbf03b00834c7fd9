"""Grammars that an output must follow, compiled and run by llguidance.

The only module that imports llguidance; knows neither requests nor devices. A grammar is a text: a
Lark grammar in llguidance's dialect, or what `grammar_of_*` return. A vocabulary is what a model's
tokens stand for, a matcher the state of one output. Outputs of one grammar share its lexer, which
works each of its states out once. Invariants: after each token a matcher either allows some token,
or `is_complete`, or has an `error`; and what it allows depends on no other output.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
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

_MAX_COMPILED = 32
_MAX_SHARED_MASKS = 1 << 14
"""After so many a grammar is compiled anew: a lexer only grows, up to a limit."""

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
        self._compiled: OrderedDict[str, _CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

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
        """Start an output. A grammar that was not seen lately is compiled.

        That takes 1-10 ms for most and seconds for the worst; the interpreter is let go.

        Raises:
            BadGrammar: it is malformed, or too large.
        """
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None and compiled.num_masks < _MAX_SHARED_MASKS:
                self._compiled.move_to_end(grammar)
                return Matcher(compiled)
        compiled = _CompiledGrammar(self._tokenizer, grammar)
        with self._lock:
            self._compiled[grammar] = compiled
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return Matcher(compiled)


class _CompiledGrammar:
    """A grammar before its first token, with the lexer that its outputs share.

    Attributes:
        num_masks: how many its outputs have had, about.
    """

    def __init__(self, tokenizer: llguidance.LLTokenizer, grammar: str) -> None:
        self.num_masks = 0
        self._tokenizer = tokenizer
        self._grammar = grammar
        self._start = self.compile()

    def start(self) -> llguidance.LLMatcher:
        """An output's parser, over the shared lexer, which it locks while it uses it."""
        return self._start.deep_copy()

    def compile(self) -> llguidance.LLMatcher:
        """An output's parser over a lexer of its own.

        Raises:
            BadGrammar: see `Vocabulary.matcher`.
        """
        parser = llguidance.LLMatcher(self._tokenizer, self._grammar, log_level=0, limits=_LIMITS)
        if parser.is_error():
            raise BadGrammar(_first_lines(parser.get_error()))
        return parser


class Matcher:
    """Where in its grammar one output is; used by one thread at a time."""

    def __init__(self, grammar: _CompiledGrammar) -> None:
        self._grammar = grammar
        self._parser = grammar.start()
        self._is_sharing = True
        self._consumed: list[int] = []
        self._error = ""
        self._spent_s = -_ALLOWANCE_S

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow."""
        return self._parser.is_stopped()

    @property
    def is_accepting(self) -> bool:
        """Whether the output may end here."""
        return self._parser.is_accepting()

    @property
    def error(self) -> str:
        """Why the output cannot go on, or nothing."""
        return self._error or _first_lines(self._parser.get_error())

    def fill_mask(self, words: npt.NDArray[np.int32]) -> None:
        """Set a bit for each token that may come next, 32 to a word, the lowest first.

        Sets `error` where that takes too much time or memory: the bits are then meaningless.
        """
        self.fill_mask_at(words.ctypes.data, words.nbytes, time.thread_time())

    def fill_mask_at(self, address: int, num_bytes: int, begin_s: float) -> float:
        """As `fill_mask`, for memory at an address; for `fill_masks`.

        Args:
            address: of the words.
            num_bytes: of the words.
            begin_s: the thread's time now.

        Returns:
            The thread's time afterwards.
        """
        self._grammar.num_masks += 1
        self._parser.unsafe_compute_mask_ptr(address, num_bytes)
        if self._is_sharing and self._parser.is_error():
            # Other outputs may have brought the lexer to its limit.
            self._is_sharing = False
            self._parser = self._grammar.compile()
            if self._parser.consume_tokens(self._consumed):
                self._parser.unsafe_compute_mask_ptr(address, num_bytes)
        end_s = time.thread_time()  # a crowded machine is not the grammar's fault
        self._spent_s = max(-_ALLOWANCE_S, self._spent_s + end_s - begin_s - SLOW_MASK_S)
        if self._spent_s > 0:
            self._error = "finding out which tokens it allows takes too much time"
        return end_s

    def consume(self, token_id: int) -> bool:
        """Take the output's next token; False: it is not allowed, or there was an error before."""
        if self._error or not self._parser.consume_token(token_id):
            return False
        self._consumed.append(token_id)
        return True

    def replay(self, token_ids: Iterable[int]) -> bool:
        """Take tokens of an output that began elsewhere."""
        return all(self.consume(token_id) for token_id in token_ids)


def fill_masks(matchers: Iterable[Matcher], masks: npt.NDArray[np.int32]) -> None:
    """`Matcher.fill_mask` for each row of [N, words]; looks at clock and array once for all."""
    address, num_bytes = masks.ctypes.data, masks.strides[0]
    now_s = time.thread_time()
    for matcher in matchers:
        now_s = matcher.fill_mask_at(address, num_bytes, now_s)
        address += num_bytes


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
