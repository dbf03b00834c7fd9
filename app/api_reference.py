"""What this server answers to, in one table: the OpenAPI document and docs/api.md come from it.

    python -m app.api_reference > docs/api.md

Pure. Invariant: a path is here if and only if the app has a route for it; a test holds both
together.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import orjson
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic.json_schema import models_json_schema

from app.admin_endpoints import DrainRequest
from app.anthropic_schema import ANTHROPIC_PARAMETERS, CountTokensRequest, MessagesRequest
from app.openai_schema import ChatRequest, CompletionRequest
from app.parameters import CHAT_PARAMETERS, COMPLETION_PARAMETERS
from app.responses.schema import RESPONSES_PARAMETERS, ResponsesRequest
from app.text_schema import DetokenizeRequest, ScoreRequest, TokenizeRequest
from app.version import VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One path.

    Attributes:
        path: below the application's route prefix.
        method: HTTP's.
        summary: what it does.
        schema: of its body, or None.
        key: what it asks for: an API key, an admin's key or (none) nothing.
        streams: may answer with server-sent events.
    """

    path: str
    method: str
    summary: str
    schema: type[BaseModel] | None = None
    key: Literal["api", "admin", "none"] = "api"
    streams: bool = False


ENDPOINTS = (
    Endpoint(
        path="/v1/chat/completions",
        method="POST",
        summary="Answer a chat, in OpenAI's shape",
        schema=ChatRequest,
        streams=True,
    ),
    Endpoint(
        path="/v1/completions",
        method="POST",
        summary="Continue a text, in OpenAI's shape",
        schema=CompletionRequest,
        streams=True,
    ),
    Endpoint(
        path="/v1/messages",
        method="POST",
        summary="Answer a chat, in Anthropic's shape",
        schema=MessagesRequest,
        streams=True,
    ),
    Endpoint(
        path="/v1/messages/count_tokens",
        method="POST",
        summary="Count a message's prompt tokens",
        schema=CountTokensRequest,
    ),
    Endpoint(
        path="/v1/responses",
        method="POST",
        summary="Answer a conversation, in the shape of OpenAI's Responses API",
        schema=ResponsesRequest,
        streams=True,
    ),
    Endpoint(
        path="/v1/responses/{response_id}", method="GET", summary="A stored response as it is now"
    ),
    Endpoint(path="/v1/responses/{response_id}", method="DELETE", summary="Forget a response"),
    Endpoint(
        path="/v1/responses/{response_id}/cancel",
        method="POST",
        summary="End a response that is streamed or runs in the background",
    ),
    Endpoint(
        path="/v1/responses/{response_id}/input_items",
        method="GET",
        summary="The conversation that a stored response answers",
    ),
    Endpoint(
        path="/v1/score",
        method="POST",
        summary="Log-likelihood of given continuations of a prompt",
        schema=ScoreRequest,
    ),
    Endpoint(
        path="/v1/chat/completions/render",
        method="POST",
        summary="A chat's prompt and its tokens, without an answer",
        schema=ChatRequest,
    ),
    Endpoint(
        path="/tokenize",
        method="POST",
        summary="Tokens of a text, or of a chat's prompt (vLLM's shape)",
        schema=TokenizeRequest,
    ),
    Endpoint(
        path="/detokenize",
        method="POST",
        summary="Text of tokens (vLLM's shape)",
        schema=DetokenizeRequest,
    ),
    Endpoint(path="/v1/models", method="GET", summary="The model that is served; its defaults"),
    Endpoint(path="/v1/models/{model_id}", method="GET", summary="One model by its id"),
    Endpoint(path="/version", method="GET", summary="Versions of server and model"),
    Endpoint(path="/metrics", method="GET", summary="Prometheus metrics"),
    Endpoint(
        path="/admin/reset_prefix_cache",
        method="POST",
        summary="Have all replicas forget cached pages that no running request uses",
        key="admin",
    ),
    Endpoint(
        path="/admin/profile",
        method="POST",
        summary="Have all replicas trace their next `?steps=20` with jax's profiler",
        key="admin",
    ),
    Endpoint(
        path="/admin/drain",
        method="POST",
        summary="Give an engine replica, or the whole service, no new requests",
        schema=DrainRequest,
        key="admin",
    ),
    Endpoint(
        path="/admin/resume",
        method="POST",
        summary="Give them again",
        schema=DrainRequest,
        key="admin",
    ),
    Endpoint(path="/openapi.json", method="GET", summary="This interface, as OpenAPI 3.1"),
    Endpoint(path="/health", method="GET", summary="Whether the HTTP process lives", key="none"),
    Endpoint(
        path="/ready", method="GET", summary="Whether a request would be answered", key="none"
    ),
)

