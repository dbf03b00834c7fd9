"""Probes, models, version and metrics.

Knows the router's answers only. Invariant: /health asks nobody; /ready and /metrics answer while
the router is silent.
"""

from __future__ import annotations

import contextlib
import time

from starlette.requests import Request
from starlette.responses import Response

from app.api_reference import openapi
from app.asgi import json_response
from app.completion_service import CompletionService
from app.ingress_config import IngressConfig
from app.metrics import CONTENT_TYPE, IngressMetrics
from app.token_client import TokenClient, status_soon
from app.version import VERSION
from replicas.errors import EngineNotReady, ServingError


class SystemEndpoints:
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
        return json_response({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """Whether a request would be answered: by a replica, or by one that is started for it."""
        body: dict[str, object] = {"ready": False, "model": self._config.model_id}
        try:
            status = await status_soon(self._client)
        except ServingError:
            return json_response({**body, **self._progress}, status_code=503)
        body |= {
            "ready": status.ready,
            "num_replicas": len(status.replicas),
            "num_starting_replicas": len(status.startup),
            "num_queued_requests": status.num_queued,
        }
        if status.ready:
            return json_response({**body, "stage": "ready"})
        if status.is_draining or status.drained:
            return json_response({**body, "stage": "draining"}, status_code=503)
        # Of several that start, the one that has come furthest in its stage.
        first = max(status.startup, key=lambda p: p.done / max(1, p.total), default=None)
        self._progress = {"stage": "starting replicas"}
        if first is not None:
            self._progress = {"stage": first.stage, "done": first.done, "total": first.total}
        return json_response({**body, **self._progress}, status_code=503)

    async def version(self, _: Request) -> Response:
        """Return the software's version, and what identifies the model once it is loaded."""
        body: dict[str, object] = {"version": VERSION}
        try:
            info = await self._service.model_info()
        except EngineNotReady:
            return json_response({**body, "model": self._config.model_id})
        body |= {
            "model": self._config.model_id,
            "fingerprint": info.fingerprint,
            "max_model_len": info.max_model_len,
        }
        return json_response(body)

    async def openapi(self, _: Request) -> Response:
        """Describe this interface to machines."""
        return json_response(openapi())

    async def list_models(self, _: Request) -> Response:
        """List the one model that this application serves."""
        return json_response({"object": "list", "data": [await self._model()]})

    async def get_model(self, request: Request) -> Response:
        """Describe a model by its id."""
        model_id = request.path_params["model_id"]
        self._service.check_model(model_id)
        return json_response(await self._model())

    async def metrics(self, _: Request) -> Response:
        """Return Prometheus text; the engines' part is left out while the router is silent."""
        try:
            status = await status_soon(self._client)
        except ServingError:
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
            "default_sampling_params": self._service.defaults.as_json(),
        }
        with contextlib.suppress(EngineNotReady):
            model["max_model_len"] = (await self._service.model_info()).max_request_tokens
        return model
