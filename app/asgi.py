"""The parts of the HTTP edge that are plain ASGI: bodies, disconnects, event streams, middleware.

Knows nothing of completions. Invariants: no body over the limit is ever held in memory; a client
that leaves ends the work done for it; a stream that has begun always ends with `[DONE]`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping

import orjson
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.anthropic_errors import error_json
from app.auth import check_key
from app.errors import RequestTimeout, error_body, error_headers
from app.openai_response import DONE, KEEP_ALIVE
from replicas.errors import AuthenticationError, PayloadTooLarge, ServingError

# Serve sets up this logger's handlers in every replica, with the request id on each line.
logger = logging.getLogger("ray.serve")

_SAFE_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_MESSAGES_PATH = "/v1/messages"
_OPEN_PATHS = frozenset({"/health", "/ready"})


class ClientDisconnected(Exception):
    """The client left before its answer was complete. Nobody is left to tell."""


def speaks_anthropic(scope: Scope) -> bool:
    """Whether a request is for an endpoint with Anthropic's shapes."""
    path = _path(scope)
    return path == _MESSAGES_PATH or path.startswith(_MESSAGES_PATH + "/")


def error_response(error: ServingError, scope: Scope) -> Response:
    """Return the HTTP response for an error of a request."""
    is_anthropic = speaks_anthropic(scope)
    request_id: str | None = scope.get("state", {}).get("request_id")
    return Response(
        error_json(error, request_id) if is_anthropic else error_body(error),
        status_code=error.status,
        headers=error_headers(error),
        media_type="application/json",
    )


def json_response(body: object, *, status_code: int = 200) -> Response:
    """Return a JSON response."""
    return Response(orjson.dumps(body), status_code=status_code, media_type="application/json")


def log_error(request_id: str, error: ServingError) -> None:
    """Note a refusal or failure: ours loudly, the caller's quietly."""
    level = logging.WARNING if error.status >= 500 else logging.INFO
    logger.log(level, "%s %d %s: %s", request_id, error.status, type(error).__name__, error)


