"""What a replica owes its callers: the tokens of every live request, until the sink has them.

Runs on the replica's event loop; `publish` takes the deltas of one engine step and writes one frame
per sink. Invariant: a token leaves the record of its request only after the sink acknowledged the
request's last delta, the request was closed, or the sink was given up.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

from replicas.errors import EngineError, Overloaded, ServingError
from replicas.frames import (
    FrameError,
    FrameKind,
    LogprobBuffer,
    pack_frame,
    pack_logprobs,
    pack_result,
)
from replicas.sink_link import SinkLink
from replicas.wire import GenerateRequest, GenerateResult, SinkAddress, TokenDelta, TokenLogprobs

logger = logging.getLogger(__name__)

MAX_BUFFERED_BYTES = 8 << 20
RECONNECT_S = 5.0
MAX_RESENT_TOKENS = 8192
"""Tokens in a resent frame: with all their logprobs they take 1.4 MB."""
UNACKNOWLEDGED_S = 60.0
"""An ended request is forgotten after this long without acknowledgement."""

Outcome = GenerateResult | ServingError


class _Record:
    """One request: all tokens it has produced, and how it ended."""

    __slots__ = (
        "expiry",
        "logprobs",
        "offset",
        "outcome",
        "prompt_logprobs",
        "request_id",
        "result",
        "sink",
        "tokens",
    )

    def __init__(
        self, request: GenerateRequest, sink: _Sink, outcome: asyncio.Future[Outcome]
    ) -> None:
        self.request_id = request.request_id
        self.offset = request.output_offset
        self.sink = sink
        self.outcome = outcome
        self.tokens: list[int] = []
        self.logprobs = LogprobBuffer()
        self.prompt_logprobs = LogprobBuffer()
        self.result: GenerateResult | None = None
        self.expiry: asyncio.TimerHandle | None = None

    def append(self, delta: TokenDelta) -> None:
        """Take in new tokens and what belongs to them."""
        self.tokens += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs.append(delta.logprobs)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs.append(delta.prompt_logprobs)

    def pack_from(self, index: int, prompt_logprobs: TokenLogprobs | None = None) -> list[object]:
        """Encode everything from output `index` on, and new logprobs of the prompt."""
        result = None if self.result is None else pack_result(self.result)
        tokens = self.tokens[index - self.offset :]
        packed: list[object] = [self.request_id, index, tokens, result]
        logprobs = self.logprobs.since(index) if self.logprobs else None
        if logprobs is not None or prompt_logprobs is not None:
            packed += [pack_logprobs(logprobs), pack_logprobs(prompt_logprobs)]
        return packed

    def resend_from(self, index: int) -> Iterator[list[object]]:
        """Encode everything from output `index` on, in pieces that fit a frame each.

        The logprobs of the prompt are sent from their beginning: the sink drops what it has.
        """
        of_prompt = self.prompt_logprobs
        for start in range(of_prompt.start, of_prompt.end, MAX_RESENT_TOKENS):
            part = of_prompt.since(start, before=start + MAX_RESENT_TOKENS)
            yield [self.request_id, index, [], None, None, pack_logprobs(part)]
        end = self.offset + len(self.tokens)
        while self.logprobs and index + MAX_RESENT_TOKENS < end:
            following = index + MAX_RESENT_TOKENS
            tokens = self.tokens[index - self.offset : following - self.offset]
            logprobs = pack_logprobs(self.logprobs.since(index, before=following))
            yield [self.request_id, index, tokens, None, logprobs, None]
            index = following
        yield self.pack_from(index)


class _Sink:
    """One caller's process: its link and its requests."""

    __slots__ = ("link", "records")

    def __init__(self) -> None:
        self.records: dict[str, _Record] = {}
        self.link: SinkLink


