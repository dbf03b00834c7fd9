"""A minimal ASGI client that keeps every message apart, may send slowly, and may hang up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message


@dataclass
class Answer:
    messages: list[Message] = field(default_factory=list)

    @property
    def status(self) -> int:
        return self.messages[0]["status"]

    @property
    def headers(self) -> dict[str, str]:
        return {k.decode(): v.decode() for k, v in self.messages[0]["headers"]}

    @property
    def chunks(self) -> list[bytes]:
        """Bodies as they were sent, one per send."""
        return [m["body"] for m in self.messages if m["type"] == "http.response.body"]

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def is_complete(self) -> bool:
        return bool(self.messages) and not self.messages[-1].get("more_body", False)

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        body = self.json()
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert isinstance(body["error"]["code"], str)
        return body["error"]

    def events(self) -> list[Any]:
        """The stream's data events as JSON; checks framing and the end."""
        *events, end, rest = self.body.decode().split("\n\n")
        assert (end, rest) == ("data: [DONE]", "")
        data = [event for event in events if not event.startswith(":")]
        assert all(event.startswith("data: ") for event in data)
        return [json.loads(event.removeprefix("data: ")) for event in data]


class Client:
    """Calls an ASGI app in this event loop.

    Attributes:
        num_body_chunks_taken: how much of the last request's body the app asked for.
    """

    def __init__(self, app: ASGIApp, headers: dict[str, str] | None = None) -> None:
        self._app = app
        self._headers = headers or {}
        self.num_body_chunks_taken = 0

    async def get(self, path: str, headers: dict[str, str] | None = None) -> Answer:
        return await self.request("GET", path, [b""], headers)

    async def post(self, path: str, body: object, headers: dict[str, str] | None = None) -> Answer:
        """Send JSON, or bytes as they are."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.request("POST", path, [raw], headers)

    async def request(
        self,
        method: str,
        path: str,
        body: Sequence[bytes],
        headers: dict[str, str] | None = None,
        *,
        stalls: bool = False,
        until: Callable[[Answer], bool] | None = None,
        before_leaving: Callable[[], Awaitable[None]] | None = None,
    ) -> Answer:
        """Make a request and return the answer, complete or as far as it came.

        Args:
            stalls: promise more of the body and never send it.
            until: hang up as soon as this holds (asked when something was sent).
            before_leaving: hang up after this has been awaited.
        """
        answer = Answer()
        leaves = asyncio.Event()
        pending = list(body)
        self.num_body_chunks_taken = 0

        async def receive() -> Message:
            if pending:
                self.num_body_chunks_taken += 1
                chunk = pending.pop(0)
                return {"type": "http.request", "body": chunk, "more_body": stalls or bool(pending)}
            await leaves.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            answer.messages.append(message)
            if until is not None and until(answer):
                leaves.set()

        merged = {**self._headers, **(headers or {})}
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(k.lower().encode(), v.encode()) for k, v in merged.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        call = asyncio.ensure_future(self._app(scope, receive, send))
        if before_leaving is not None:
            await before_leaving()
            leaves.set()
        await asyncio.wait_for(call, 20)
        return answer