async def read_body(request: Request, *, max_bytes: int, timeout_s: float) -> bytes:
    """Read a request's body, giving up as soon as it is known to be too large.

    Raises:
        PayloadTooLarge: by Content-Length, or by what has arrived of a chunked body.
        RequestTimeout: it is not complete after `timeout_s` seconds.
        ClientDisconnected: the client left in the middle.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _read_body(request, max_bytes)
    except TimeoutError:
        raise RequestTimeout(
            f"the request body did not arrive within {timeout_s:g} s; send it faster"
        ) from None


async def _read_body(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    num_bytes = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        chunk = message.get("body", b"")
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the request body exceeds {max_bytes} bytes; send less")


@contextlib.asynccontextmanager
async def cancel_on_disconnect(receive: Receive) -> AsyncGenerator[None]:
    """Cancel the enclosed work when the client leaves.

    To be entered after the body has been read: from then on a client has nothing more to send.

    Raises:
        ClientDisconnected: instead of the CancelledError that ended the work. A cancellation that
            comes from elsewhere passes through as it is.
    """
    task = asyncio.current_task()
    assert task is not None
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if is_gone and task.uncancel() == 0:
            raise ClientDisconnected from None
        raise
    finally:
        watcher.cancel()


def _error_event(error: ServingError) -> bytes:
    return b"data: " + error_body(error) + b"\n\n"


class EventStream:
    """Server-sent events on one ASGI response.

    The status line waits for the first event, so that an early refusal can still have its own
    status, but no longer than `keep_alive_s`: from then on comments keep proxies from closing a
    connection that is silent while a request waits or prefills.

    Attributes:
        has_started: whether the status line has been sent.
    """

    def __init__(
        self,
        send: Send,
        headers: Mapping[str, str],
        *,
        keep_alive_s: float,
        done: bytes = DONE,
        error_event: Callable[[ServingError], bytes] = _error_event,
    ) -> None:
        """Write events to `send`.

        Args:
            send: ASGI's.
            headers: of the response.
            keep_alive_s: see the class.
            done: ends every stream.
            error_event: how an error looks that ends one.
        """
        self.has_started = False
        self._done = done
        self._error_event = error_event
        self._send = send
        self._keep_alive_s = keep_alive_s
        self._headers = MutableHeaders(headers)
        self._last_sent_s = time.monotonic()
        # Choices write from several tasks; the status line must come before all of them.
        self._lock = asyncio.Lock()

    async def write(self, data: bytes, *, is_last: bool = False) -> None:
        """Send events."""
        async with self._lock:
            if not self.has_started:
                self.has_started = True
                await self._send(
                    {
                        "type": "http.response.start",
                        "status": 200,
                        "headers": self._headers.raw,
                    }
                )
            self._last_sent_s = time.monotonic()
            await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})

    async def close(self, last_events: bytes) -> None:
        """Send the last events and end the response."""
        await self.write(last_events + self._done, is_last=True)

    async def fail(self, error: ServingError) -> None:
        """End a stream that has begun with an error event."""
        await self.close(self._error_event(error))

    @contextlib.asynccontextmanager
    async def kept_alive(self) -> AsyncGenerator[None]:
        """Send a comment whenever the stream has been silent for `keep_alive_s`."""
        keeper = asyncio.create_task(self._keep_alive())
        try:
            yield
        finally:
            keeper.cancel()

    async def _keep_alive(self) -> None:
        while True:
            silent_s = time.monotonic() - self._last_sent_s
            if silent_s >= self._keep_alive_s:
                await self.write(KEEP_ALIVE)
                silent_s = 0.0
            await asyncio.sleep(self._keep_alive_s - silent_s)


class RequestIdMiddleware:
    """Gives every request an id: the client's `X-Request-Id` where it is printable, else a new one.

    Found by handlers as `request.state.request_id`. Ray Serve's own proxy layer echoes the header;
    where there is none, this does (`echo`). Headers that a handler puts into its request's
    `state.headers` go with the answer, whoever writes it.
    """

    def __init__(self, app: ASGIApp, *, echo: bool) -> None:
        self._app = app
        self._echo = echo

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its id."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get("x-request-id", "")
        if not _SAFE_REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(state.get("headers", {}))
                if self._echo:
                    headers["X-Request-Id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_headers)


class AuthMiddleware:
    """Asks for an API key on every path but the probes', and for an admin's key on /admin.

    Neither key stands for the other. Without admin keys /admin is closed to everybody. Handlers
    find whose key it was in the state's `key_digest`; None where no key is asked for.
    """

    def __init__(
        self, app: ASGIApp, *, key_hashes: frozenset[str], admin_key_hashes: frozenset[str]
    ) -> None:
        self._app = app
        self._key_hashes = key_hashes
        self._admin_key_hashes = admin_key_hashes or frozenset({""})  # no digest is empty

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] == "http" and _path(scope) not in _OPEN_PATHS:
            headers = dict(scope["headers"])
            authorization: bytes | None = headers.get(b"authorization")
            is_anthropic = speaks_anthropic(scope)
            if is_anthropic and authorization is None and b"x-api-key" in headers:
                authorization = b"Bearer " + headers[b"x-api-key"]
            try:
                is_admin = _path(scope).startswith("/admin/")
                digest = check_key(
                    authorization, self._admin_key_hashes if is_admin else self._key_hashes
                )
            except AuthenticationError as error:
                await error_response(error, scope)(scope, receive, send)
                return
            scope.setdefault("state", {})["key_digest"] = digest
        await self._app(scope, receive, send)


def _path(scope: Scope) -> str:
    """The path below the application's route prefix."""
    return scope["path"].removeprefix(scope.get("root_path", ""))
