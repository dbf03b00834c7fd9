"""Anthropic's Messages API: bodies, events and errors by their documented shapes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.auth import hash_key
from replicas.errors import Overloaded
from tests.asgi_client import Answer
from tests.http_server import MODEL, TEXT, MakeServer

PATH = "/v1/messages"


def message(**fields: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": "Hi"}]
    return {"model": MODEL, "max_tokens": 100, "messages": turns, **fields}


def events(answer: Answer) -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    for block in answer.body.decode().strip().split("\n\n"):
        kind, data = block.split("\n")
        found.append((kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


async def test_a_message_has_anthropics_shape(make_server: MakeServer) -> None:
    server = make_server(num_cached_tokens=3)
    answer = (await server.client.post(PATH, message(system="Be kind."))).json()
    num_prompt = len(server.fake.calls[0].prompt)
    num_output = len(server.tokenizer.encode(TEXT, add_special_tokens=False)) + 1
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": TEXT, "citations": None}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": num_prompt - 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": num_output,
        },
    }
    prompt = server.tokenizer.decode(server.fake.calls[0].prompt, skip_special_tokens=False)
    assert prompt == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


async def test_a_streamed_message_adds_up_to_the_whole_one(make_server: MakeServer) -> None:
    server = make_server(tokens_per_delta=3)
    whole = (await server.client.post(PATH, message())).json()
    answer = await server.client.post(PATH, message(stream=True))
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert b"[DONE]" not in answer.body
    found = events(answer)
    kinds = [kind for kind, _ in found]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    assert all(data["type"] == kind for kind, data in found)
    start = found[0][1]["message"]
    assert (start["role"], start["content"], start["stop_reason"]) == ("assistant", [], None)
    deltas = [data["delta"] for kind, data in found if kind == "content_block_delta"]
    assert "".join(delta["text"] for delta in deltas) == whole["content"][0]["text"]
    end = found[-2][1]
    assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert end["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


@pytest.mark.parametrize("stream", [False, True])
async def test_why_a_message_ended_is_told(make_server: MakeServer, stream: bool) -> None:
    client = make_server().client
    for fields, reason, sequence in (
        ({"stop_sequences": ["small", "x!"]}, "stop_sequence", "small"),
        ({"max_tokens": 3}, "max_tokens", None),
    ):
        answer = await client.post(PATH, message(stream=stream, **fields))
        told = events(answer)[-2][1]["delta"] if stream else answer.json()
        assert (told["stop_reason"], told["stop_sequence"]) == (reason, sequence)


async def test_an_assistants_last_turn_is_continued(make_server: MakeServer) -> None:
    server = make_server()
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": "Hello wor"},
    ]
    await server.client.post(PATH, message(messages=turns))
    prompt = server.tokenizer.decode(server.fake.calls[0].prompt, skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>assistant\nHello wor")


async def test_tokens_are_counted_without_an_answer(make_server: MakeServer) -> None:
    server = make_server()
    request = message(system=[{"type": "text", "text": "Be kind."}])
    await server.client.post(PATH, request)
    del request["max_tokens"]
    answer = await server.client.post(f"{PATH}/count_tokens", request)
    assert answer.json() == {"input_tokens": len(server.fake.calls[0].prompt)}
    assert len(server.fake.calls) == 1


@pytest.mark.parametrize(
    ("fields", "status", "kind", "named"),
    [
        ({"model": "other"}, 404, "not_found_error", "other"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"temperature": 1.5}, 400, "invalid_request_error", "temperature"),
        ({"tools": [{"name": "f"}]}, 400, "invalid_request_error", "tools[0].input_schema"),
        ({"tools": [{"type": "bash_20250124", "name": "b"}]}, 400, None, "bash_20250124"),
        ({"tool_choice": {"type": "tool"}}, 400, None, "tool_choice"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}],
                    }
                ]
            },
            400,
            None,
            "tool_use",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}],
                    }
                ]
            },
            400,
            None,
            "tool_result",
        ),
        ({"thinking": {"type": "enabled"}}, 400, "invalid_request_error", "thinking"),
        ({"colour": 1}, 400, "invalid_request_error", "colour"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, None, "text"),
        ({"messages": [{"role": "user", "content": [{"type": [{}]}]}]}, 400, None, "text"),
    ],
)
async def test_errors_have_anthropics_shape(
    make_server: MakeServer, fields: dict[str, Any], status: int, kind: str | None, named: str
) -> None:
    headers = {"x-request-id": "r1"}
    answer = await make_server().client.post(PATH, message(**fields), headers)
    content = answer.json()
    assert (answer.status, content["type"], content["request_id"]) == (status, "error", "r1")
    assert content["error"]["type"] == (kind or "invalid_request_error")
    assert named in content["error"]["message"]


async def test_an_error_in_mid_stream_is_the_last_event(make_server: MakeServer) -> None:
    server = make_server(error=Overloaded("too much"), error_after=2)
    answer = await server.client.post(PATH, message(stream=True))
    kind, data = events(answer)[-1]
    assert (kind, data["error"]["type"]) == ("error", "rate_limit_error")


async def test_anthropics_key_header_is_accepted(make_server: MakeServer) -> None:
    client = make_server(config={"key_hashes": frozenset({hash_key(b"secret")})}).client
    refused = await client.post(PATH, message(), {"x-api-key": "wrong"})
    assert (refused.status, refused.json()["error"]["type"]) == (401, "authentication_error")
    assert (await client.post(PATH, message(), {"x-api-key": "secret"})).status == 200