class TokenStream:
    """Carries the tokens of one replica to all sinks."""

    def __init__(
        self,
        replica_id: str,
        abort: Callable[[str], None],
        *,
        max_buffered_bytes: int = MAX_BUFFERED_BYTES,
        reconnect_s: float = RECONNECT_S,
    ) -> None:
        """Nothing starts until the first request.

        Args:
            replica_id: goes into every result.
            abort: told the ids of requests that nobody can receive any more.
            max_buffered_bytes: how far a sink may fall behind before its requests are aborted.
            reconnect_s: how long a lost sink may take to come back.
        """
        self._replica_id = replica_id
        self._abort = abort
        self._max_buffered_bytes = max_buffered_bytes
        self._reconnect_s = reconnect_s
        self._records: dict[str, _Record] = {}
        self._sinks: dict[str, _Sink] = {}

    @property
    def num_records(self) -> int:
        """Requests whose tokens are kept: running, or ended and not yet acknowledged."""
        return len(self._records)

    @property
    def num_sinks(self) -> int:
        """Sinks with a link."""
        return len(self._sinks)

    @property
    def num_buffered_bytes(self) -> int:
        """Bytes of all sinks that the kernel has not taken yet."""
        return sum(sink.link.num_buffered_bytes for sink in self._sinks.values())

    def open(self, request: GenerateRequest) -> asyncio.Future[Outcome]:
        """Expect tokens of a request, and connect to its sink if this is its first one.

        Returns:
            How the request ends: the engine's result, or why the tokens could not be delivered.

        Raises:
            EngineError: a request of this id is already running.
        """
        request_id = request.request_id
        if request_id in self._records:
            raise EngineError(f"a request with id {request_id} is already running here")
        sink = self._sinks.get(request.sink.sink_id)
        if sink is None:
            sink = self._add_sink(request.sink)
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        record = _Record(request, sink, outcome)
        self._records[request_id] = record
        sink.records[request_id] = record
        return outcome

    def close(self, request_id: str) -> None:
        """Forget a request: nothing more is sent; idempotent."""
        record = self._records.pop(request_id, None)
        if record is None:
            return
        del record.sink.records[request_id]
        if record.expiry is not None:
            record.expiry.cancel()
        if not record.outcome.done():
            record.outcome.cancel()

    def publish(self, deltas: Iterable[TokenDelta]) -> None:
        """Send what one engine step produced; deltas of closed requests are dropped."""
        frames: dict[_Sink, list[list[object]]] = {}
        for delta in deltas:
            record = self._records.get(delta.request_id)
            if record is None or record.result is not None:
                continue
            index = record.offset + len(record.tokens)
            assert delta.start_index == index, f"{delta}: expected output {index}"
            record.append(delta)
            if delta.result is not None:
                self._end(record, delta.result)
            if record.sink.link.is_ready:
                frames.setdefault(record.sink, []).append(
                    record.pack_from(index, delta.prompt_logprobs)
                )
        for sink, packed in frames.items():
            if not sink.link.write(pack_frame(FrameKind.TOKENS, packed)):
                self._give_up(sink, Overloaded("the caller reads its tokens too slowly"))
                sink.link.reset()

    def fail(self, error: ServingError) -> None:
        """End every running request with `error`: the engine is dead."""
        for record in tuple(self._records.values()):
            if record.result is None:
                if not record.outcome.done():
                    record.outcome.set_result(error)
                self.close(record.request_id)

    def shutdown(self) -> None:
        """Close every link; running requests are forgotten."""
        for request_id in tuple(self._records):
            self.close(request_id)
        for sink in self._sinks.values():
            sink.link.close()
        self._sinks.clear()

    def _end(self, record: _Record, result: GenerateResult) -> None:
        assert result.num_output_tokens == len(record.tokens), (
            f"{result}: {len(record.tokens)} sent"
        )
        record.result = dataclasses.replace(result, replica_id=self._replica_id)
        if not record.outcome.done():
            record.outcome.set_result(record.result)
        loop = asyncio.get_running_loop()
        record.expiry = loop.call_later(UNACKNOWLEDGED_S, self.close, record.request_id)

    def _add_sink(self, address: SinkAddress) -> _Sink:
        sink = _Sink()

        def on_closed(reason: str) -> None:
            del self._sinks[address.sink_id]
            self._give_up(sink, EngineError(f"the caller's token sink is gone: {reason}"))

        sink.link = SinkLink(
            address,
            self._replica_id,
            on_welcome=lambda next_indices: self._resume(sink, next_indices),
            on_frame=self._receive,
            on_closed=on_closed,
            is_wanted=lambda: bool(sink.records),
            max_buffered_bytes=self._max_buffered_bytes,
            retry_for_s=self._reconnect_s,
        )
        self._sinks[address.sink_id] = sink
        return sink

    def _resume(self, sink: _Sink, next_indices: Mapping[str, int]) -> None:
        """Send what the sink lacks; what it no longer knows and has ended is forgotten."""
        for record in tuple(sink.records.values()):
            index = next_indices.get(record.request_id)
            end = record.offset + len(record.tokens)
            if index is None:
                if record.result is not None:
                    self.close(record.request_id)
            elif not record.offset <= index <= end:
                raise FrameError(f"{record.request_id}: output {index} is not in what was sent")
            elif index < end or record.result is not None or record.prompt_logprobs:
                for packed in record.resend_from(index):
                    if not sink.link.write(pack_frame(FrameKind.TOKENS, [packed])):
                        raise FrameError("the sink lacks more than may be buffered")

    def _receive(self, frame: list[Any]) -> None:
        match frame:
            case [FrameKind.ACK, list() as request_ids]:  # pyright: ignore[reportUnknownVariableType]
                for request_id in cast(list[object], request_ids):
                    if isinstance(request_id, str) and (record := self._records.get(request_id)):
                        self._acknowledge(record)
            case _:
                raise FrameError(f"unexpected frame of kind {frame[0]}")

    def _acknowledge(self, record: _Record) -> None:
        if record.result is not None:
            self.close(record.request_id)

    def _give_up(self, sink: _Sink, error: ServingError) -> None:
        """Abort everything that runs for a sink, and forget what has ended."""
        for record in tuple(sink.records.values()):
            if record.result is None:
                logger.warning("aborting %s: %s", record.request_id, error)
                self._abort(record.request_id)
                if not record.outcome.done():
                    record.outcome.set_result(error)
            self.close(record.request_id)