_TOOL_NOTES = (
    "- `tools` need a model whose chat template takes them and whose way of writing calls is known",
    "  (`ingress.tool_call_style` in configuration.md); others refuse them. With `tool_choice`",
    "  `none` the model is not told of them; `required` and a named function leave it no choice.",
    "- A tool call is sent when it is complete, in one chunk: it names one of the request's",
    "  functions and its `arguments` are a JSON object. They follow the function's schema where",
    "  the call is demanded, or the function `strict`; else they are not checked against it.",
    "  What the model writes as a call and is none, or is cut off, comes back as `content`.",
    "- `parallel_tool_calls: false` ends the answer with its first call.",
    "- Reasoning comes in `reasoning_content`, in messages and in deltas, and is counted in",
    "  `usage.completion_tokens_details`; `include_reasoning: false` leaves it out. Messages may",
    "  pass it back as `reasoning_content` or `reasoning`. Whitespace by a marker goes with it.",
)

_STRUCTURE_NOTES = (
    "- `response_format`, `structured_outputs` and the `guided_*` parameters say what the answer",
    "  must look like; a request has one of them (structured-output.md). The form always holds:",
    "  JSON schemas are enforced whether `strict` or not, and other parameters give way to it.",
    "- A form that is malformed, or takes too much time to compile, is refused with 400 and the",
    "  reason.",
)

_RESPONSES_NOTES = (
    "- Responses are stored for an hour unless `store` is false, within the bounds of",
    "  `ingress.responses`, in the memory of one process that all ingress replicas share: its",
    "  restart forgets them. Only the key that made a response sees it. `background` needs",
    "  `store`.",
    "- A streamed response can be cancelled like one in the background, once its first event has",
    "  come; it ends with `response.incomplete` and the status `cancelled`. A client that leaves a",
    "  stream cancels it too, except in the background. Streams cannot be resumed.",
    "- Reasoning is an item with its text (`reasoning_text`), never encrypted, and may come back",
    "  so. `reasoning.effort` and summaries are refused. `instructions` count for one response.",
)

_MESSAGES_NOTES = (
    "- In `/v1/messages` an assistant's last turn is continued; a block's `cache_control` is",
    "  a hint: every prefix is cached.",
    "- `thinking` of type `adaptive` shows what the model thinks, in blocks without a signature;",
    "  `enabled` is refused, since nothing keeps a model to a budget.",
    '- A `tool_result` with `is_error` begins with "Error: " in the prompt.',
)

_LIMITS_NOTES = (
    '- `/admin/drain` with `{"replica": ID}` keeps new requests from one engine replica; without a',
    "  body, from the whole service, which answers 503 and is not ready. What was accepted runs",
    "  on: the answer tells how much does, and may be asked for again. `/admin/resume` ends it,",
    "  and so does a restart of the router.",
    "- Where `ingress.limits` are set, answers carry OpenAI's `x-ratelimit-*` headers, and a key",
    "  that has used up its minute gets 429 with `Retry-After`. Before it runs, a request is worth",
    "  a quarter of its bytes and its `max_tokens`; the difference is settled when it has ended.",
    "- A prompt that the operator's filter refuses gets 400 with the code `content_filter`; an",
    "  answer ends with that finish reason (`refusal` in Messages), before what was refused.",
)

_REFERENCE = "#/components/schemas/{model}"


