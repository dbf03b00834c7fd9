"""What a hostile or broken client may send to `make serve`: HAProxy first, then the ingress.

In every test somebody else's request is answered meanwhile or afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import time
from collections.abc import AsyncIterator

import pytest

from tests.make_serve import START_TIMEOUT_S, MakeServe

pytestmark = [pytest.mark.ray, pytest.mark.timeout(START_TIMEOUT_S + 120)]

MODEL = "smollm2-135m-instruct"
NUM_IDLE = 1000
NUM_SLOW = 50
HEADERS_LIMIT_S = 10
"""As serve_config.yaml has it."""
REQUEST_LINE = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"

type Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def connected(server: MakeServe, count: int) -> AsyncIterator[list[Connection]]:
    """So many connections, on which nothing has been sent."""
    async with contextlib.AsyncExitStack() as stack:
        connections: list[Connection] = []
        for _ in range(count):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            stack.callback(writer.close)
            connections.append((reader, writer))
        yield connections


async def send(server: MakeServe, content: bytes, *headers: bytes) -> tuple[int, bytes]:
    """Send a completion request over a connection of its own; return status and body."""
    lines = [b"Content-Length: %d" % len(content), b"Connection: close", *headers]
    async with connected(server, 1) as [(reader, writer)]:
        writer.write(
            REQUEST_LINE + b"".join(b"%s\r\n" % line for line in lines) + b"\r\n" + content
        )
        # A server that refuses does not read the rest, and its end may be told as a reset.
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        return await receive(reader)


async def receive(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Read an answer up to the connection's end; return status and body."""
    async with asyncio.timeout(30):
        head = await reader.readuntil(b"\r\n\r\n")
        answer = bytearray()
        with contextlib.suppress(ConnectionError):
            while chunk := await reader.read(1 << 16):
                answer += chunk
    return int(head.split(maxsplit=2)[1]), bytes(answer)


async def complete(server: MakeServe) -> float:
    """Have an ordinary request answered; return how long it took, seconds."""
    began_s = time.monotonic()
    status, answer = await send(
        server, json.dumps({"model": MODEL, "prompt": "Hi", "max_tokens": 4}).encode()
    )
    assert status == 200, answer
    return time.monotonic() - began_s


async def trickle_headers(connection: Connection) -> tuple[float, int]:
    """Send a header a second; return after how many seconds that was given up, and the status."""
    reader, writer = connection
    began_s = time.monotonic()
    answer = asyncio.ensure_future(receive(reader))
    writer.write(REQUEST_LINE)
    while not answer.done() and time.monotonic() - began_s < 3 * HEADERS_LIMIT_S:
        writer.write(b"X-Slow: 1\r\n")
        await asyncio.wait([answer], timeout=1)
    status, _ = await answer
    return time.monotonic() - began_s, status


async def test_silent_and_slow_connections_keep_nobody_waiting_and_are_closed(
    server: MakeServe,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    alone_s = min([await complete(server) for _ in range(3)])
    async with connected(server, NUM_IDLE) as idle, connected(server, NUM_SLOW) as slow:
        trickling = [asyncio.ensure_future(trickle_headers(connection)) for connection in slow]
        beside_s = min([await complete(server) for _ in range(5)])
        assert not any(task.done() for task in trickling)
        assert beside_s < 3 * alone_s + 0.1
        for took_s, status in await asyncio.gather(*trickling):
            assert status == 408
            assert HEADERS_LIMIT_S - 2 < took_s < HEADERS_LIMIT_S + 5
        async with asyncio.timeout(5):  # as old as the slow ones
            assert not any([await reader.read() for reader, _ in idle])
    await complete(server)


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param([b"X-Big: " + b"a" * (64 << 10)], id="one of 64 KiB"),
        pytest.param([b"X-Big: " + b"a" * (1 << 20)], id="one of 1 MiB"),
        pytest.param([b"X-%d: a" % i for i in range(2000)], id="2,000 of them"),
        pytest.param([b"no colon here"], id="one that is none"),
    ],
)
async def test_headers_that_are_too_much_are_refused(
    server: MakeServe, headers: list[bytes]
) -> None:
    status, _ = await send(server, b"{}", *headers)
    assert status == 400
    await complete(server)


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        pytest.param(b"[" * 100_000 + b"]" * 100_000, "invalid_json", id="100,000 levels deep"),
        pytest.param(b'"%s"' % (b"a" * 1_000_000), "context_length_exceeded", id="one letter"),
        pytest.param(b'"%s"' % (b" " * 1_000_000), "context_length_exceeded", id="spaces"),
    ],
)
async def test_bodies_that_would_cost_much_are_refused_at_once(
    server: MakeServe, prompt: bytes, code: str
) -> None:
    content = b'{"model":"%s","max_tokens":4,"prompt":%s}' % (MODEL.encode(), prompt)
    began_s = time.monotonic()
    status, answer = await send(server, content)
    took_s = time.monotonic() - began_s
    assert status == 400
    assert json.loads(answer)["error"]["code"] == code
    assert took_s < 1
    await complete(server)
