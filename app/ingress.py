"""The Ingress deployment: one HTTP edge with its own tokenizer and token sink.

Wires the parts together inside a Serve replica and offers the same completions to other
deployments by handle. Invariant: it holds no state that another ingress replica would need.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, override

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from app.choice import Choice, Piece
from app.client import LLMClient
from app.completion_service import CompletionService
from app.errors import ConfigError
from app.frame_server import PortRange
from app.generation_config import load_sampling_defaults
from app.http_api import create_app
from app.ingress_config import IngressConfig
from app.light_settings import apply_ingress_settings
from app.metrics import IngressMetrics
from app.tokenizer import Tokenizer
from replicas.config import TracingConfig
from replicas.errors import InvalidRequest
from replicas.tracing import start_tracing

logger = logging.getLogger("ray.serve")


class Ingress:
    """One ingress replica. `app.build` wraps it with `serve.ingress()` and binds it."""

    def __init__(
        self,
        router: DeploymentHandle[Any],
        config: IngressConfig,
        *,
        tracing: TracingConfig | None = None,
        sink_ports: PortRange | None = None,
    ) -> None:
        """Load the tokenizer; connections are made on first use.

        Args:
            router: handle of the RouterDeployment.
            config: limits and keys.
            tracing: where the spans of HTTP requests go; None: nowhere.
            sink_ports: first and last port on which tokens may arrive; None: any.
        """
        replica_id = serve.get_replica_context().replica_id.unique_id
        self._args = config
        self._is_configured = False
        self._client = LLMClient(router, sink_ports=sink_ports)
        self._metrics = IngressMetrics(replica_id)
        self._tracing = start_tracing(
            tracing or TracingConfig(), service="ingress", instance=replica_id
        )
        self._tokenizer = Tokenizer.load(Path(config.model_dir))
        self._defaults = load_sampling_defaults(Path(config.model_dir))
        self._service, app = self._assemble(config)
        self._app = _CurrentApp(app)

    def __serve_build_asgi_app__(self) -> Starlette:
        """Give Serve the HTTP side; Serve itself echoes X-Request-Id."""
        return self._app

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take the settings of Serve's `user_config` in place of those of `args`.

        For requests from now on; those that run end as they began.

        Raises:
            ConfigError: a setting is unknown or wrong, and this is the replica's start; later the
                settings in force stay, and the log says so.
        """
        try:
            config = apply_ingress_settings(self._args, user_config)
        except ConfigError as error:
            if not self._is_configured:
                raise
            logger.error("user_config of the ingress is not used: %s", error)
            return
        self._is_configured = True
        self._service, self._app.current = self._assemble(config)
        logger.info("the ingress' settings are now %s", config)

    def _assemble(self, config: IngressConfig) -> tuple[CompletionService, Starlette]:
        """Build what holds the configuration over what outlives it."""
        service = CompletionService(
            self._client, self._tokenizer, config, self._metrics, self._defaults
        )
        app = create_app(
            service,
            self._client,
            config,
            self._metrics,
            tracing=self._tracing,
            echo_request_id=False,
        )
        return service, app

    async def generate(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """Stream a completion to a caller that has a Serve handle and nothing else.

        Call it as `handle.options(stream=True).generate.remote(body)`. What is ready when the
        caller asks for the next item comes as one item.

        Args:
            body: as for POST /v1/completions, or /v1/chat/completions where it has `messages`.

        Yields:
            Items with `index`, `text`, `token_ids` and `finish_reason` (None until the choice's
            last item), where there are any `reasoning_content` and `tool_calls` (each with
            `index`, `id`, `name` and `arguments`), then one with `usage`.

        Raises:
            ServingError: the request is refused or fails.
        """
        plan = self._service.plan_chat if "messages" in body else self._service.plan_completion
        generation = await plan(body)
        if generation.echoes or generation.choices[0].sampling.prompt_logprobs is not None:
            raise InvalidRequest("'echo' and 'prompt_logprobs' are for HTTP", param="echo")
        if generation.wants_logprobs:
            raise InvalidRequest("'logprobs' are for HTTP", param="logprobs")
        mailbox = _Mailbox()
        run = asyncio.create_task(self._service.run(generation, mailbox.put))
        run.add_done_callback(mailbox.close)
        try:
            while items := await mailbox.take():
                for item in items:
                    yield item
            await run
            yield {"usage": generation.usage().as_json()}
        finally:
            run.cancel()
            await asyncio.wait((run,))

    async def __del__(self) -> None:
        """Close the token sink; Serve awaits this when the replica has drained."""
        if tracing := getattr(self, "_tracing", None):
            await asyncio.to_thread(tracing.shutdown)
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


class _Mailbox:
    """Collects output between two reads: one item per choice that has something new."""

    def __init__(self) -> None:
        self._items: dict[int, dict[str, Any]] = {}
        self._has_news = asyncio.Event()

    async def put(self, choice: Choice, piece: Piece) -> None:
        """Add to the choice's item."""
        empty: dict[str, Any] = {"index": choice.index, "text": "", "token_ids": []}
        item = self._items.setdefault(choice.index, empty)
        item["text"] += piece.text
        item["token_ids"] += piece.token_ids
        if piece.message is not None:
            item["reasoning_content"] = item.get("reasoning_content", "") + piece.message.reasoning
            calls = [dataclasses.asdict(call) for call in piece.message.tool_calls]
            item["tool_calls"] = item.get("tool_calls", []) + calls
        item["finish_reason"] = choice.finish_reason
        self._has_news.set()

    def close(self, _: object) -> None:
        """Wake the reader for the last time."""
        self._has_news.set()

    async def take(self) -> list[dict[str, Any]]:
        """Wait for output and take it all; empty when there will be no more."""
        await self._has_news.wait()
        self._has_news.clear()
        items, self._items = self._items, {}
        return list(items.values())