def openapi() -> dict[str, Any]:
    """Return the OpenAPI document."""
    schemas = {endpoint.schema for endpoint in ENDPOINTS if endpoint.schema is not None}
    ordered = sorted(schemas, key=lambda schema: schema.__name__)
    _, definitions = models_json_schema(
        [(schema, "validation") for schema in ordered], ref_template=_REFERENCE
    )
    paths: dict[str, Any] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Systole", "version": VERSION},
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {}}
    if endpoint.path == "/metrics":
        content = {"text/plain": {}}
    if endpoint.streams:
        content["text/event-stream"] = {}
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "security": [] if endpoint.key == "none" else [{"key": []}],
        "responses": {
            "200": {"description": "The answer", "content": content},
            "default": {"description": "An error", "content": {"application/json": {}}},
        },
    }
    if names := re.findall(r"{(\w+)}", endpoint.path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if endpoint.schema is not None:
        reference = {"$ref": _REFERENCE.format(model=endpoint.schema.__name__)}
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": reference}},
        }
    return operation


def markdown() -> str:
    """Return docs/api.md."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# HTTP interface"
    yield ""
    yield "Made from the code by `python -m app.api_reference > docs/api.md`; a test checks that it"
    yield "is current. `GET /openapi.json` tells the same to machines."
    yield ""
    yield "## Endpoints"
    yield ""
    yield "| path | method | key | what it does |"
    yield "|---|---|---|---|"
    for endpoint in ENDPOINTS:
        yield f"| `{endpoint.path}` | {endpoint.method} | {endpoint.key} | {endpoint.summary} |"
    yield ""
    yield "Keys go into `Authorization: Bearer KEY`; `/v1/messages` takes them in `x-api-key` too."
    yield "Admin keys are those of `ingress.admin_keys_file`; without any, `/admin` is closed."
    yield ""
    yield from _parameters("Completions", CompletionRequest, COMPLETION_PARAMETERS)
    yield from _parameters("Chat completions", ChatRequest, CHAT_PARAMETERS)
    yield from _parameters("Responses", ResponsesRequest, RESPONSES_PARAMETERS)
    yield from _parameters("Messages (Anthropic)", MessagesRequest, ANTHROPIC_PARAMETERS)
    yield from _parameters("Score", ScoreRequest, {})
    yield "## What differs from others"
    yield ""
    yield "- A parameter that would have an effect and is not supported is refused with 400 and its"
    yield "  name; none is ignored. `best_of`, for one, must be 1."
    yield "- `logprobs` are those of the model itself, before temperature and any other parameter."
    yield "- `repetition_penalty` counts prompt and output, the other penalties the output only."
    yield "- Parameters apply in this order: `allowed_token_ids`, `bad_words`, `min_tokens` and"
    yield "  `logit_bias`, penalties, `temperature`, `min_p`, `top_k`, `top_p`."
    yield "- A chat may fill the context; a completion has 16 tokens unless `max_tokens` says"
    yield "  otherwise."
    yield "- Defaults of `temperature`, `top_p`, `top_k`, `min_p` and `repetition_penalty` are"
    yield "  those of the model's generation_config.json; `/v1/models` shows them."
    yield "- A request for logprobs of its prompt computes the prompt anew: nothing of it comes"
    yield "  from the prefix cache (of `/v1/score` the prompt does, the continuations do not)."
    yield from _STRUCTURE_NOTES
    yield from _TOOL_NOTES
    yield from _RESPONSES_NOTES
    yield from _MESSAGES_NOTES
    yield from _LIMITS_NOTES


def _parameters(
    title: str, schema: type[BaseModel], neutral: Mapping[str, tuple[object, ...]]
) -> Iterator[str]:
    yield f"## {title}"
    yield ""
    yield "| parameter | default |"
    yield "|---|---|"
    for name, field in schema.model_fields.items():
        yield f"| `{name}` | {_default(field)} |"
    yield ""
    if neutral:
        yield "Known and not supported; the values behind a name change nothing and are accepted:"
        yield ""
        yield ", ".join(_accepted(name, values) for name, values in sorted(neutral.items())) + "."
        yield ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: object = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel) or value in ((), {}, None, ""):
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _accepted(name: str, values: tuple[object, ...]) -> str:
    shown = " or ".join(f"`{_json(value)}`" for value in values)
    return f"`{name}`" + (f" ({shown})" if shown else "")


def _json(value: object) -> str:
    return orjson.dumps(value).decode()


if __name__ == "__main__":
    sys.stdout.write(markdown())
