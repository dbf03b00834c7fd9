"""The Ingress deployment: one HTTP edge with its own tokenizer and token sink.

Wires the parts together inside a Serve replica and offers the same completions to other
deployments by handle. Invariant: it holds no state that another ingress replica would need.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from app.choice import Choice, Piece
from app.client import LLMClient
from app.completion_service import CompletionService
from app.generation_config import load_sampling_defaults
from app.http_api import create_app
from app.ingress_config import IngressConfig
from app.metrics import IngressMetrics
from app.tokenizer import Tokenizer
from replicas.config import TracingConfig
from replicas.errors import InvalidRequest
from replicas.tracing import start_tracing


class Ingress:
    """One ingress replica. `app.build` wraps it with `serve.ingress()` and binds it."""

    def __init__(
        self,
        router: DeploymentHandle[Any],
        config: IngressConfig,
        *,
        tracing: TracingConfig | None = None,
    ) -> None:
        """Load the tokenizer; connections are made on first use.

        Args:
            router: handle of the RouterDeployment.
            config: limits and keys.
            tracing: where the spans of HTTP requests go; None: nowhere.
        """
        replica_id = serve.get_replica_context().replica_id.unique_id
        self._config = config
        self._client = LLMClient(router)
        self._metrics = IngressMetrics(replica_id)
        self._tracing = start_tracing(
            tracing or TracingConfig(), service="ingress", instance=replica_id
        )
        tokenizer = Tokenizer.load(Path(config.model_dir))
        self._service = CompletionService(
            self._client,
            tokenizer,
            config,
            self._metrics,
            load_sampling_defaults(Path(config.model_dir)),
        )

    def __serve_build_asgi_app__(self) -> Starlette:
        """Give Serve the HTTP side; Serve itself echoes X-Request-Id."""
        return create_app(
            self._service,
            self._client,
            self._config,
            self._metrics,
            tracing=self._tracing,
            echo_request_id=False,
        )

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
        if service := getattr(self, "_service", None):
            await service.close()
        if client := getattr(self, "_client", None):
            await client.close()


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
