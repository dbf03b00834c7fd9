"""What only an operator may do: forget cached prefixes, take profiles, drain and resume.

Behind the admin's key, which is another than the clients'. Draining is the router's: all ingress
replicas see it, and a restart of the router forgets it. Invariant: what was accepted runs on.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from app.asgi import json_response, read_body
from app.schema_faults import as_invalid_request, parse_json
from app.token_client import TokenClient
from replicas.errors import InvalidRequest, RequestError, ServingError
from replicas.wire import ServiceStatus

# Serve sets up this logger's handlers in every replica, with the request id on each line.
logger = logging.getLogger("ray.serve")

MAX_BODY_BYTES = 4096
BODY_TIMEOUT_S = 10.0
MAX_PROFILE_STEPS = 1000
MAX_PROFILE_S = 60.0


class ReplicaNotFound(RequestError):
    """No engine replica has that id."""

    status = 404
    code = "replica_not_found"


class DrainRequest(BaseModel):
    """Body of POST /admin/drain and /admin/resume."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)

    # The id of an engine replica, as in /metrics and logs; null: the whole service.
    replica: str | None = Field(default=None, min_length=1, max_length=256)


class AdminEndpoints:
    """Handlers of these endpoints."""

    def __init__(self, client: TokenClient) -> None:
        self._client = client

    async def reset_prefix_cache(self, _: Request) -> Response:
        """Have all replicas forget what they have cached and do not use."""
        return json_response({"num_replicas": await self._client.drop_prefix_cache()})

    async def profile(self, request: Request) -> Response:
        """Have all replicas trace their next steps with jax's profiler."""
        try:
            num_steps = int(request.query_params.get("steps", "20"))
            max_s = float(request.query_params.get("max_s", "10"))
        except ValueError as error:
            raise InvalidRequest(f"a number is needed: {error}", param="steps") from None
        if not (1 <= num_steps <= MAX_PROFILE_STEPS and 0 < max_s <= MAX_PROFILE_S):
            raise InvalidRequest(
                f"steps must be in [1, {MAX_PROFILE_STEPS}] and max_s in (0, {MAX_PROFILE_S:.0f}], "
                f"got {num_steps} and {max_s:g}",
                param="steps",
            )
        answers = await self._client.profile(num_steps, max_s)
        profiles = [
            {"error": answer.message} if isinstance(answer, ServingError) else asdict(answer)
            for answer in answers
        ]
        return json_response({"profiles": profiles})

    async def drain(self, request: Request) -> Response:
        """Give a replica, or the whole service, no new requests."""
        return await self._set_drained(request, is_drained=True)

    async def resume(self, request: Request) -> Response:
        """Give them again."""
        return await self._set_drained(request, is_drained=False)

    async def _set_drained(self, request: Request, *, is_drained: bool) -> Response:
        raw = await read_body(request, max_bytes=MAX_BODY_BYTES, timeout_s=BODY_TIMEOUT_S)
        body: dict[str, Any] = parse_json(raw) if raw.strip() else {}
        try:
            replica_id = DrainRequest.model_validate(body).replica
        except ValidationError as error:
            raise as_invalid_request(error) from None
        if replica_id is not None:
            status = await self._client.status()
            if replica_id not in (*status.replicas, *status.drained):
                known = ", ".join(sorted(status.replicas)) or "none"
                raise ReplicaNotFound(
                    f"there is no replica '{replica_id}'; there are {known}", param="replica"
                )
        logger.warning(
            "%s: %s %s",
            request.state.request_id,
            "drain" if is_drained else "resume",
            "the service" if replica_id is None else f"replica {replica_id}",
        )
        return json_response(_as_json(await self._client.drain(replica_id, is_drained=is_drained)))


def _as_json(status: ServiceStatus) -> dict[str, object]:
    """What an operator waits for: how much still runs where."""
    return {
        "ready": status.ready,
        "draining": status.is_draining,
        "num_queued_requests": status.num_queued,
        "num_running_requests": status.num_inflight,
        "replicas": {
            replica_id: {
                "drained": replica_id in status.drained,
                "num_running_requests": load.num_running + load.num_waiting,
            }
            for replica_id, load in status.replicas.items()
        },
    }
