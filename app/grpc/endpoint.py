"""The service of generation.proto: the same completions, keys, limits and errors as over HTTP.

Serve calls the ingress' methods by the names of the procedures; these lead here. Invariant: a call
that fails has the status code that its HTTP status stands for, and OpenAI's code and parameter in
its trailing metadata.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final

import grpc
from ray.serve.grpc_util import RayServegRPCContext

from app.asgi import log_error
from app.auth import check_key
from app.coalesced import stream_items
from app.completion_service import CompletionService
from app.demands import read_demands
from app.errors import error_headers, internal_error
from app.exchange import Edge, Exchange
from app.generation import Generation
from app.grpc import generation_pb2 as pb
from app.http_trace import CLIENT_CLOSED_REQUEST
from app.ingress_config import IngressConfig
from app.openai_response import Usage
from app.schema_faults import parse_json
from app.tool_calls.message import ToolCall
from replicas.errors import InvalidRequest, PayloadTooLarge, ServingError

# Serve sets up this logger's handlers in every replica, with the request id on each line.
logger = logging.getLogger("ray.serve")

SERVICE: Final = "/systole.v1.Generation"

_CODES: Final[dict[int, grpc.StatusCode]] = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


class GrpcEndpoint:
    """Answers the calls that reach one ingress."""

    def __init__(self, service: CompletionService, config: IngressConfig, edge: Edge) -> None:
        self._service = service
        self._config = config
        self._edge = edge
        self._running: dict[tuple[str, str], set[asyncio.Task[Any]]] = {}

    def reconfigure(self, config: IngressConfig) -> None:
        """Answer by other settings from the next call on; those that run end as they began."""
        self._config = config

    async def generate(
        self, request: pb.GenerateRequest, context: RayServegRPCContext
    ) -> pb.GenerateResponse:
        """Answer as a whole.

        Raises:
            ServingError: refused or failed; the context knows the status.
        """
        async with self._exchange("Generate", context) as exchange:
            generation = await self._plan(request, context, exchange)
            outputs = await self._service.collect(generation)
            return pb.GenerateResponse(
                id=generation.header.id,
                model=generation.header.model,
                choices=[
                    pb.Choice(
                        index=index,
                        text=output.text,
                        token_ids=output.token_ids,
                        finish_reason=output.finish_reason,
                        reasoning=output.reasoning,
                        tool_calls=_calls(output.tool_calls),
                    )
                    for index, output in enumerate(outputs)
                ],
                usage=_usage(generation.usage()),
            )

    async def stream(
        self, request: pb.GenerateRequest, context: RayServegRPCContext
    ) -> AsyncGenerator[pb.GenerateChunk]:
        """Answer in pieces.

        Raises:
            ServingError: refused or failed; the context knows the status.
        """
        async with self._exchange("Stream", context) as exchange:
            generation = await self._plan(request, context, exchange)
            items = stream_items(self._service, generation)
            async with contextlib.aclosing(items):
                async for item in items:
                    yield _chunk(generation, item)

    def cancel(self, request_id: str, key: str) -> bool:
        """End the requests of a key that have this id here; return whether there were any."""
        tasks = tuple(self._running.get((key, request_id), ()))
        for task in tasks:
            task.cancel()
        return bool(tasks)

    def authenticate(self, context: RayServegRPCContext) -> str:
        """Name the key of a call.

        Raises:
            AuthenticationError: there is none, or it is not ours; the context knows the status.
        """
        authorization = _metadata(context).get("authorization")
        try:
            digest = check_key(
                None if authorization is None else authorization.encode(), self._config.key_hashes
            )
        except ServingError as error:
            set_status(context, error, {})
            raise
        return self._edge.key_name(digest)

    @contextlib.asynccontextmanager
    async def _exchange(
        self, method: str, context: RayServegRPCContext
    ) -> AsyncGenerator[Exchange]:
        key = self.authenticate(context)
        request_id = _metadata(context).get("x-request-id") or context.request_id()
        request_id = request_id or uuid.uuid4().hex
        exchange = self._edge.open(key=key, request_id=request_id, endpoint=f"{SERVICE}/{method}")
        task = asyncio.current_task()
        assert task is not None
        tasks = self._running.setdefault((key, request_id), set())
        tasks.add(task)
        status, error = CLIENT_CLOSED_REQUEST, None  # stands if the call is cancelled
        try:
            yield exchange
            status = 200
        except ServingError as failure:
            status, error = failure.status, failure
            log_error(request_id, failure)
            set_status(context, failure, exchange.headers)
            raise
        except Exception as failure:
            status, error = 500, failure
            set_status(context, internal_error(), exchange.headers)
            raise
        finally:
            tasks.discard(task)
            if not tasks:
                self._running.pop((key, request_id), None)
            exchange.ended(status, error)

    async def _plan(
        self, request: pb.GenerateRequest, context: RayServegRPCContext, exchange: Exchange
    ) -> Generation:
        num_bytes = request.ByteSize()
        if num_bytes > self._config.max_body_bytes:
            raise PayloadTooLarge(
                f"the request exceeds {self._config.max_body_bytes} bytes; send less"
            )
        metadata = _metadata(context)
        demands = read_demands(metadata)
        body = _body(request)
        await exchange.admit(body, num_bytes=num_bytes)
        is_chat = request.WhichOneof("input") == "chat"
        plan = self._service.plan_chat if is_chat else self._service.plan_completion
        generation = await plan(body)
        generation.demands = demands
        exchange.planned(generation, metadata.get("traceparent"))
        return generation


def set_status(context: RayServegRPCContext, error: ServingError, headers: dict[str, str]) -> None:
    """Tell the client of an error as HTTP would."""
    context.set_code(_CODES.get(error.status, grpc.StatusCode.INTERNAL))
    context.set_details(error.message)
    trailing = {**error_headers(error), **headers, "error-code": error.code or error.type}
    if error.param is not None:
        trailing["error-param"] = error.param
    context.set_trailing_metadata([(k.lower(), _ascii(v)) for k, v in trailing.items()])


def error_chunk(error: ServingError) -> pb.GenerateChunk:
    """Return the last chunk of a stream that fails."""
    return pb.GenerateChunk(
        error=pb.Error(
            code=error.code or error.type, message=error.message, param=error.param or ""
        )
    )


def _ascii(value: str) -> str:
    """What metadata can hold of a text."""
    return value.encode("ascii", "backslashreplace").decode()


def _metadata(context: RayServegRPCContext) -> dict[str, str]:
    return dict(context.invocation_metadata())


def _body(request: pb.GenerateRequest) -> dict[str, Any]:
    """The same request as the JSON body of HTTP."""
    body: dict[str, Any] = {}
    if request.parameters_json:
        body = parse_json(request.parameters_json.encode())
    given: dict[str, Any] = {}
    match request.WhichOneof("input"):
        case "prompt":
            given["prompt"] = request.prompt
        case "prompt_token_ids":
            given["prompt"] = list(request.prompt_token_ids.ids)
        case "chat":
            messages = request.chat.messages
            given["messages"] = [{"role": m.role, "content": m.content} for m in messages]
        case _:
            pass
    if request.model:
        given["model"] = request.model
    for name in ("max_tokens", "temperature", "top_p", "top_k", "seed"):
        if request.HasField(name):
            given[name] = getattr(request, name)
    if request.stop:
        given["stop"] = list(request.stop)
    for name in ("stream", "stream_options", "prompt", "messages", *given):
        if name in body:
            raise InvalidRequest(
                f"parameters_json: '{name}' belongs to a field of the message, or to HTTP",
                param=f"parameters_json.{name}",
            )
    return {**body, **given}


def _chunk(generation: Generation, item: dict[str, Any]) -> pb.GenerateChunk:
    if "usage" in item:
        return pb.GenerateChunk(id=generation.header.id, usage=_usage(generation.usage()))
    return pb.GenerateChunk(
        id=generation.header.id,
        choice=pb.Choice(
            index=item["index"],
            text=item["text"],
            token_ids=item["token_ids"],
            finish_reason=item["finish_reason"] or "",
            reasoning=item.get("reasoning_content", ""),
            tool_calls=[
                pb.ToolCall(id=call["id"], name=call["name"], arguments=call["arguments"])
                for call in item.get("tool_calls", ())
            ],
        ),
    )


def _calls(calls: Sequence[ToolCall]) -> list[pb.ToolCall]:
    return [pb.ToolCall(id=c.id, name=c.name, arguments=c.arguments) for c in calls]


def _usage(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens or 0,
        reasoning_tokens=usage.reasoning_tokens,
    )
