"""The HTTP endpoints: a Starlette app over a CompletionService.

Owns paths, methods and status codes; knows neither Ray nor how a completion is made. Invariant:
whatever a client sends, the answer has the endpoint's schema or OpenAI's error shape.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from app.asgi import (
    AuthMiddleware,
    ClientDisconnected,
    EventStream,
    RequestIdMiddleware,
    cancel_on_disconnect,
    error_response,
    read_body,
)
from app.choice import Choice
from app.completion_service import CompletionService, Generation, TokenClient
from app.errors import MethodNotAllowed, PathNotFound
from app.http_trace import CLIENT_CLOSED_REQUEST, HttpTrace
from app.ingress_config import IngressConfig
from app.metrics import CONTENT_TYPE, IngressMetrics
from app.openai_schema import parse_json
from app.version import VERSION
from replicas.errors import EngineNotReady, ModelNotFound, RequestError, ServingError
from replicas.tracing import Tracing

# Serve sets up this logger's handlers in every replica, with the request id on each line.
logger = logging.getLogger("ray.serve")

_STATUS_TIMEOUT_S = 1.5
_SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}

Plan = Callable[[dict[str, object]], Awaitable[Generation]]


def create_app(
    service: CompletionService,
    client: TokenClient,
    config: IngressConfig,
    metrics: IngressMetrics,
    *,
    tracing: Tracing | None = None,
    echo_request_id: bool,
) -> Starlette:
    """Build the ASGI app.

    Args:
        service: makes the completions.
        client: asked for the replicas' state by the probes and metrics.
        config: limits and keys.
        metrics: counts the requests.
        tracing: makes a span of each completion; None: of none.
        echo_request_id: answer with `X-Request-Id`; Serve does so itself.
    """
    completions = _CompletionEndpoint(service.plan_completion, service, config, metrics, tracing)
    chat = _CompletionEndpoint(service.plan_chat, service, config, metrics, tracing)
    system = _SystemEndpoints(service, client, config, metrics)
    app = Starlette(
        routes=[
            Route("/v1/completions", completions.handle, methods=["POST"]),
            Route("/v1/chat/completions", chat.handle, methods=["POST"]),
            Route("/v1/models", system.list_models),
            Route("/v1/models/{model_id:path}", system.get_model),
            Route("/health", system.health),
            Route("/ready", system.ready),
            Route("/version", system.version),
            Route("/metrics", system.metrics),
        ],
        middleware=[
            Middleware(RequestIdMiddleware, echo=echo_request_id),
            Middleware(AuthMiddleware, key_hashes=config.key_hashes),
        ],
        exception_handlers={
            ServingError: _on_serving_error,
            HTTPException: _on_http_exception,
            Exception: _on_unexpected_error,
        },
    )
    app.router.redirect_slashes = False
    return app


class _CompletionEndpoint:
    """POST of one of the completion endpoints."""

    def __init__(
        self,
        plan: Plan,
        service: CompletionService,
        config: IngressConfig,
        metrics: IngressMetrics,
        tracing: Tracing | None,
    ) -> None:
        self._plan = plan
        self._service = service
        self._config = config
        self._metrics = metrics
        self._tracing = tracing

    async def handle(self, request: Request) -> Response:
        """Answer one request, whole or as a stream."""
        return _CompletionResponse(self._answer, request, self._metrics, self._tracing)

    async def _answer(self, request: Request, send: Send, trace: HttpTrace | None) -> int:
        """Write the whole answer; return its status."""
        try:
            body = await read_body(request, max_bytes=self._config.max_body_bytes)
            async with cancel_on_disconnect(request.receive):
                generation = await self._plan(parse_json(body))
                if trace is None:
                    generation.traceparent = request.headers.get("traceparent")
                else:
                    generation.traceparent = trace.planned(generation)
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
        events = EventStream(send, _SSE_HEADERS, keep_alive_s=self._config.keep_alive_s)
        chunks = generation.stream_format()
        num_open = len(generation.choices)
        has_begun = [False] * num_open

        async def emit(choice: Choice, text: str, token_ids: Sequence[int]) -> None:
            nonlocal num_open
            index = choice.index
            data = b""
            if not has_begun[index]:
                has_begun[index] = True
                data = chunks.first(index, choice.prompt_token_ids)
            if text or (token_ids and generation.params.return_token_ids):
                data += chunks.text(index, text, token_ids)
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
                _log_error(request_id, error)
                await events.fail(error)
                return error.status
            except Exception as error:
                if not events.has_started:
                    raise
                logger.exception("%s failed in mid-stream", request_id, exc_info=error)
                await events.fail(ServingError("internal error; the server's log has the details"))
                return 500
        return 200


class _CompletionResponse(Response):
    """Runs an answer when Starlette calls it, and counts it when it has ended."""

    def __init__(
        self,
        answer: Callable[[Request, Send, HttpTrace | None], Awaitable[int]],
        request: Request,
        metrics: IngressMetrics,
        tracing: Tracing | None,
    ) -> None:
        super().__init__()
        self._answer = answer
        self._request = request
        self._metrics = metrics
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start_s = time.perf_counter()
        status = CLIENT_CLOSED_REQUEST  # stands if the server around us cancels: the client left
        error: Exception | None = None
        trace = None if self._tracing is None else HttpTrace(self._tracing, self._request)
        self._metrics.in_progress.inc()
        try:
            status = await self._answer(self._request, send, trace)
        except ServingError as failure:
            status, error = failure.status, failure
            raise
        except Exception as failure:
            status, error = 500, failure
            raise
        finally:
            self._metrics.in_progress.dec()
            duration_s = time.perf_counter() - start_s
            self._metrics.request_ended(scope["path"], status, duration_s)
            if trace is not None:
                trace.ended(status, error)


class _SystemEndpoints:
    """Probes, models, version and metrics."""

    def __init__(
        self,
        service: CompletionService,
        client: TokenClient,
        config: IngressConfig,
        metrics: IngressMetrics,
    ) -> None:
        self._service = service
        self._client = client
        self._config = config
        self._metrics = metrics
        self._started_s = int(time.time())
        self._progress: dict[str, object] = {"stage": "starting the router"}

    async def health(self, _: Request) -> Response:
        """This process lives. Nothing else is asked: see /ready."""
        return _json({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """Whether a request would be answered now: a replica has finished its warm-up."""
        body: dict[str, object] = {"ready": False, "model": self._config.model_id}
        try:
            async with asyncio.timeout(_STATUS_TIMEOUT_S):
                status = await self._client.status()
        except (ServingError, TimeoutError):
            return _json({**body, **self._progress}, status_code=503)
        body |= {
            "ready": status.ready,
            "num_replicas": len(status.replicas),
            "num_starting_replicas": len(status.startup),
            "num_queued_requests": status.num_queued,
        }
        if status.ready:
            return _json({**body, "stage": "ready"})
        # Of several that start, the one that has come furthest in its stage.
        first = max(status.startup, key=lambda p: p.done / max(1, p.total), default=None)
        self._progress = {"stage": "starting replicas"}
        if first is not None:
            self._progress = {"stage": first.stage, "done": first.done, "total": first.total}
        return _json({**body, **self._progress}, status_code=503)

    async def version(self, _: Request) -> Response:
        """Return the software's version, and what identifies the model once it is loaded."""
        body: dict[str, object] = {"version": VERSION}
        try:
            info = await self._service.model_info()
        except EngineNotReady:
            return _json({**body, "model": self._config.model_id})
        body |= {
            "model": self._config.model_id,
            "fingerprint": info.fingerprint,
            "max_model_len": info.max_model_len,
        }
        return _json(body)

    async def list_models(self, _: Request) -> Response:
        """List the one model that this application serves."""
        return _json({"object": "list", "data": [await self._model()]})

    async def get_model(self, request: Request) -> Response:
        """Describe a model by its id."""
        model_id = request.path_params["model_id"]
        if model_id != self._config.model_id:
            raise ModelNotFound(
                f"the model '{model_id}' is not served here; this server serves "
                f"'{self._config.model_id}'",
                param="model",
            )
        return _json(await self._model())

    async def metrics(self, _: Request) -> Response:
        """Return Prometheus text; the engines' part is left out while the router is silent."""
        try:
            async with asyncio.timeout(_STATUS_TIMEOUT_S):
                status = await self._client.status()
        except (ServingError, TimeoutError):
            status = None
        self._metrics.open_sequences.set(self._client.num_open)
        text = self._metrics.render(status)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def _model(self) -> dict[str, object]:
        model: dict[str, object] = {
            "id": self._config.model_id,
            "object": "model",
            "created": self._started_s,
            "owned_by": "systole",
        }
        with contextlib.suppress(EngineNotReady):
            model["max_model_len"] = (await self._service.model_info()).max_request_tokens
        return model


def _json(body: object, *, status_code: int = 200) -> Response:
    return Response(orjson.dumps(body), status_code=status_code, media_type="application/json")


async def _on_serving_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServingError)
    _log_error(request.state.request_id, error)
    return error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        response = error_response(
            MethodNotAllowed(f"{path} does not answer to {request.method}; use {allow}")
        )
        response.headers["Allow"] = allow
        return response
    if error.status_code == 404:
        return error_response(PathNotFound(f"there is nothing at {path}"))
    return error_response(RequestError(error.detail))


async def _on_unexpected_error(request: Request, error: Exception) -> Response:
    logger.error("%s failed", request.state.request_id, exc_info=error)
    return error_response(ServingError("internal error; the server's log has the details"))


def _log_error(request_id: str, error: ServingError) -> None:
    level = logging.WARNING if error.status >= 500 else logging.INFO
    logger.log(level, "%s %d %s: %s", request_id, error.status, type(error).__name__, error)
