"""Completions over gRPC: the same answers, refusals and limits as over HTTP."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from app.auth import hash_key
from app.grpc import generation_pb2 as pb
from app.grpc.endpoint import GrpcEndpoint
from app.rate_limits import RateLimit, RateLimits
from app.shared_state import SharedState, SharedStateConfig
from replicas.errors import Overloaded, ServingError
from tests.chat_server import QWEN, Server, call_text

CHECKOUT = Path(__file__).parents[2]
TEXT = f"<think>\nhm\n</think>\n\nLet me see.\n{call_text()}"
LIMITS = RateLimits(default=RateLimit(requests_per_minute=2))


class Context:
    """What Serve hands over of a call."""

    def __init__(self, **metadata: str) -> None:
        self._metadata = [(k.replace("_", "-"), v) for k, v in metadata.items()]
        self.status: grpc.StatusCode | None = None
        self.details = ""
        self.trailing: dict[str, str] = {}

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return self._metadata

    def request_id(self) -> str | None:
        return None

    def set_code(self, code: grpc.StatusCode) -> None:
        self.status = code

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, metadata: list[tuple[str, str]]) -> None:
        self.trailing = dict(metadata)


MakeServer = Callable[..., tuple[Server, Any]]


@pytest.fixture
def make_server(tmp_path: Path) -> MakeServer:
    def make(text: str = TEXT, **options: Any) -> tuple[Server, Any]:
        server = Server(tmp_path, QWEN, text, **options)
        return server, GrpcEndpoint(server.service, server.edge.config, server.edge)

    return make


def chat(**fields: Any) -> pb.GenerateRequest:
    messages = [pb.Message(role="user", content="Weather?")]
    tools = '{"tools": [{"type": "function", "function": {"name": "get_weather"}}]}'
    return pb.GenerateRequest(
        chat=pb.Chat(messages=messages), **{"parameters_json": tools, **fields}
    )


def test_the_generated_code_is_current(tmp_path: Path) -> None:
    made = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I.", *made, "app/grpc/generation.proto"],
        cwd=CHECKOUT,
        check=True,
    )
    names = ["generation_pb2.py", "generation_pb2.pyi", "generation_pb2_grpc.py"]
    for name in names:
        current = (CHECKOUT / "app" / "grpc" / name).read_text(encoding="utf-8")
        assert (tmp_path / "app" / "grpc" / name).read_text(encoding="utf-8") == current, (
            "app/grpc/generation.proto says how to make it"
        )


async def test_whole_and_streamed_answers_are_those_of_http(make_server: MakeServer) -> None:
    server, endpoint = make_server()
    http = await server.whole()
    whole = await endpoint.generate(chat(), Context())
    [choice] = whole.choices
    message = http.choices[0].message
    assert (choice.text, choice.reasoning) == (message.content, "hm")
    assert choice.finish_reason == http.choices[0].finish_reason == "tool_calls"
    [call] = choice.tool_calls
    assert message.tool_calls is not None
    assert call.arguments == message.tool_calls[0].function.arguments  # pyright: ignore[reportAttributeAccessIssue]
    assert list(choice.token_ids) == server.output
    assert http.usage is not None
    assert whole.usage.completion_tokens == http.usage.completion_tokens
    chunks = [chunk async for chunk in endpoint.stream(chat(), Context())]
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert "".join(chunk.choice.text for chunk in chunks) == choice.text
    assert "".join(chunk.choice.reasoning for chunk in chunks) == "hm"
    assert [i for chunk in chunks for i in chunk.choice.token_ids] == server.output
    assert sum(len(chunk.choice.tool_calls) for chunk in chunks) == 1
    assert chunks[-2].choice.finish_reason == "tool_calls"
    assert chunks[-1].usage == whole.usage


async def test_every_field_reaches_the_engine(make_server: MakeServer) -> None:
    server, endpoint = make_server()
    ids = server.tokenizer.encode("Hi", add_special_tokens=False)
    request = pb.GenerateRequest(
        prompt_token_ids=pb.TokenIds(ids=ids),
        model="tiny",
        max_tokens=7,
        temperature=0.25,
        top_p=0.5,
        top_k=9,
        seed=3,
        stop=["xyz"],
        parameters_json='{"n": 2, "min_p": 0.125}',
    )
    answer = await endpoint.generate(request, Context(x_priority="5", x_timeout_ms="1500"))
    assert [choice.index for choice in answer.choices] == [0, 1]
    call = server.fake.calls[0]
    sampling = call.sampling
    assert list(call.prompt) == ids
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (7, 0.25, 0.5)
    assert (sampling.top_k, sampling.seed, sampling.min_p) == (9, 3, 0.125)
    assert (call.priority, call.timeout_s) == (5, 1.5)


async def first_of(
    endpoint: GrpcEndpoint, request: pb.GenerateRequest, context: Any, *, is_stream: bool
) -> object:
    if is_stream:
        return await anext(endpoint.stream(request, context))
    return await endpoint.generate(request, context)


KEYS = {"key_hashes": frozenset({hash_key(b"a")}), "key_names": {hash_key(b"a"): "team"}}


@pytest.mark.parametrize(
    ("request_", "metadata", "status", "param"),
    [
        (chat(), {}, "UNAUTHENTICATED", None),
        (chat(model="other"), {"authorization": "Bearer a"}, "NOT_FOUND", "model"),
        (chat(temperature=9), {"authorization": "Bearer a"}, "INVALID_ARGUMENT", "temperature"),
        (pb.GenerateRequest(), {"authorization": "Bearer a"}, "INVALID_ARGUMENT", "prompt"),
        (
            chat(parameters_json='{"stream": true}'),
            {"authorization": "Bearer a"},
            "INVALID_ARGUMENT",
            "parameters_json.stream",
        ),
        (chat(parameters_json="[]"), {"authorization": "Bearer a"}, "INVALID_ARGUMENT", None),
        (
            chat(parameters_json='{"best_of": 3}'),
            {"authorization": "Bearer a"},
            "INVALID_ARGUMENT",
            "best_of",
        ),
    ],
)
async def test_refusals_have_the_status_of_their_kind(
    make_server: MakeServer,
    request_: pb.GenerateRequest,
    metadata: dict[str, str],
    status: str,
    param: str | None,
) -> None:
    _, endpoint = make_server(**KEYS)
    for is_stream in (False, True):
        context = Context(**metadata)
        with pytest.raises(ServingError):
            await first_of(endpoint, request_, context, is_stream=is_stream)
        assert context.status is not None
        assert (context.status.name, context.trailing.get("error-param")) == (status, param)
        assert context.details
        assert context.trailing["error-code"]


async def test_limits_are_those_of_http(make_server: MakeServer) -> None:
    shared = SharedState(SharedStateConfig(limits=LIMITS))
    server, endpoint = make_server(**KEYS, shared=shared, limits=LIMITS)
    key = {"authorization": "Bearer a"}
    await endpoint.generate(chat(), Context(**key))
    answer = await server.client.post("/tokenize", {"prompt": "Hi"}, key)
    assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    context = Context(**key)
    with pytest.raises(ServingError):
        await endpoint.generate(chat(), context)
    assert context.status is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert context.trailing["error-code"] == "rate_limit_exceeded"
    assert context.trailing["x-ratelimit-limit-requests"] == "2"
    assert int(context.trailing["retry-after"]) >= 29


async def test_failures_and_overload(make_server: MakeServer) -> None:
    server, endpoint = make_server()
    for error, status in (
        (Overloaded("full", retry_after_s=2), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (RuntimeError("broken"), grpc.StatusCode.INTERNAL),
    ):
        server.fake.error = error
        context = Context()
        with pytest.raises(type(error)):
            await endpoint.generate(chat(), context)
        assert context.status is status
        assert "broken" not in context.details


async def test_a_request_is_cancelled_by_its_id_and_key(make_server: MakeServer) -> None:
    server, endpoint = make_server()
    server.fake.gate.clear()
    call = asyncio.create_task(endpoint.generate(chat(), Context(x_request_id="r1")))
    await server.fake.wait_running(1)
    assert not endpoint.cancel("r1", "somebody else")
    assert not endpoint.cancel("r2", "anonymous")
    assert endpoint.cancel("r1", "anonymous")
    with pytest.raises(asyncio.CancelledError):
        await call
    assert server.fake.given_up
    assert not endpoint.cancel("r1", "anonymous")
