"""POST of completions and chat completions: whole, or as a stream of server-sent events.

Owns what an answer looks like on the wire, and what happens when the client leaves; knows not how a
completion is made. Invariant: an answer that has begun ends with its last event or with an error's.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from app.asgi import ClientDisconnected, EventStream, log_error
from app.choice import Choice, Piece
from app.completion_service import CompletionService
from app.demands import read_demands
from app.errors import internal_error
from app.exchange import Edge, Exchange
from app.generation import Generation
from app.http_exchange import CountedResponse, admitted_body
from app.http_trace import CLIENT_CLOSED_REQUEST
from app.ingress_config import IngressConfig
from app.openai_response import DONE, StreamFormat
from replicas.errors import ServingError

# Serve sets up this logger's handlers in every replica, with the request id on each line.
logger = logging.getLogger("ray.serve")

SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}

Plan = Callable[[dict[str, object]], Awaitable[Generation]]


class CompletionEndpoint:
    """POST of one of the completion endpoints."""

    def __init__(
        self,
        plan: Plan,
        service: CompletionService,
        config: IngressConfig,
        edge: Edge,
        *,
        done: bytes = DONE,
        error_event: Callable[[ServingError, str], bytes] | None = None,
    ) -> None:
        """Answer what `plan` understands.

        Args:
            plan: turns a body into a generation.
            service: runs it.
            config: limits.
            edge: what requests pass on their way in and out.
            done: ends every stream.
            error_event: how an error of a request looks that ends one; None: OpenAI's way.
        """
        self._done = done
        self._error_event = error_event
        self._plan = plan
        self._service = service
        self._config = config
        self._edge = edge

    async def handle(self, request: Request) -> Response:
        """Answer one request, whole or as a stream."""
        return CountedResponse(self._answer, request, self._edge)

    async def _answer(self, request: Request, send: Send, exchange: Exchange) -> int:
        """Write the whole answer; return its status."""
        try:
            demands = read_demands(request.headers)
            async with admitted_body(request, exchange, self._config) as body:
                generation = await self._plan(body)
                generation.demands = demands
                exchange.planned(generation, request.headers.get("traceparent"))
                if generation.params.stream:
                    return await self._stream(generation, send, request.state.request_id)
                outputs = await self._service.collect(generation)
        except ClientDisconnected:
            logger.info("%s client left before the end", request.state.request_id)
            return CLIENT_CLOSED_REQUEST
        response = Response(generation.body(outputs), media_type="application/json")
        await response(request.scope, request.receive, send)
        return 200

    async def _stream(self, generation: Generation, send: Send, request_id: str) -> int:
        events = self._event_stream(send, request_id)
        chunks = generation.stream_format()
        formats = [generation.logprob_format() for _ in generation.choices]
        num_open = len(generation.choices)
        has_begun = [False] * num_open

        async def emit(choice: Choice, piece: Piece) -> None:
            nonlocal num_open
            index = choice.index
            data = b""
            if not has_begun[index]:
                has_begun[index] = True
                data = chunks.first(index, choice.prompt_token_ids)
                if (echo := generation.echo(choice, formats[index])) is not None:
                    data += chunks.text(index, echo[0], (), echo[1])
            shows_tokens = generation.params.return_token_ids or piece.logprobs is not None
            if piece.text or piece.message or (piece.token_ids and shows_tokens):
                logprobs = piece.logprobs and formats[index].render(piece.token_ids, piece.logprobs)
                data += _chunk(chunks, index, piece, logprobs)
            if choice.finish_reason is not None:
                data += chunks.last(index, choice.finish_reason)
                num_open -= 1
            if num_open == 0:
                await events.close(data + chunks.usage(generation.usage()))
            elif data:
                await events.write(data)

        async with events.kept_alive():
            try:
                await self._service.run(generation, emit)
            except ServingError as error:
                if not events.has_started:
                    raise
                log_error(request_id, error)
                await events.fail(error)
                return error.status
            except Exception as error:
                if not events.has_started:
                    raise
                logger.exception("%s failed in mid-stream", request_id, exc_info=error)
                await events.fail(internal_error())
                return 500
        return 200

    def _event_stream(self, send: Send, request_id: str) -> EventStream:
        keep_alive_s, error_event = self._config.keep_alive_s, self._error_event
        if error_event is None:
            return EventStream(send, SSE_HEADERS, keep_alive_s=keep_alive_s, done=self._done)
        return EventStream(
            send,
            SSE_HEADERS,
            keep_alive_s=keep_alive_s,
            done=self._done,
            error_event=lambda error: error_event(error, request_id),
        )


def _chunk(
    chunks: StreamFormat, index: int, piece: Piece, logprobs: dict[str, Any] | None
) -> bytes:
    if piece.message is None:
        return chunks.text(index, piece.text, piece.token_ids, logprobs)
    return chunks.message(index, piece.message, piece.token_ids, logprobs)
