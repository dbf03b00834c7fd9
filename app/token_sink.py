"""Where a caller's tokens arrive: one server per process, one `TokenQueue` per running attempt.

Knows nothing of routing or retries. Invariant: a queue hands out every output index once, in
order, whatever is lost, repeated or resent on the way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from app.frame_server import FrameServer, PortRange, ReplicaPeer
from replicas.frames import (
    FrameError,
    FrameKind,
    LogprobBuffer,
    pack_frame,
    unpack_logprobs,
    unpack_result,
)
from replicas.wire import GenerateResult, SinkAddress, TokenDelta, TokenLogprobs


class TokenQueue:
    """The tokens of one attempt, between the sink and one reader.

    Attributes:
        request_id: the caller's name for the request, put on every delta.
        first_index: output index at which the attempt starts.
        next_index: output index that is expected next.
        result: set once the last delta has arrived.
        replica_id: the replica that sent the latest delta; empty before the first.
        is_connected: false while that replica's connection is lost.
    """

    __slots__ = (
        "_error",
        "_is_ended",
        "_logprobs",
        "_loop",
        "_prompt_logprobs",
        "_tokens",
        "_waiter",
        "first_index",
        "is_connected",
        "next_index",
        "on_connection",
        "replica_id",
        "request_id",
        "result",
    )

    def __init__(self, request_id: str, *, first_index: int) -> None:
        self.request_id = request_id
        self.first_index = first_index
        self.next_index = first_index
        self.result: GenerateResult | None = None
        self.replica_id = ""
        self.is_connected = True
        self.on_connection: Callable[[], None] | None = None
        self._tokens: list[int] = []
        self._logprobs = LogprobBuffer()
        self._prompt_logprobs = LogprobBuffer()
        self._is_ended = False
        self._error: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    @property
    def num_received(self) -> int:
        """Tokens of this attempt that have arrived."""
        return self.next_index - self.first_index

    @property
    def is_complete(self) -> bool:
        """Whether the last delta has arrived and the count agrees with its result."""
        return self.result is not None and self.result.num_output_tokens == self.num_received

    def push(
        self,
        start_index: int,
        token_ids: list[int],
        result: GenerateResult | None,
        logprobs: TokenLogprobs | None = None,
        prompt_logprobs: TokenLogprobs | None = None,
    ) -> bool:
        """Take a delta; tokens that arrived before are dropped.

        Returns:
            False when tokens before `start_index` are missing: the replica must resend.

        Raises:
            FrameError: logprobs are missing in between.
        """
        if start_index != self.next_index:
            if start_index > self.next_index:
                return False
            token_ids = token_ids[self.next_index - start_index :]
        self._tokens += token_ids
        self.next_index += len(token_ids)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        if prompt_logprobs is not None:
            self._prompt_logprobs.append(prompt_logprobs)
        if result is not None:
            self.result = result
        self._wake()
        return True

    def fail(self, error: BaseException) -> None:
        """End the queue: the reader gets what has arrived, then `error`. The first error counts."""
        if self._error is None:
            self._error = error
            self._wake()

    async def get(self) -> TokenDelta:
        """Wait for the next tokens; everything that has arrived by then is one delta.

        Raises:
            BaseException: what `fail` was given.
        """
        while True:
            if self._tokens or self._prompt_logprobs or (self.is_complete and not self._is_ended):
                return self._take()
            if self._error is not None:
                raise self._error
            assert not self._is_ended, "read past the last delta"
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _take(self) -> TokenDelta:
        tokens = tuple(self._tokens)
        self._tokens.clear()
        self._is_ended = self.is_complete
        return TokenDelta(
            request_id=self.request_id,
            start_index=self.next_index - len(tokens),
            token_ids=tokens,
            result=self.result if self._is_ended else None,
            logprobs=self._logprobs.take(),
            prompt_logprobs=self._prompt_logprobs.take(),
        )

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class TokenSink:
    """The receiving end of the token streams of every replica that works for this process."""

    def __init__(self, *, host: str, ports: PortRange | None = None) -> None:
        self._server = FrameServer(self, host=host, ports=ports)
        self._queues: dict[str, TokenQueue] = {}
        self._peers: dict[str, ReplicaPeer] = {}

    @property
    def address(self) -> SinkAddress:
        """Goes into every request; valid after `start`."""
        return self._server.address

    @property
    def num_open(self) -> int:
        """Attempts that are running; 0 when nothing is."""
        return len(self._queues)

    async def start(self) -> None:
        """Bind and listen.

        Raises:
            OSError: the host is not an address of this node.
        """
        await self._server.start()

    async def close(self) -> None:
        """Stop listening and drop every connection; open queues get no more tokens."""
        await self._server.close()

    def open(self, attempt_id: str, queue: TokenQueue) -> None:
        """Route the tokens of `attempt_id` to `queue`. Call before the attempt is submitted."""
        assert attempt_id not in self._queues, attempt_id
        self._queues[attempt_id] = queue

    def discard(self, attempt_id: str) -> None:
        """Stop listening for an attempt; idempotent. Late tokens are ignored."""
        self._queues.pop(attempt_id, None)

    def connected(self, peer: ReplicaPeer) -> dict[str, int]:
        """State the next index of everything that this replica may be running."""
        stale = self._peers.get(peer.replica_id)
        self._peers[peer.replica_id] = peer
        if stale is not None:
            stale.abort()  # half-open: the replica noticed the loss before we did
        next_indices: dict[str, int] = {}
        for attempt_id, queue in self._queues.items():
            if queue.replica_id in ("", peer.replica_id):
                next_indices[attempt_id] = queue.next_index
                self._set_connected(queue, is_connected=True)
        return next_indices

    def disconnected(self, peer: ReplicaPeer) -> None:
        """Mark what this replica was running, unless it has already come back."""
        if self._peers.get(peer.replica_id) is not peer:
            return
        del self._peers[peer.replica_id]
        for queue in tuple(self._queues.values()):
            if queue.replica_id == peer.replica_id:
                self._set_connected(queue, is_connected=False)

    def received(self, peer: ReplicaPeer, frame: list[Any]) -> None:
        """Hand the tokens of one engine step to their queues."""
        finished: list[str] = []
        try:
            kind, deltas = frame
            if kind != FrameKind.TOKENS:
                raise FrameError(f"a token sink takes no frame of kind {kind}")
            for attempt_id, start_index, token_ids, result_fields, *logprobs in deltas:
                if result_fields is not None:
                    finished.append(attempt_id)
                queue = self._queues.get(attempt_id)
                if queue is None:
                    continue
                queue.replica_id = peer.replica_id
                result = (
                    None
                    if result_fields is None
                    else unpack_result(
                        result_fields, request_id=queue.request_id, replica_id=peer.replica_id
                    )
                )
                parts = [unpack_logprobs(part) for part in logprobs]
                if not queue.push(start_index, token_ids, result, *parts):
                    raise FrameError(
                        f"{attempt_id} skips from output {queue.next_index} to {start_index}"
                    )
                if result is not None and not queue.is_complete:
                    raise FrameError(
                        f"{attempt_id} ended with {queue.num_received} tokens received "
                        f"but a count of {result.num_output_tokens}"
                    )
        except (TypeError, ValueError) as error:
            raise FrameError(f"malformed TOKENS frame: {error}") from error
        if finished:
            peer.send(pack_frame(FrameKind.ACK, finished))

    @staticmethod
    def _set_connected(queue: TokenQueue, *, is_connected: bool) -> None:
        if queue.is_connected != is_connected:
            queue.is_connected = is_connected
            if queue.on_connection is not None:
                queue.on_connection()
