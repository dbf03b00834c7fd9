"""The HTTP endpoints: a Starlette app over a CompletionService.

Owns paths, methods and status codes; knows neither Ray nor how a completion is made. Invariant:
whatever a client sends, the answer has the endpoint's schema or OpenAI's error shape.
"""

from __future__ import annotations

import logging

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.admin_endpoints import AdminEndpoints
from app.anthropic_errors import messages_error_event
from app.anthropic_response import MessagesPlanner
from app.asgi import AuthMiddleware, RequestIdMiddleware, error_response, log_error
from app.completion_endpoint import CompletionEndpoint
from app.completion_service import CompletionService
from app.errors import MethodNotAllowed, PathNotFound, internal_error
from app.exchange import Edge
from app.ingress_config import IngressConfig
from app.metrics import IngressMetrics
from app.responses.endpoint import ResponsesEndpoint
from app.responses.stored import StoredResponses
from app.shared_state import SharedState
from app.system_endpoints import SystemEndpoints
from app.text_endpoints import TextEndpoints
from app.token_client import TokenClient
from replicas.errors import RequestError, ServingError
from replicas.tracing import Tracing

# Serve sets up this logger's handlers in every replica, with the request id on each line.
logger = logging.getLogger("ray.serve")


def create_app(
    service: CompletionService,
    client: TokenClient,
    config: IngressConfig,
    metrics: IngressMetrics,
    *,
    tracing: Tracing | None = None,
    edge: Edge | None = None,
    echo_request_id: bool,
) -> Starlette:
    """Build the ASGI app.

    Args:
        service: makes the completions.
        client: asked for the replicas' state by the probes and metrics.
        config: limits and keys.
        metrics: counts the requests.
        tracing: makes a span of each completion; None: of none. Counts without `edge` only.
        edge: what requests pass on their way in and out; None: one that shares its state with
            nobody.
        echo_request_id: answer with `X-Request-Id`; Serve does so itself.
    """
    edge = edge or Edge(config, metrics, SharedState(), tracing=tracing)
    completions = CompletionEndpoint(service.plan_completion, service, config, edge)
    chat = CompletionEndpoint(service.plan_chat, service, config, edge)
    system = SystemEndpoints(service, client, config, metrics)
    messages = CompletionEndpoint(
        MessagesPlanner(service).plan,
        service,
        config,
        edge,
        done=b"",
        error_event=messages_error_event,
    )
    text = TextEndpoints(service, config, edge)
    responses = ResponsesEndpoint(service, config, edge)
    stored = StoredResponses(edge)
    admin = AdminEndpoints(client)
    app = Starlette(
        routes=[
            Route("/v1/completions", completions.handle, methods=["POST"]),
            Route("/v1/chat/completions", chat.handle, methods=["POST"]),
            Route("/v1/chat/completions/render", text.render_chat, methods=["POST"]),
            Route("/v1/messages", messages.handle, methods=["POST"]),
            Route("/v1/messages/count_tokens", text.count_tokens, methods=["POST"]),
            Route("/v1/responses", responses.create, methods=["POST"]),
            Route("/v1/responses/{response_id}", stored.retrieve, methods=["GET"]),
            Route("/v1/responses/{response_id}", stored.delete, methods=["DELETE"]),
            Route("/v1/responses/{response_id}/cancel", stored.cancel, methods=["POST"]),
            Route("/v1/responses/{response_id}/input_items", stored.list_input_items),
            Route("/v1/score", text.score, methods=["POST"]),
            Route("/tokenize", text.tokenize, methods=["POST"]),
            Route("/detokenize", text.detokenize, methods=["POST"]),
            Route("/v1/models", system.list_models),
            Route("/v1/models/{model_id:path}", system.get_model),
            Route("/admin/reset_prefix_cache", admin.reset_prefix_cache, methods=["POST"]),
            Route("/admin/profile", admin.profile, methods=["POST"]),
            Route("/admin/drain", admin.drain, methods=["POST"]),
            Route("/admin/resume", admin.resume, methods=["POST"]),
            Route("/openapi.json", system.openapi),
            Route("/health", system.health),
            Route("/ready", system.ready),
            Route("/version", system.version),
            Route("/metrics", system.metrics),
        ],
        middleware=[
            Middleware(RequestIdMiddleware, echo=echo_request_id),
            Middleware(
                AuthMiddleware,
                key_hashes=config.key_hashes,
                admin_key_hashes=config.admin_key_hashes,
            ),
        ],
        exception_handlers={
            ServingError: _on_serving_error,
            HTTPException: _on_http_exception,
            Exception: _on_unexpected_error,
        },
    )
    app.router.redirect_slashes = False
    return app


async def _on_serving_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServingError)
    log_error(request.state.request_id, error)
    return error_response(error, request.scope)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        response = error_response(
            MethodNotAllowed(f"{path} does not answer to {request.method}; use {allow}"),
            request.scope,
        )
        response.headers["Allow"] = allow
        return response
    if error.status_code == 404:
        return error_response(PathNotFound(f"there is nothing at {path}"), request.scope)
    return error_response(RequestError(error.detail), request.scope)


async def _on_unexpected_error(request: Request, error: Exception) -> Response:
    logger.error("%s failed", request.state.request_id, exc_info=error)
    failure = internal_error()
    return error_response(failure, request.scope)
