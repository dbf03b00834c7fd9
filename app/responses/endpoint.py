"""POST /v1/responses: whole, as a stream of events, or in the background.

Invariant: a stream that has begun ends with an event that carries the whole response.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from app.asgi import ClientDisconnected, EventStream, log_error
from app.completion_endpoint import SSE_HEADERS
from app.completion_service import CompletionService
from app.demands import read_demands
from app.exchange import Edge, Exchange
from app.http_exchange import CountedResponse, admitted_body
from app.http_trace import CLIENT_CLOSED_REQUEST
from app.ingress_config import IngressConfig
from app.responses.body import ResponseWriter, new_id
from app.responses.items import Item, with_ids
from app.responses.run import ResponseRun
from app.responses.schema import parse_items, parse_responses, rename_fault
from replicas.errors import InvalidRequest, RequestError, ServingError

# Serve sets up this logger's handlers in every replica, with the request id on each line.
logger = logging.getLogger("ray.serve")


class PreviousResponseNotFound(InvalidRequest):
    """There is no such response: it was not stored, it is too old, or it is another key's."""

    code = "previous_response_not_found"


class ResponsesEndpoint:
    """Creates responses."""

    def __init__(self, service: CompletionService, config: IngressConfig, edge: Edge) -> None:
        self._service = service
        self._config = config
        self._edge = edge

    async def create(self, request: Request) -> Response:
        """Answer one request."""
        return CountedResponse(self._answer, request, self._edge)

    async def _answer(self, request: Request, send: Send, exchange: Exchange) -> int:
        try:
            demands = read_demands(request.headers)
            async with admitted_body(request, exchange, self._config) as body:
                run = await self._plan(body, exchange.key)
                run.generation.demands = demands
                exchange.planned(run.generation, request.headers.get("traceparent"))
                if run.request.background:
                    return await self._answer_in_background(run, request, send, exchange)
                if run.request.stream:
                    return await self._stream(run, send, request.state.request_id)
                await run.run()
        except ClientDisconnected:
            return CLIENT_CLOSED_REQUEST
        return await _send_body(run, request, send)

    async def _plan(self, body: dict[str, Any], owner: str) -> ResponseRun:
        request = parse_responses(body)
        history = await self._history(request.previous_response_id, owner)
        try:
            generation = await self._service.plan_chat(request.as_chat(history))
        except RequestError as error:
            raise rename_fault(error) from error
        response_id = new_id("resp")
        generation.header = dataclasses.replace(generation.header, id=response_id)
        sampling = generation.choices[0].sampling
        writer = ResponseWriter(
            request,
            response_id=response_id,
            model=generation.header.model,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
        )
        return ResponseRun(
            request,
            generation,
            writer,
            items=orjson.dumps(with_ids([*history, *request.input], new_id)),
            owner=owner,
            service=self._service,
            edge=self._edge,
        )

    async def _history(self, response_id: str | None, owner: str) -> tuple[Item, ...]:
        """The conversation up to a response, its output included."""
        if response_id is None:
            return ()
        stored = await self._edge.shared.get_response(owner, response_id)
        if stored is None:
            raise PreviousResponseNotFound(
                f"there is no response '{response_id}': responses are kept for a while only, and "
                "not with 'store': false",
                param="previous_response_id",
            )
        previous: dict[str, Any] = orjson.loads(stored.body)
        if previous["status"] == "in_progress":
            raise InvalidRequest(
                f"the response '{response_id}' has not ended yet", param="previous_response_id"
            )
        return parse_items(orjson.loads(stored.items) + previous["output"])

    async def _stream(self, run: ResponseRun, send: Send, request_id: str) -> int:
        events = EventStream(send, SSE_HEADERS, keep_alive_s=self._config.keep_alive_s, done=b"")

        async def emit(data: bytes, *, is_last: bool) -> None:
            await (events.close(data) if is_last else events.write(data))

        async with events.kept_alive():
            try:
                return await run.run(emit)
            except ServingError as error:
                if not events.has_started:
                    raise
                # Comments have gone out while it waited: the status line cannot tell any more.
                log_error(request_id, error)
                await events.close(run.writer.begin() + run.writer.fail(error))
                return error.status

    async def _answer_in_background(
        self, run: ResponseRun, request: Request, send: Send, exchange: Exchange
    ) -> int:
        await run.register()
        relay: asyncio.Queue[tuple[bytes, bool]] | None = None
        if run.request.stream:
            relay = asyncio.Queue()
        exchange.detach()
        self._edge.spawn(_run_detached(run, relay, exchange))
        if relay is None:
            return await _send_body(run, request, send)
        events = EventStream(send, SSE_HEADERS, keep_alive_s=self._config.keep_alive_s, done=b"")
        async with events.kept_alive():
            is_last = False
            while not is_last:
                data, is_last = await relay.get()
                await (events.close(data) if is_last else events.write(data))
        return 200


async def _run_detached(
    run: ResponseRun, relay: asyncio.Queue[tuple[bytes, bool]] | None, exchange: Exchange
) -> None:
    """Run a response whether or not anybody listens."""

    async def emit(data: bytes, *, is_last: bool) -> None:
        if relay is not None:
            relay.put_nowait((data, is_last))

    status, failure = 500, None
    try:
        status = await run.run(None if relay is None else emit)
    except Exception as error:
        failure = error
        logger.exception("%s failed in the background", run.writer.id, exc_info=error)
        await emit(b"", is_last=True)
    finally:
        exchange.work_ended(status, failure)


async def _send_body(run: ResponseRun, request: Request, send: Send) -> int:
    response = Response(run.writer.body(), media_type="application/json")
    await response(request.scope, request.receive, send)
    return 200
