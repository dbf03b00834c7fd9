"""Token stream and token sink over real sockets: order, loss, slowness, strangers."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable

import pytest

from app.token_sink import TokenQueue, TokenSink
from replicas.errors import EngineError, Overloaded
from replicas.frames import PROTOCOL_VERSION, FrameBuffer, FrameKind, pack_frame
from replicas.token_stream import TokenStream
from replicas.wire import (
    FinishReason,
    GenerateRequest,
    GenerateResult,
    SamplingParams,
    SinkAddress,
    TokenDelta,
)
from tests.fakes import TcpProxy


async def until(condition: Callable[[], bool], timeout_s: float = 5) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at
        await asyncio.sleep(0.002)


class Pair:
    """A stream, a sink, and the network between them."""

    def __init__(self, sink: TokenSink, proxy: TcpProxy, port: int) -> None:
        self.sink = sink
        self.proxy = proxy
        self.aborted: list[str] = []
        self.stream = TokenStream(
            "replica", self.aborted.append, max_buffered_bytes=1 << 20, reconnect_s=0.3
        )
        self.address = dataclasses.replace(sink.address, port=port)

    def open(
        self, request_id: str, *, offset: int = 0, address: SinkAddress | None = None
    ) -> tuple[TokenQueue, asyncio.Future[object]]:
        queue = TokenQueue(request_id, first_index=offset)
        self.sink.open(request_id, queue)
        outcome = self.stream.open(
            GenerateRequest(
                request_id=request_id,
                prompt_token_ids=(1,),
                sampling=SamplingParams(),
                sink=address or self.address,
                output_offset=offset,
            )
        )
        return queue, outcome

    def publish(
        self, request_id: str, start: int, tokens: tuple[int, ...], *, total: int | None = None
    ) -> None:
        """Publish a delta; `total` output tokens of the attempt end it."""
        result = total is not None and GenerateResult(
            request_id=request_id,
            finish_reason=FinishReason.LENGTH,
            num_output_tokens=total,
            num_prompt_tokens=1,
            num_cached_tokens=0,
        )
        self.stream.publish(
            [
                TokenDelta(
                    request_id=request_id,
                    start_index=start,
                    token_ids=tokens,
                    result=result or None,
                )
            ]
        )


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    sink = TokenSink(host="127.0.0.1")
    await sink.start()
    proxy = TcpProxy("127.0.0.1", sink.address.port)
    pair = Pair(sink, proxy, await proxy.start())
    yield pair
    pair.stream.shutdown()
    await proxy.close()
    await sink.close()


async def read_all(queue: TokenQueue) -> tuple[int, ...]:
    tokens: list[int] = []
    while True:
        delta = await asyncio.wait_for(queue.get(), timeout=5)
        assert delta.start_index == queue.first_index + len(tokens)
        tokens += delta.token_ids
        if delta.result is not None:
            assert delta.result.num_output_tokens == len(tokens)
            assert delta.result.replica_id == "replica"
            return tuple(tokens)


async def test_tokens_arrive_in_order_and_are_then_forgotten(pair: Pair) -> None:
    queue, outcome = pair.open("r", offset=3)
    for index in range(50):
        pair.publish("r", 3 + index, (index,), total=50 if index == 49 else None)
        await asyncio.sleep(0)
    assert await read_all(queue) == tuple(range(50))
    assert isinstance(await outcome, GenerateResult)
    pair.sink.discard("r")
    await until(lambda: pair.stream.num_records == 0)
    assert pair.sink.num_open == 0
    assert pair.stream.num_sinks == 1, "the connection persists"


async def test_one_connection_carries_all_requests_of_a_sink(pair: Pair) -> None:
    queues = [pair.open(f"r{n}")[0] for n in range(40)]
    for n in range(40):
        pair.publish(f"r{n}", 0, (n, n), total=2)
    assert [await read_all(queue) for queue in queues] == [(n, n) for n in range(40)]
    assert pair.proxy.num_connections == 1


async def test_deltas_of_several_tokens_are_resent_whole_after_a_cut(pair: Pair) -> None:
    queue, _ = pair.open("r", offset=2)
    reader = asyncio.create_task(read_all(queue))
    tokens = tuple(range(300))
    start = 0
    while start < len(tokens):
        delta = tokens[start : start + 1 + start % 8]
        is_last = start + len(delta) == len(tokens)
        pair.publish("r", 2 + start, delta, total=len(tokens) if is_last else None)
        if start % 5 == 2:
            pair.proxy.cut()
        start += len(delta)
        await asyncio.sleep(0.001)
    assert await reader == tokens
    assert pair.proxy.num_connections > 1


async def test_what_a_cut_connection_lost_is_resent(pair: Pair) -> None:
    queue, _ = pair.open("r")
    reader = asyncio.create_task(read_all(queue))
    for index in range(200):
        pair.publish("r", index, (index,), total=200 if index == 199 else None)
        if index % 40 == 20:
            pair.proxy.cut()
        await asyncio.sleep(0.001)
    assert await reader == tuple(range(200))
    assert pair.proxy.num_connections > 1
    await until(lambda: pair.stream.num_records == 0)


async def test_an_ending_lost_with_the_connection_is_resent(pair: Pair) -> None:
    queue, _ = pair.open("r")
    pair.publish("r", 0, (1,))
    await until(lambda: queue.next_index == 1)
    pair.proxy.flow.clear()
    pair.publish("r", 1, (2,), total=2)
    await asyncio.sleep(0.02)
    pair.proxy.cut()
    pair.proxy.flow.set()
    assert await read_all(queue) == (1, 2)


async def test_losing_and_regaining_the_connection_is_noticed(pair: Pair) -> None:
    queue, _ = pair.open("r")
    changes: list[bool] = []
    queue.on_connection = lambda: changes.append(queue.is_connected)
    pair.publish("r", 0, (1,))
    await until(lambda: queue.next_index == 1)
    pair.proxy.cut()
    await until(lambda: changes == [False, True])


async def test_a_sink_that_stays_away_has_its_requests_aborted(pair: Pair) -> None:
    _, outcome = pair.open("r")
    _, ended = pair.open("done")
    pair.publish("r", 0, (1,))
    pair.publish("done", 0, (1,), total=1)
    await asyncio.sleep(0.05)
    pair.proxy.is_open = False
    pair.proxy.cut()
    assert isinstance(await asyncio.wait_for(outcome, timeout=5), EngineError)
    assert isinstance(await ended, GenerateResult)
    assert pair.aborted == ["r"]
    assert pair.stream.num_records == pair.stream.num_sinks == 0


async def test_a_sink_that_leaves_with_nothing_running_is_dropped(pair: Pair) -> None:
    queue, _ = pair.open("r")
    pair.publish("r", 0, (1,), total=1)
    await read_all(queue)
    await until(lambda: pair.stream.num_records == 0)
    await pair.sink.close()
    await until(lambda: pair.stream.num_sinks == 0)
    assert not pair.aborted


async def test_a_slow_reader_is_aborted_and_delays_nobody(pair: Pair) -> None:
    slow_queue, slow = pair.open("slow")
    other = TokenSink(host="127.0.0.1")
    await other.start()
    queue = TokenQueue("fast", first_index=0)
    other.open("fast", queue)
    request = GenerateRequest(
        request_id="fast", prompt_token_ids=(1,), sampling=SamplingParams(), sink=other.address
    )
    pair.stream.open(request)
    pair.publish("slow", 0, (1,))
    await until(lambda: slow_queue.next_index == 1)
    pair.proxy.flow.clear()  # the caller stops reading
    chunk = tuple(range(100_000, 150_000))
    index = 1
    while not slow.done():
        assert index < 1 << 24, "the buffer is not bounded"
        pair.publish("slow", index, chunk)
        index += len(chunk)
        await asyncio.sleep(0)
    assert isinstance(await slow, Overloaded)
    assert pair.aborted == ["slow"]
    pair.publish("fast", 0, (1, 2), total=2)
    assert await read_all(queue) == (1, 2)
    await other.close()


async def test_closing_a_request_forgets_it(pair: Pair) -> None:
    queue, outcome = pair.open("r")
    pair.stream.close("r")
    pair.stream.close("r")
    pair.publish("r", 0, (1,))
    await asyncio.sleep(0.02)
    assert outcome.cancelled()
    assert pair.stream.num_records == 0
    assert queue.next_index == 0


async def test_a_duplicate_id_is_refused(pair: Pair) -> None:
    pair.open("r")
    request = GenerateRequest(
        request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(), sink=pair.address
    )
    with pytest.raises(EngineError, match="already running"):
        pair.stream.open(request)


async def test_a_replica_with_a_wrong_key_delivers_nothing(pair: Pair) -> None:
    forged = dataclasses.replace(pair.address, key=b"x" * 32)
    queue, outcome = pair.open("r", address=forged)
    pair.publish("r", 0, (1,))
    assert isinstance(await asyncio.wait_for(outcome, timeout=5), EngineError)
    assert queue.next_index == 0


async def test_a_sink_without_the_key_gets_no_tokens(pair: Pair) -> None:
    """An impostor on the sink's port: it sends a challenge, and a welcome that proves nothing."""
    received = bytearray()

    async def impersonate(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(pack_frame(FrameKind.CHALLENGE, PROTOCOL_VERSION, b"n" * 32))
        received.extend(await reader.read(4096))
        writer.write(pack_frame(FrameKind.WELCOME, b"m" * 32, {"r": 0}))
        received.extend(await reader.read(4096))
        writer.close()

    server = await asyncio.start_server(impersonate, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    _, outcome = pair.open("r", address=dataclasses.replace(pair.address, port=port))
    pair.publish("r", 0, (123,))
    assert isinstance(await asyncio.wait_for(outcome, timeout=5), EngineError)
    frames = list(FrameBuffer(1 << 16).feed(bytes(received)))
    assert frames
    assert {frame[0] for frame in frames} == {int(FrameKind.HELLO)}
    server.close()


@pytest.mark.parametrize(
    "data",
    [
        pack_frame(FrameKind.TOKENS, [["r", 0, [1], None]]),
        pack_frame(FrameKind.HELLO, "s", "r", b"n", b"m"),
        (1 << 30).to_bytes(4, "big"),
        (2000).to_bytes(4, "big"),
        b"\x00\x00\x00\x01\xc1",
    ],
)
async def test_a_stranger_is_disconnected(pair: Pair, data: bytes) -> None:
    queue, _ = pair.open("r")
    reader, writer = await asyncio.open_connection("127.0.0.1", pair.sink.address.port)
    writer.write(data)
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await asyncio.wait_for(reader.readexactly(1 << 16), timeout=5)
    writer.close()
    assert queue.next_index == 0


async def test_a_replayed_hello_is_refused(pair: Pair) -> None:
    """The proof of one connection is worth nothing on the next: its challenge is fresh."""
    recorded = bytearray()
    queue, _ = pair.open("r")
    port = pair.sink.address.port

    async def record(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sink_reader, sink_writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(await sink_reader.read(4096))
        recorded.extend(await reader.read(4096))
        writer.close()
        sink_writer.close()

    server = await asyncio.start_server(record, "127.0.0.1", 0)
    address = dataclasses.replace(pair.address, port=server.sockets[0].getsockname()[1])
    other = TokenStream("replica", lambda _: None, reconnect_s=0.1)
    request = GenerateRequest(
        request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(), sink=address
    )
    other.open(request)
    await until(lambda: bool(recorded))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(bytes(recorded))
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await asyncio.wait_for(reader.readexactly(1 << 16), timeout=5)
    writer.close()
    other.shutdown()
    server.close()
    assert queue.next_index == 0


async def test_a_queue_drops_repeats_and_reports_gaps() -> None:
    queue = TokenQueue("r", first_index=10)
    assert queue.push(10, [1, 2], None)
    assert queue.push(10, [1, 2, 3], None)
    assert queue.push(11, [2], None)
    assert not queue.push(14, [5], None)
    delta = await queue.get()
    assert (delta.start_index, delta.token_ids) == (10, (1, 2, 3))


async def test_a_failed_queue_first_hands_out_what_arrived() -> None:
    queue = TokenQueue("r", first_index=0)
    queue.push(0, [1], None)
    queue.fail(EngineError("first"))
    queue.fail(EngineError("second"))
    assert (await queue.get()).token_ids == (1,)
    with pytest.raises(EngineError, match="first"):
        await queue.get()
