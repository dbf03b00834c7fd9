"""One response that is being made: run, watched for whoever cancels it, and kept when it has ended.

Knows nothing of HTTP. Invariant: what the store holds when `run` returns is what the last event
said, and a response that nobody waits for any more ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Protocol

from app.choice import Choice, Piece
from app.completion_service import CompletionService
from app.errors import internal_error
from app.exchange import Edge
from app.generation import Generation
from app.responses.body import ResponseWriter
from app.responses.schema import ResponsesRequest
from app.responses.store import Signal, StoredResponse
from replicas.errors import EngineNotReady, ServingError

# Serve sets up this logger's handlers in every replica, with the request id on each line.
logger = logging.getLogger("ray.serve")

POLL_S = 0.5
"""How often the store is asked whether somebody has cancelled a response."""


class Emit(Protocol):
    """Takes the events of a stream."""

    def __call__(self, data: bytes, *, is_last: bool) -> Awaitable[None]:
        """Take some; `is_last` once, with the last."""
        ...


class ResponseRun:
    """One response on its way.

    Attributes:
        request: what was asked.
        generation: how it is made.
        writer: what has become of it so far.
        has_begun: its first event has been given out, so that a failure is an event too.
    """

    def __init__(
        self,
        request: ResponsesRequest,
        generation: Generation,
        writer: ResponseWriter,
        *,
        items: bytes,
        owner: str,
        service: CompletionService,
        edge: Edge,
    ) -> None:
        """Prepare a run.

        Args:
            request: see the attributes, as the next two.
            generation: of one choice.
            writer: fresh.
            items: the conversation that it answers, JSON, for the store.
            owner: name of the key that may see it.
            service: runs it.
            edge: leads to the store.
        """
        self.request = request
        self.generation = generation
        self.writer = writer
        self.has_begun = False
        self._items = items
        self._owner = owner
        self._service = service
        self._edge = edge
        self._registered = asyncio.Event()

    async def register(self) -> None:
        """Make it known to all ingress replicas while it runs, so that it can be cancelled.

        Raises:
            EngineNotReady: the store is away.
        """
        await self._put(is_running=True)
        self._registered.set()

    async def run(self, emit: Emit | None = None) -> int:
        """Run to the end; return the HTTP status that tells how it ended.

        Args:
            emit: takes the events; None: nobody is interested.

        Raises:
            ServingError: it failed before it had begun.
        """
        work = asyncio.create_task(self._work(emit))
        watch = asyncio.create_task(self._watch())
        try:
            await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
        except asyncio.CancelledError:  # nobody waits for it any more
            await _end(work)
            if self._registered.is_set() and self.writer.status == "in_progress":
                self.writer.cancel(self.generation.usage())
                self._edge.spawn(self._keep())
            raise
        finally:
            await _end(work)
            await _end(watch)
        data = self.writer.cancel(self.generation.usage())
        await self._keep()
        if emit is not None:
            await emit(data, is_last=True)
        return 200

    async def _work(self, emit: Emit | None) -> int:
        try:
            await self._generate(emit)
        except Exception as error:
            if not self.has_begun:
                raise
            return await self._fail(error, emit)
        [choice] = self.generation.choices
        data = self.writer.end(choice.finish_reason or "stop", self.generation.usage())
        await self._keep()
        if emit is not None:
            await emit(data, is_last=True)
        return 200

    async def _generate(self, emit: Emit | None) -> None:
        async def on_piece(_: Choice, piece: Piece) -> None:
            if emit is not None and not self.has_begun:
                await self.begin(emit)
            data = self.writer.feed(piece.text, piece.message)
            if data and emit is not None:
                await emit(data, is_last=False)

        if self.request.background and emit is not None:
            await self.begin(emit)
        self.has_begun = self.has_begun or self.request.background
        await self._service.run(self.generation, on_piece)

    async def begin(self, emit: Emit) -> None:
        """Give out the first events, when the response can be found by its id."""
        self.has_begun = True
        if self.request.store and not self._registered.is_set():
            try:
                await self.register()
            except EngineNotReady as error:
                logger.warning("%s cannot be cancelled: %s", self.writer.id, error)
        await emit(self.writer.begin(), is_last=False)

    async def _fail(self, error: Exception, emit: Emit | None) -> int:
        if isinstance(error, ServingError):
            failure = error
            logger.info("%s %d: %s", self.writer.id, error.status, error)
        else:
            failure = internal_error()
            logger.error("%s failed", self.writer.id, exc_info=error)
        data = self.writer.fail(failure)
        await self._keep()
        if emit is not None:
            await emit(data, is_last=True)
        return failure.status

    async def _watch(self) -> None:
        """Return when somebody wants it to end."""
        await self._registered.wait()
        while True:
            await asyncio.sleep(POLL_S)
            try:
                signal = await self._edge.shared.poll_response(self.writer.id)
            except EngineNotReady as error:
                logger.warning("%s cannot be cancelled for now: %s", self.writer.id, error)
                continue
            if signal is not Signal.RUN:
                return

    async def _keep(self) -> None:
        """Store it as it has ended."""
        if not self.request.store:
            return
        try:
            await self._put(is_running=False)
        except EngineNotReady as error:
            logger.warning("%s was not stored: %s", self.writer.id, error)

    async def _put(self, *, is_running: bool) -> None:
        stored = StoredResponse(body=self.writer.body(), items=self._items)
        is_kept = await self._edge.shared.put_response(
            self._owner, self.writer.id, stored, is_running=is_running
        )
        if not is_kept and is_running:
            logger.warning("%s is too large to be stored", self.writer.id)


async def _end[T](task: asyncio.Task[T]) -> None:
    if not task.done():
        task.cancel()
        await asyncio.wait((task,))
