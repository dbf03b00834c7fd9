"""Silence, clients that leave, and servers that stop."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.asgi_client import Answer
from tests.http_server import TEXT, MakeServer, body


async def test_a_silent_stream_is_kept_alive_from_submission_on(make_server: MakeServer) -> None:
    server = make_server(config={"keep_alive_s": 0.01})
    server.fake.gate.clear()

    def release_after_three(answer: Answer) -> bool:
        if answer.chunks == [b": keep-alive\n\n"] * 3:
            server.fake.gate.set()
        return False

    raw = json.dumps(body(stream=True)).encode()
    answer = await server.client.request(
        "POST", "/v1/completions", [raw], until=release_after_three
    )
    assert answer.body.startswith(b": keep-alive\n\n" * 3)
    assert "".join(event["choices"][0]["text"] for event in answer.events()) == TEXT


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_leaving_before_the_first_token_gives_the_request_up(
    make_server: MakeServer, stream: bool, n: int
) -> None:
    server = make_server()
    server.fake.gate.clear()

    raw = json.dumps(body(stream=stream, n=n)).encode()
    answer = await server.client.request(
        "POST", "/v1/completions", [raw], before_leaving=lambda: server.fake.wait_running(n)
    )
    assert not answer.is_complete
    assert len(server.fake.given_up) == n
    assert not server.fake.running
    assert server.samples("systole_requests_total") == {("/v1/completions", "499"): 1}
    assert server.samples("systole_requests_in_progress") == {(): 0}


@pytest.mark.parametrize("n", [1, 3])
async def test_leaving_in_mid_stream_gives_the_request_up(make_server: MakeServer, n: int) -> None:
    server = make_server(lambda *_: [5] * 100)
    raw = json.dumps(body(stream=True, n=n)).encode()
    answer = await server.client.request(
        "POST", "/v1/completions", [raw], until=lambda answer: len(answer.chunks) == 4
    )
    assert not answer.is_complete
    assert len(answer.chunks) < 20
    assert not server.fake.running
    assert len(server.fake.given_up) == n


async def test_leaving_while_the_body_is_sent_is_no_error(make_server: MakeServer) -> None:
    server = make_server()
    received = iter(
        [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    )

    async def receive() -> Any:
        return next(received)

    async def send(_: Any) -> None:
        pytest.fail("nobody is there to be answered")

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [],
        "query_string": b"",
    }
    await server.client._app(scope, receive, send)
    assert server.fake.calls == []


async def test_the_app_starts_and_stops_under_a_server(make_server: MakeServer) -> None:
    messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])
    answers: list[str] = []

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        answers.append(message["type"])

    scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
    await make_server().client._app(scope, receive, send)
    assert answers == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


async def test_a_cancelled_server_cancels_the_request(make_server: MakeServer) -> None:
    server = make_server()
    server.fake.gate.clear()
    call = asyncio.create_task(server.client.post("/v1/completions", body()))
    await server.fake.wait_running(1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.sleep(0.01)
    assert not server.fake.running
