"""An exchange over HTTP: opened when Starlette runs the answer, ended however that ends."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.asgi import cancel_on_disconnect, read_body
from app.exchange import Edge, Exchange
from app.http_trace import CLIENT_CLOSED_REQUEST, HttpTrace
from app.ingress_config import IngressConfig
from app.schema_faults import parse_json
from replicas.errors import ServingError

Answer = Callable[[Request, Send, Exchange], Awaitable[int]]


@contextlib.asynccontextmanager
async def admitted_body(
    request: Request, exchange: Exchange, config: IngressConfig, *, is_charged: bool = True
) -> AsyncGenerator[dict[str, Any]]:
    """Read a request's JSON body, have it admitted, and end what is within if the client leaves.

    Args:
        request: whose body has not been read.
        exchange: asks for admission.
        config: limits the body's size and time.
        is_charged: it uses tokens of its key's limit, estimated from its size.

    Raises:
        ServingError: it is too large or too slow, no JSON object, or over the limit.
        ClientDisconnected: the client left.
    """
    raw = await read_body(request, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s)
    async with cancel_on_disconnect(request.receive):
        body = parse_json(raw)
        await exchange.admit(body, num_bytes=len(raw) if is_charged else 0)
        yield body


class CountedResponse(Response):
    """Runs an answer when Starlette calls it, and notes how it ended."""

    def __init__(
        self, answer: Answer, request: Request, edge: Edge, *, endpoint: str | None = None
    ) -> None:
        """Prepare an answer.

        Args:
            answer: writes the whole answer and returns its status.
            request: to be answered.
            edge: what requests pass on their way in and out.
            endpoint: for metrics and audit, where the path itself holds an id.
        """
        super().__init__()
        self._answer = answer
        self._request = request
        self._edge = edge
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and count it however it ends."""
        request, edge = self._request, self._edge
        exchange = edge.open(
            key=edge.key_name(request.scope["state"].get("key_digest")),
            request_id=request.state.request_id,
            endpoint=self._endpoint or scope["path"],
            trace=None if edge.tracing is None else HttpTrace(edge.tracing, request),
        )
        # The middleware adds these to whatever is answered, errors included.
        request.state.headers = exchange.headers
        status = CLIENT_CLOSED_REQUEST  # stands if the server around us cancels: the client left
        error: Exception | None = None
        try:
            status = await self._answer(request, send, exchange)
        except ServingError as failure:
            status, error = failure.status, failure
            raise
        except Exception as failure:
            status, error = 500, failure
            raise
        finally:
            exchange.ended(status, error)
