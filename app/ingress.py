"""The Ingress deployment: one HTTP edge with its own tokenizer and token sink.

Wires the parts together inside a Serve replica and offers the same completions to other
deployments by handle. Invariant: it holds no state that another ingress replica would need.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncGenerator
from typing import Any, Final, override

from ray import serve
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from app.client import LLMClient
from app.coalesced import stream_items
from app.completion_service import CompletionService
from app.content_filter import ContentFilter, load_check
from app.exchange import Edge
from app.frame_server import PortRange
from app.generation_config import load_sampling_defaults
from app.grpc import generation_pb2 as pb
from app.grpc.endpoint import GrpcEndpoint, error_chunk
from app.http_api import create_app
from app.ingress_config import IngressConfig
from app.light_settings import UserConfig, apply_ingress_settings
from app.metrics import IngressMetrics
from app.shared_state import SharedStateHandle
from app.tokenizer import Tokenizer
from replicas.config import TracingConfig
from replicas.errors import ServingError
from replicas.garbage import freeze_started
from replicas.model_files.fetch import fetch_model
from replicas.tracing import start_tracing

_untyped_serve: Final[Any] = serve

CANCEL_TIMEOUT_S = 5.0
"""How long the other ingress replicas have to say whether they cancelled a request."""


class Ingress:
    """One ingress replica. `app.build` wraps it with `serve.ingress()` and binds it."""

    def __init__(
        self,
        router: DeploymentHandle[Any],
        config: IngressConfig,
        shared: DeploymentHandle[Any],
        *,
        tracing: TracingConfig | None = None,
        sink_ports: PortRange | None = None,
    ) -> None:
        """Load the tokenizer; connections are made on first use.

        Args:
            router: handle of the RouterDeployment.
            config: limits and keys.
            shared: handle of the SharedState.
            tracing: where the spans of HTTP requests go; None: nowhere.
            sink_ports: first and last port on which tokens may arrive; None: any.
        """
        replica_id = serve.get_replica_context().replica_id.unique_id
        self._client = LLMClient(router, sink_ports=sink_ports)
        self._metrics = IngressMetrics(replica_id)
        self._tracing = start_tracing(
            tracing or TracingConfig(), service="ingress", instance=replica_id
        )
        directory = fetch_model(config.model_dir, "tokenizer", cache=config.model_cache)
        config = dataclasses.replace(config, model_dir=str(directory))
        self._user_config = UserConfig(
            "the ingress", functools.partial(apply_ingress_settings, config)
        )
        check = config.content_filter
        self._service = CompletionService(
            self._client,
            Tokenizer.load(directory),
            config,
            self._metrics,
            load_sampling_defaults(directory),
            content_filter=None if check is None else ContentFilter(load_check(check)),
        )
        self._edge = Edge(config, self._metrics, SharedStateHandle(shared), tracing=self._tracing)
        self._app = _CurrentApp(self._make_app(config))
        self._grpc = GrpcEndpoint(self._service, config, self._edge)
        freeze_started()

    def __serve_build_asgi_app__(self) -> Starlette:
        """Give Serve the HTTP side; Serve itself echoes X-Request-Id."""
        return self._app

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take the settings of Serve's `user_config` in place of those of `args`.

        For requests from now on; those that run end as they began.

        Raises:
            ConfigError: see `UserConfig.take`.
        """
        config = self._user_config.take(user_config)
        if config is not None:
            self._edge.config = config
            self._service.reconfigure(config)
            self._app.current = self._make_app(config)
            self._grpc.reconfigure(config)

    def _make_app(self, config: IngressConfig) -> Starlette:
        """Build the HTTP side, whose parts hold the configuration, over what outlives it."""
        return create_app(
            self._service,
            self._client,
            config,
            self._metrics,
            edge=self._edge,
            echo_request_id=False,
        )

    async def generate(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """Stream a completion to a caller that has a Serve handle and nothing else.

        Call it as `handle.options(stream=True).generate.remote(body)`. What is ready when the
        caller asks for the next item comes as one item.

        Args:
            body: as for POST /v1/completions, or /v1/chat/completions where it has `messages`.

        Yields:
            See `app.coalesced.stream_items`.

        Raises:
            ServingError: the request is refused or fails.
        """
        plan = self._service.plan_chat if "messages" in body else self._service.plan_completion
        items = stream_items(self._service, await plan(body))
        async with contextlib.aclosing(items):
            async for item in items:
                yield item

    async def Generate(
        self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> pb.GenerateResponse:
        """Answer a gRPC call as a whole."""
        try:
            return await self._grpc.generate(request, grpc_context)
        except ServingError:
            # Serve would drop the trailing metadata if this were raised. The status is in the
            # context, and a message with another status than OK is not sent.
            return pb.GenerateResponse()

    async def Stream(
        self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[pb.GenerateChunk]:
        """Answer a gRPC call in pieces."""
        chunks = self._grpc.stream(request, grpc_context)
        async with contextlib.aclosing(chunks):
            try:
                async for chunk in chunks:
                    yield chunk
            except ServingError as error:  # as in Generate, but for the last message
                yield error_chunk(error)

    async def Cancel(
        self, request: pb.CancelRequest, grpc_context: RayServegRPCContext
    ) -> pb.CancelResponse:
        """End a request that runs at any ingress replica."""
        try:
            key = self._grpc.authenticate(grpc_context)
        except ServingError:  # as in Generate
            return pb.CancelResponse()
        context = serve.get_replica_context()
        ingress: Any = _untyped_serve.get_deployment_handle(context.deployment, context.app_name)
        answers = await ingress.broadcast("cancel_request", request.request_id, key).results_async(
            timeout_s=CANCEL_TIMEOUT_S, return_exceptions=True
        )
        return pb.CancelResponse(was_running=any(answer is True for answer in answers))

    async def cancel_request(self, request_id: str, key: str) -> bool:
        """End a request of a key that runs here; return whether there was one."""
        return self._grpc.cancel(request_id, key)

    async def __del__(self) -> None:
        """Close the token sink; Serve awaits this when the replica has drained."""
        if edge := getattr(self, "_edge", None):
            await edge.close()
        if tracing := getattr(self, "_tracing", None):
            await asyncio.to_thread(tracing.shutdown)
        if service := getattr(self, "_service", None):
            await service.close()
        if client := getattr(self, "_client", None):
            await client.close()


class _CurrentApp(Starlette):
    """What Serve is given for good; the app behind it changes with the settings."""

    def __init__(self, current: Starlette) -> None:
        super().__init__(routes=current.routes)
        self.current = current

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.current(scope, receive, send)
