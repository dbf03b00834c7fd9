"""Completions by a plain Serve handle: the items add up to what HTTP answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from app.coalesced import stream_items
from replicas.errors import InvalidRequest
from tests.chat_server import QWEN, Server

TEXT = "Hello world, hello moon, hello sun and all the stars"


def joined(items: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """The log-probabilities of one choice."""
    parts = [item["logprobs"] for item in items if item["index"] == index and "logprobs" in item]
    assert len(parts) > 1
    return {
        name: value if value is None else [entry for part in parts for entry in part[name]]
        for name, value in parts[0].items()
    }


@pytest.mark.parametrize("tokens_per_delta", [1, 3])
async def test_logprobs_are_those_of_http(tmp_path: Path, tokens_per_delta: int) -> None:
    server = Server(tmp_path, QWEN, TEXT, tokens_per_delta=tokens_per_delta)
    completion = {"prompt": "Hi", "max_tokens": 100, "logprobs": 2, "n": 2}
    http = (await server.client.post("/v1/completions", completion)).json()
    generation = await server.service.plan_completion(completion)
    *items, usage = [item async for item in stream_items(server.service, generation)]
    for choice in http["choices"]:
        assert joined(items, choice["index"]) == choice["logprobs"]
    assert usage == {"usage": http["usage"]}
    chat = {
        "messages": [{"role": "user", "content": "Hi"}],
        "logprobs": True,
        "top_logprobs": 1,
    }
    http = (await server.client.post("/v1/chat/completions", chat)).json()
    generation = await server.service.plan_chat(chat)
    *items, _ = [item async for item in stream_items(server.service, generation)]
    assert joined(items, 0) == http["choices"][0]["logprobs"]


async def test_items_that_are_read_late_come_as_one(tmp_path: Path) -> None:
    server = Server(tmp_path, QWEN, TEXT)
    completion = {"prompt": "Hi", "max_tokens": 100, "logprobs": 0}
    generation = await server.service.plan_completion(completion)
    items = stream_items(server.service, generation)
    first = await anext(items)
    for _ in range(500):
        await asyncio.sleep(0)
    rest = [item async for item in items]
    assert len(rest) == 2
    text = first["text"] + rest[0]["text"]
    assert text == TEXT
    num_logprobs = [len(item["logprobs"]["tokens"]) for item in (first, rest[0])]
    assert sum(num_logprobs) == len(server.output)


async def test_what_only_http_has_is_refused(tmp_path: Path) -> None:
    server = Server(tmp_path, QWEN, TEXT)
    generation = await server.service.plan_completion(
        {"prompt": "Hi", "max_tokens": 5, "echo": True}
    )
    with pytest.raises(InvalidRequest, match="are for HTTP"):
        await anext(stream_items(server.service, generation))
