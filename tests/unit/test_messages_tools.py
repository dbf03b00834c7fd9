"""Tools and thinking in Anthropic's Messages API, driven by Anthropic's own client."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import Message

from tests.chat_server import QWEN, Server, call_text

WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CITY = {"city": "Zürich 🚀"}
THOUGHT = f"<think>\nhm\n</think>\n\nLet me see.\n{call_text()}"
ADAPTIVE: Any = {"type": "adaptive"}

MakeServer = Callable[..., Server]


@pytest.fixture
def make_server(tmp_path: Path) -> MakeServer:
    def make(text: str = THOUGHT, **options: Any) -> Server:
        return Server(tmp_path, QWEN, text, **options)

    return make


def client_of(server: Server) -> AsyncAnthropic:
    transport = httpx2.ASGITransport(app=server.app)
    http = httpx2.AsyncClient(transport=transport, base_url="http://test")
    return AsyncAnthropic(base_url="http://test", api_key="k", max_retries=0, http_client=http)


def seen(message: Message) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for block in message.content:
        match block.type:
            case "thinking":
                found.append(("thinking", block.thinking))
            case "text":
                found.append(("text", block.text))
            case "tool_use":
                assert block.id
                found.append(("tool_use", block.name, block.input))
            case _:
                raise AssertionError(block)
    return found


@pytest.mark.parametrize("tokens_per_delta", [1, 7])
async def test_calls_and_thinking_whole_and_streamed(
    make_server: MakeServer, tokens_per_delta: int
) -> None:
    server = make_server(tokens_per_delta=tokens_per_delta)
    options: Any = {
        "model": "tiny",
        "max_tokens": 500,
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": [WEATHER],
    }
    call = ("tool_use", "get_weather", CITY)
    async with client_of(server) as client:
        for thinking, blocks in (
            ({}, [("text", "Let me see."), call]),
            ({"thinking": ADAPTIVE}, [("thinking", "hm"), ("text", "Let me see."), call]),
        ):
            whole = await client.messages.create(**options, **thinking)
            async with client.messages.stream(**options, **thinking) as stream:
                deltas = [
                    event.delta.partial_json
                    async for event in stream
                    if event.type == "content_block_delta"
                    and event.delta.type == "input_json_delta"
                ]
                streamed = await stream.get_final_message()
            assert seen(whole) == seen(streamed) == blocks
            assert whole.stop_reason == streamed.stop_reason == "tool_use"
            assert whole.usage.output_tokens == streamed.usage.output_tokens == len(server.output)
            assert "".join(deltas) == '{"city": "Zürich 🚀"}'


async def test_a_conversation_with_results_becomes_the_prompt(make_server: MakeServer) -> None:
    server = make_server("It is cold.")
    turns: Any = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "t1", "name": "get_weather", "input": CITY},
                {"type": "tool_use", "id": "t2", "name": "get_weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "5 degrees"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "content": [{"type": "text", "text": "no city"}],
                    "is_error": True,
                },
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    async with client_of(server) as client:
        answer = await client.messages.create(
            model="tiny", max_tokens=100, messages=turns, tools=[WEATHER]
        )
        counted = await client.messages.count_tokens(model="tiny", messages=turns, tools=[WEATHER])
    assert seen(answer) == [("text", "It is cold.")]
    assert answer.stop_reason == "end_turn"
    assert counted.input_tokens == len(server.fake.calls[0].prompt)
    assert server.prompt.endswith(
        "<think>\nhm\n</think>\n\nLet me see."
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich 🚀"}}\n</tool_call>'
        '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\n5 degrees<|im_end|>\n<|im_start|>tool\nError: no city<|im_end|>\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_choices_of_tools(make_server: MakeServer) -> None:
    two = f"{call_text()}\n{call_text('{}')}\n"
    server = make_server(two)
    options: Any = {
        "model": "tiny",
        "max_tokens": 500,
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": [WEATHER],
    }
    async with client_of(server) as client:
        both = await client.messages.create(**options)
        one = await client.messages.create(
            **options, tool_choice={"type": "auto", "disable_parallel_tool_use": True}
        )
        none = await client.messages.create(**options, tool_choice={"type": "none"})
    assert [len(seen(answer)) for answer in (both, one)] == [2, 1]
    assert [block[0] for block in seen(none)] == ["text"]
    assert "get_weather" not in server.prompt
    assert none.stop_reason == "end_turn"


async def test_what_is_written_after_a_call_stays_behind_it(make_server: MakeServer) -> None:
    server = make_server(f"One {call_text()} two")
    options: Any = {
        "model": "tiny",
        "max_tokens": 500,
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": [WEATHER],
    }
    async with client_of(server) as client:
        whole = await client.messages.create(**options)
        async with client.messages.stream(**options) as stream:
            streamed = await stream.get_final_message()
    kinds = [block.type for block in whole.content]
    assert kinds == [block.type for block in streamed.content]
    assert kinds[:2] == ["text", "tool_use"]
