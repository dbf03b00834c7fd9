"""Endpoints about text and tokens: tokenize, detokenize, a chat's prompt, scores of continuations.

Nothing but `score` reaches a replica. Invariant: the ids are those that a completion of the same
text would be computed from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from app.anthropic_schema import CountTokensRequest, parse_messages
from app.asgi import ClientDisconnected, json_response
from app.completion_service import CompletionService, first_leaf
from app.exchange import Edge, Exchange
from app.http_exchange import CountedResponse, admitted_body
from app.http_trace import CLIENT_CLOSED_REQUEST
from app.ingress_config import IngressConfig
from app.json_types import is_object
from app.text_schema import (
    DetokenizeRequest,
    ScoreRequest,
    TokenizeRequest,
    parse_chat,
    parse_text_request,
)
from replicas.errors import ServingError

Answer = Callable[[dict[str, Any]], Awaitable[object]]


class TextEndpoints:
    """Handlers of these endpoints."""

    def __init__(self, service: CompletionService, config: IngressConfig, edge: Edge) -> None:
        self._service = service
        self._config = config
        self._edge = edge

    async def tokenize(self, request: Request) -> Response:
        """Encode a text, or a chat's prompt."""
        return self._respond(request, self._tokenize)

    async def detokenize(self, request: Request) -> Response:
        """Decode token ids."""
        return self._respond(request, self._detokenize)

    async def render_chat(self, request: Request) -> Response:
        """Show the prompt of a chat and its tokens, without an answer."""
        return self._respond(request, self._render_chat)

    async def score(self, request: Request) -> Response:
        """Give the log-likelihood of continuations of a prompt."""
        return self._respond(request, self._score, computes=True)

    async def count_tokens(self, request: Request) -> Response:
        """Count a message's prompt, in Anthropic's shape."""
        return self._respond(request, self._count_tokens)

    def _respond(self, request: Request, answer: Answer, *, computes: bool = False) -> Response:
        """Answer a request; one that `computes` uses tokens of its key's limit."""

        async def send_answer(request: Request, send: Send, exchange: Exchange) -> int:
            try:
                async with admitted_body(
                    request, exchange, self._config, is_charged=computes
                ) as body:
                    content = await answer(body)
                    if computes and is_object(content):
                        exchange.num_tokens = content["usage"]["total_tokens"]
            except ClientDisconnected:
                return CLIENT_CLOSED_REQUEST
            await json_response(content)(request.scope, request.receive, send)
            return 200

        return CountedResponse(send_answer, request, self._edge)

    async def _tokenize(self, body: dict[str, Any]) -> object:
        info = await self._service.model_info()
        returns_strings = body.get("return_token_strs") is True
        if "messages" in body:
            body = {k: v for k, v in body.items() if k != "return_token_strs"}
            chat = parse_chat(body)
            self._service.check_model(chat.model)
            _, token_ids = await self._service.render_chat(chat, info)
        else:
            parsed = parse_text_request(TokenizeRequest, body)
            self._service.check_model(parsed.model)
            token_ids = await self._service.prompts.encode(
                parsed.prompt, info, add_special_tokens=parsed.add_special_tokens
            )
        strings = self._service.prompts.token_strings(token_ids) if returns_strings else None
        return {
            "count": len(token_ids),
            "max_model_len": info.max_request_tokens,
            "tokens": token_ids,
            "token_strs": strings,
        }

    async def _detokenize(self, body: dict[str, Any]) -> object:
        parsed = parse_text_request(DetokenizeRequest, body)
        self._service.check_model(parsed.model)
        info = await self._service.model_info()
        return {"prompt": await self._service.prompts.decode(parsed.tokens, info)}

    async def _render_chat(self, body: dict[str, Any]) -> object:
        chat = parse_chat(body)
        self._service.check_model(chat.model)
        info = await self._service.model_info()
        text, token_ids = await self._service.render_chat(chat, info)
        return {
            "model": self._config.model_id,
            "prompt": text,
            "token_ids": token_ids,
            "count": len(token_ids),
        }

    async def _count_tokens(self, body: dict[str, Any]) -> object:
        chat = parse_chat(parse_messages(CountTokensRequest, body).as_chat())
        self._service.check_model(chat.model)
        _, token_ids = await self._service.render_chat(chat, await self._service.model_info())
        return {"input_tokens": len(token_ids)}

    async def _score(self, body: dict[str, Any]) -> object:
        parsed = parse_text_request(ScoreRequest, body)
        self._service.check_model(parsed.model)
        info = await self._service.model_info()
        encode = self._service.prompts.encode
        prompt = await encode(parsed.prompt, info, add_special_tokens=True)

        async def one(index: int, continuation: str | Sequence[int]) -> dict[str, Any]:
            token_ids = await self._service.prompts.encode(
                continuation, info, add_special_tokens=False
            )
            score = await self._service.score(prompt, token_ids, cache_salt=parsed.cache_salt)
            return {"index": index, "object": "score", **score}

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(one(index, continuation))
                    for index, continuation in enumerate(parsed.continuations)
                ]
        except* ServingError as errors:
            raise first_leaf(errors) from None
        data = [task.result() for task in tasks]
        num_scored = sum(entry["num_tokens"] for entry in data)
        usage = {
            "prompt_tokens": len(prompt) + num_scored,
            "completion_tokens": 0,
            "total_tokens": len(prompt) + num_scored,
        }
        return {"object": "list", "model": self._config.model_id, "data": data, "usage": usage}
