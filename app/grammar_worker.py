"""Tries out clients' grammars: python -m app.grammar_worker DIRECTORY VOCAB_SIZE [EOS_ID...]

Reads a JSON line per grammar, forks, and the child compiles it and works out the masks of a short
output, under limits of time and memory that the kernel enforces: nothing that a client writes can
hold anything up for longer. The limit is processor time, so that the verdict does not depend on
what else the machine does. A forked child has the tokenizer at no cost.

    -> {"id": 1, "grammar": "..."}
    <- {"special": {"<|im_end|>": 2}}              once, at the start
    <- {"id": 1, "error": null}

Invariant: one thread, so that forking is safe.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from replicas.grammar import BadGrammar, Vocabulary

MAX_CPU_S = 0.25
"""Processor time of one grammar. Ordinary ones take a hundredth."""
MAX_BYTES = 1 << 30
"""Memory that a child may have beyond what it is born with."""
MAX_CHILDREN = 4
NUM_TRIED_TOKENS = 32

_NO_TEXT = "no text is what it asks for"
_TOO_SLOW = f"it is too complex: it takes more than {MAX_CPU_S} s to compile and to try out"
_TOO_LARGE = "it is too complex: it takes too much memory"


def try_grammar(vocabulary: Vocabulary, grammar: str) -> str | None:
    """Compile a grammar and follow it for a few tokens; return what is wrong, or None."""
    try:
        matcher = vocabulary.matcher(grammar)
    except BadGrammar as error:
        return str(error)
    rng = np.random.default_rng(0)
    words = np.zeros(vocabulary.num_words, np.int32)
    for _ in range(NUM_TRIED_TOKENS):
        matcher.fill_mask(words)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        if matcher.error or not len(allowed):
            return matcher.error or _NO_TEXT
        if not matcher.consume(int(rng.choice(allowed))) or matcher.is_complete:
            return matcher.error or None
    return None


class Worker:
    """Forks a child for each grammar, and says what became of it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._waiting: list[dict[str, Any]] = []
        self._children: dict[int, int] = {}

    def run(self) -> None:
        """Answer until the input ends."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing)
        signal.signal(signal.SIGCHLD, _note_child)
        selector = selectors.DefaultSelector()
        selector.register(0, selectors.EVENT_READ)
        selector.register(reading, selectors.EVENT_READ)
        pending = b""
        while True:
            for key, _ in selector.select():
                data = os.read(key.fd, 1 << 16)
                if key.fd == reading:
                    self._reap()
                elif not data:
                    return
                else:
                    *lines, pending = (pending + data).split(b"\n")
                    self._waiting += [json.loads(line) for line in lines]
            while self._waiting and len(self._children) < MAX_CHILDREN:
                self._start(self._waiting.pop(0))

    def _start(self, order: dict[str, Any]) -> None:
        pid = os.fork()
        if pid:
            self._children[pid] = order["id"]
            return
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            _limit_itself()
            write_line(
                {"id": order["id"], "error": try_grammar(self._vocabulary, order["grammar"])}
            )
            status = 0
        finally:
            os._exit(status)

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            order_id = self._children.pop(pid)
            if status:
                is_slow = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
                write_line({"id": order_id, "error": _TOO_SLOW if is_slow else _TOO_LARGE})


def _note_child(signal_number: int, frame: FrameType | None) -> None:
    """Have a child's end wake the selector: an ignored signal would not."""
    del signal_number, frame


def _limit_itself() -> None:
    """Have the kernel end this process when it exceeds its time, or refuse it memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + MAX_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # A parent may have had the signal ignored or blocked, which a new program inherits.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)


def write_line(message: dict[str, Any]) -> None:
    """Answer. One write, short enough to be atomic: children answer beside each other."""
    os.write(1, json.dumps(message).encode() + b"\n")


def main(arguments: list[str]) -> None:
    """Run a worker for a model directory."""
    directory, vocab_size, *eos_token_ids = arguments
    vocabulary = Vocabulary.load(
        Path(directory), vocab_size=int(vocab_size), eos_token_ids=[int(i) for i in eos_token_ids]
    )
    os.write(1, json.dumps({"special": vocabulary.special_tokens()}).encode() + b"\n")
    Worker(vocabulary).run()


if __name__ == "__main__":
    main(sys.argv[1:])
