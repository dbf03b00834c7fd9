"""Tells good grammars from bad ones before anything is submitted, in a process of its own.

The ingress's side of `app.grammar_worker`: starts it, asks it, remembers what it said. Invariant:
no grammar delays the event loop, and each is tried within the worker's limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import sys
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

from replicas.errors import EngineError, InvalidRequest
from replicas.wire import ModelInfo

MAX_GRAMMAR_CHARS = 256 << 10
_MAX_REMEMBERED = 1024
_MAX_SILENCE_S = 30.0
_MAX_LINE_BYTES = 8 << 20
# It forks: no library may start threads of its own.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
_CHECKOUT = Path(__file__).resolve().parents[1]


class GrammarChecker:
    """Checks the grammars of one model's clients. Used from one event loop."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir.resolve()  # the worker runs in the checkout
        self._worker: asyncio.Task[_Worker] | None = None
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()

    def start(self, info: ModelInfo) -> None:
        """Have the worker ready when it is needed; takes a second of another process."""
        if self._worker is None or (
            self._worker.done() and (self._worker.exception() or self._worker.result().has_ended)
        ):
            self._worker = asyncio.create_task(_Worker.start(self._model_dir, info))

    async def special_tokens(self, info: ModelInfo) -> Mapping[str, int]:
        """Ids of the tokens that stand for no text, by name.

        Raises:
            EngineError: the worker does not start.
        """
        return (await self._ready(info)).special

    async def check(self, grammar: str, info: ModelInfo, *, param: str) -> None:
        """Refuse a grammar that cannot be used.

        Raises:
            InvalidRequest: it is malformed, or exceeds the limits; `param` is named.
            EngineError: the worker does not answer.
        """
        if len(grammar) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(
                f"'{param}' makes a grammar of {len(grammar)} characters; at most "
                f"{MAX_GRAMMAR_CHARS} are possible",
                param=param,
            )
        key = hashlib.sha256(grammar.encode()).digest()
        if key in self._verdicts:
            self._verdicts.move_to_end(key)
        else:
            self._verdicts[key] = await (await self._ready(info)).try_grammar(grammar)
            if len(self._verdicts) > _MAX_REMEMBERED:
                self._verdicts.popitem(last=False)
        if (error := self._verdicts[key]) is not None:
            raise InvalidRequest(f"'{param}' cannot be used: {error}", param=param)

    async def close(self) -> None:
        """End the worker."""
        worker, self._worker = self._worker, None
        if worker is not None:
            with contextlib.suppress(EngineError):
                await (await worker).close()

    async def _ready(self, info: ModelInfo) -> _Worker:
        self.start(info)
        assert self._worker is not None
        return await asyncio.shield(self._worker)


class _Worker:
    """A running worker process.

    Attributes:
        special: what it said of the vocabulary.
        has_ended: it answers no more.
    """

    def __init__(self, process: asyncio.subprocess.Process, special: Mapping[str, int]) -> None:
        self.special = special
        self.has_ended = False
        self._process = process
        self._ids = itertools.count()
        self._asked: dict[int, asyncio.Future[str | None]] = {}
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, model_dir: Path, info: ModelInfo) -> _Worker:
        """Start a process and wait until it has read the tokenizer.

        Raises:
            EngineError: it ends at once; its own message is in the log.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "app.grammar_worker",
            str(model_dir),
            str(info.vocab_size),
            *map(str, info.eos_token_ids),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=_CHECKOUT,
            env={**os.environ, **_ONE_THREAD},
            limit=_MAX_LINE_BYTES,
        )
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            status = await process.wait()
            raise EngineError(f"the process that checks grammars ended with status {status}")
        return cls(process, json.loads(line)["special"])

    async def try_grammar(self, grammar: str) -> str | None:
        """Return what is wrong with a grammar, or None.

        Raises:
            EngineError: the process has ended, or is silent.
        """
        order_id = next(self._ids)
        answer = self._asked[order_id] = asyncio.get_running_loop().create_future()
        assert self._process.stdin is not None
        try:
            order = json.dumps({"id": order_id, "grammar": grammar})
            self._process.stdin.write(order.encode() + b"\n")
            async with asyncio.timeout(_MAX_SILENCE_S):
                return await answer
        except TimeoutError:
            self.has_ended = True
            self._process.kill()
            raise EngineError("the process that checks grammars does not answer") from None
        finally:
            self._asked.pop(order_id, None)

    async def close(self) -> None:
        """End the process, which does so when its input ends."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
        await self._reading

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            message = json.loads(line)
            answer = self._asked.get(message["id"])
            if answer is not None and not answer.done():
                answer.set_result(message["error"])
        self.has_ended = True
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(EngineError("the process that checks grammars has ended"))
