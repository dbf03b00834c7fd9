"""What becomes of responses afterwards: retrieve, cancel, delete, and their input items.

Any ingress replica answers for all of them; a response is visible to the key that made it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from app.asgi import json_response
from app.errors import UnsupportedParameter
from app.exchange import Edge, Exchange
from app.http_exchange import CountedResponse
from app.responses.store import StoredResponse
from replicas.errors import InvalidRequest, RequestError

PATH = "/v1/responses/{response_id}"
MAX_LISTED = 100
_ENDED = frozenset({"completed", "incomplete", "failed"})

Answer = Callable[[Request, Exchange], Awaitable[Response]]


class ResponseNotFound(RequestError):
    """There is no such response: it was not stored, it is too old, or it is another key's."""

    status = 404
    code = "response_not_found"


class StoredResponses:
    """Handlers of these endpoints."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    async def retrieve(self, request: Request) -> Response:
        """Return a response as it is now."""
        return self._respond(request, self._retrieve, PATH)

    async def delete(self, request: Request) -> Response:
        """Forget a response."""
        return self._respond(request, self._delete, PATH)

    async def cancel(self, request: Request) -> Response:
        """End a response that runs."""
        return self._respond(request, self._cancel, f"{PATH}/cancel")

    async def list_input_items(self, request: Request) -> Response:
        """List the conversation that a response answers."""
        return self._respond(request, self._list_input_items, f"{PATH}/input_items")

    def _respond(self, request: Request, answer: Answer, endpoint: str) -> Response:
        async def send_answer(request: Request, send: Send, exchange: Exchange) -> int:
            response = await answer(request, exchange)
            await response(request.scope, request.receive, send)
            return response.status_code

        return CountedResponse(send_answer, request, self._edge, endpoint=endpoint)

    async def _retrieve(self, request: Request, exchange: Exchange) -> Response:
        _check_query(request, {"stream": ("false",), "include_obfuscation": ("false",)})
        stored = await self._find(request, exchange)
        return Response(stored.body, media_type="application/json")

    async def _delete(self, request: Request, exchange: Exchange) -> Response:
        _check_query(request, {})
        response_id = request.path_params["response_id"]
        if not await self._edge.shared.delete_response(exchange.key, response_id):
            raise _not_found(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def _cancel(self, request: Request, exchange: Exchange) -> Response:
        _check_query(request, {})
        response_id = request.path_params["response_id"]
        stored = await self._edge.shared.cancel_response(exchange.key, response_id)
        if stored is None:
            raise _not_found(response_id)
        status = orjson.loads(stored.body)["status"]
        if status in _ENDED:
            raise InvalidRequest(
                f"the response '{response_id}' has ended already ({status}): only one that is "
                "streamed or runs in the background can be cancelled",
                param="response_id",
            )
        return Response(stored.body, media_type="application/json")

    async def _list_input_items(self, request: Request, exchange: Exchange) -> Response:
        _check_query(request, {"order": ("asc", "desc"), "limit": None, "after": None})
        query = request.query_params
        limit = query.get("limit", "20")
        if not limit.isdecimal() or not 1 <= int(limit[:9]) <= MAX_LISTED:
            raise InvalidRequest(
                f"limit must be from 1 to {MAX_LISTED}, got {limit[:20]!r}", param="limit"
            )
        items: list[dict[str, Any]] = orjson.loads((await self._find(request, exchange)).items)
        if query.get("order", "desc") == "desc":
            items.reverse()
        if (after := query.get("after")) is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise InvalidRequest(f"there is no item {after[:80]!r}", param="after")
            items = items[ids.index(after) + 1 :]
        page = items[: int(limit)]
        return json_response(
            {
                "object": "list",
                "data": page,
                "first_id": page[0]["id"] if page else None,
                "last_id": page[-1]["id"] if page else None,
                "has_more": len(page) < len(items),
            }
        )

    async def _find(self, request: Request, exchange: Exchange) -> StoredResponse:
        response_id = request.path_params["response_id"]
        stored = await self._edge.shared.get_response(exchange.key, response_id)
        if stored is None:
            raise _not_found(response_id)
        return stored


def _not_found(response_id: str) -> ResponseNotFound:
    return ResponseNotFound(
        f"there is no response '{response_id}': responses are kept for a while only, and not with "
        "'store': false",
        param="response_id",
    )


def _check_query(request: Request, allowed: dict[str, tuple[str, ...] | None]) -> None:
    """Refuse parameters of the query that are not acted on; None allows any value."""
    for name, value in request.query_params.items():
        if name not in allowed:
            raise UnsupportedParameter(
                f"'{name[:64]}' is not supported by this server; leave it out", param=name[:64]
            )
        choices = allowed[name]
        if choices is not None and value not in choices:
            raise UnsupportedParameter(
                f"'{name}' can be {' or '.join(choices)} here, got {value[:64]!r}", param=name
            )
