"""OpenAI's Responses API, driven by OpenAI's own client and checked by its models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from app.auth import hash_key
from app.responses import run
from app.shared_state import SharedState
from replicas.errors import Overloaded
from tests.asgi_client import Answer
from tests.chat_server import ARGUMENTS, QWEN, Server, call_text

PATH = "/v1/responses"
TEXT = "Hello world, hello moon, hello sun and all the stars"
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": None,
}
THOUGHT = f"<think>\nhm\n</think>\n\nLet me see.\n{call_text()}"

MakeServer = Callable[..., Server]


@pytest.fixture
def make_server(tmp_path: Path) -> MakeServer:
    def make(text: str = TEXT, **options: Any) -> Server:
        return Server(tmp_path, QWEN, text, **options)

    return make


def events(answer: Answer) -> list[dict[str, Any]]:
    """Check the framing and the numbers of a stream's events, and return their data."""
    found: list[dict[str, Any]] = []
    for block in answer.body.decode().removesuffix("\n\n").split("\n\n"):
        kind, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def strictly(body: dict[str, Any]) -> Response:
    """A response as OpenAI's models understand it, of which nothing is lost."""
    response = Response.model_validate(body)
    known = response.model_dump(by_alias=True)
    assert body.keys() <= known.keys()
    # OpenAI's own answers have `store` too, though its models do not name it.
    assert (response.model_extra or {}).keys() == {"store"}
    return response


async def test_a_response_has_openais_shape_and_usage(make_server: MakeServer) -> None:
    server = make_server()
    answer = await server.client.post(PATH, {"input": "Hi", "instructions": "Be kind."})
    body = answer.json()
    response = strictly(body)
    assert (response.status, response.output_text) == ("completed", TEXT)
    assert response.instructions == "Be kind."
    assert response.usage is not None
    assert response.usage.input_tokens == len(server.fake.calls[0].prompt)
    assert response.usage.output_tokens == len(server.output)
    assert response.usage.total_tokens == response.usage.input_tokens + len(server.output)
    assert server.prompt.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi")


@pytest.mark.parametrize("tokens_per_delta", [1, 7])
async def test_a_stream_adds_up_to_its_last_event_and_to_the_whole(
    make_server: MakeServer, tokens_per_delta: int
) -> None:
    server = make_server(THOUGHT, tokens_per_delta=tokens_per_delta)
    request = {"input": "Weather?", "tools": [WEATHER]}
    whole = strictly((await server.client.post(PATH, request)).json())
    found = events(await server.client.post(PATH, {**request, "stream": True}))
    for event in found:
        parsed = EVENT.validate_python(event)
        assert type(parsed).__name__.endswith("Event"), event
    kinds = [event["type"] for event in found]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    last = strictly(found[-1]["response"])
    assert last.usage == whole.usage
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]

    def content(response: Response) -> list[Any]:
        fields = {"id", "call_id"}
        return [item.model_dump(exclude=fields) for item in response.output]

    assert content(last) == content(whole)
    items = last.model_dump(mode="json")["output"]
    for index, item in enumerate(items):
        of_item = [event for event in found if event.get("output_index") == index]
        assert of_item[0]["type"] == "response.output_item.added"
        assert of_item[0]["item"]["status"] == "in_progress"
        assert of_item[-1]["type"] == "response.output_item.done"
        assert of_item[-1]["item"]["id"] == item["id"]
        assert {event["item_id"] for event in of_item if "item_id" in event} == {item["id"]}
        deltas = "".join(event["delta"] for event in of_item if "delta" in event)
        text = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert deltas == text
    call = items[2]
    assert (call["name"], call["arguments"]) == ("get_weather", ARGUMENTS)
    usage = whole.usage
    assert usage is not None
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens


async def test_openais_client_creates_retrieves_lists_and_deletes(make_server: MakeServer) -> None:
    server = make_server(THOUGHT)
    async with server.openai() as client:
        first = await client.responses.create(model="tiny", input="Weather?", tools=[WEATHER])
        assert await client.responses.retrieve(first.id) == first
        call = first.output[-1]
        assert call.type == "function_call"
        answer: Any = {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": "5 degrees",
        }
        second = await client.responses.create(
            model="tiny", input=[answer], previous_response_id=first.id, tools=[WEATHER]
        )
        assert second.previous_response_id == first.id
        items = await client.responses.input_items.list(second.id, order="asc")
        kinds = [item.type async for item in items]
        assert kinds == ["message", "reasoning", "message", "function_call", "function_call_output"]
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="tiny", input="And?", previous_response_id=first.id)
        assert refused.value.code == "previous_response_not_found"
    prompt = server.prompt.split("</think>", 1)
    assert "hm" in prompt[0]
    expected = "Let me see.<tool_call>\n"
    assert expected in prompt[1]
    assert "<|im_start|>tool\n5 degrees<|im_end|>" in prompt[1]
    # The past does not depend on the response that held it.
    third = await server.client.post(PATH, {"input": "So?", "previous_response_id": second.id})
    assert third.status == 200
    assert "Weather?" in server.prompt


async def test_openais_stream_helper_follows(make_server: MakeServer) -> None:
    server = make_server(tokens_per_delta=2)
    async with (
        server.openai() as client,
        client.responses.stream(model="tiny", input="Hi") as stream,
    ):
        snapshots = [e.snapshot async for e in stream if e.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert snapshots[-1] == final.output_text == TEXT
    assert len(snapshots) > 2


async def test_the_end_by_length_is_told(make_server: MakeServer) -> None:
    server = make_server()
    for stream in (False, True):
        answer = await server.client.post(
            PATH, {"input": "Hi", "max_output_tokens": 3, "stream": stream}
        )
        body = events(answer)[-1]["response"] if stream else answer.json()
        response = strictly(body)
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.output[0].model_dump()["status"] == "incomplete"


async def test_items_of_every_kind_become_the_chat(make_server: MakeServer) -> None:
    server = make_server()
    turns = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {
            "type": "function_call",
            "call_id": "c1",
            "name": "get_weather",
            "arguments": "{}",
            "status": "completed",
        },
        {"type": "function_call_output", "call_id": "c1", "output": "5"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Cold", "annotations": []}],
        },
        {"role": "user", "content": "Why?"},
    ]
    assert (await server.client.post(PATH, {"input": turns})).status == 200
    assert server.prompt == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nhm\n</think>\n\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\nCold<|im_end|>\n"
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": ["message"]}]}, "input[0].type"),
        ({"input": [{"type": "", "role": "user", "content": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "c"}, "conversation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"background": True, "store": False}, "background"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"temperature": 9}, "temperature"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"colour": 1}, "colour"),
    ],
)
async def test_what_has_no_effect_here_is_refused_by_name(
    make_server: MakeServer, fields: dict[str, Any], param: str
) -> None:
    answer = await make_server().client.post(PATH, {"input": "Hi", **fields})
    assert (answer.status, answer.error["param"]) == (400, param), answer.json()


async def test_defaults_that_clients_spell_out_are_accepted(make_server: MakeServer) -> None:
    spelt_out = {
        "input": "Hi",
        "model": "tiny",
        "background": False,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": None, "summary": None},
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tools": [],
        "tool_choice": "auto",
        "truncation": "disabled",
        "service_tier": "auto",
        "stream_options": None,
        "top_logprobs": 0,
        "store": True,
    }
    assert (await make_server().client.post(PATH, spelt_out)).status == 200
    # n8n and LM Studio send an empty `text`.
    assert (await make_server().client.post(PATH, {"input": "Hi", "text": {}})).status == 200


async def test_what_is_not_to_be_stored_is_not(make_server: MakeServer) -> None:
    server = make_server()
    for stream in (False, True):
        answer = await server.client.post(PATH, {"input": "Hi", "store": False, "stream": stream})
        body = events(answer)[-1]["response"] if stream else answer.json()
        assert body["store"] is False
        assert (await server.client.get(f"{PATH}/{body['id']}")).status == 404


async def test_every_ingress_sees_what_one_stored_but_no_other_key_does(
    tmp_path: Path, make_server: MakeServer
) -> None:
    shared = SharedState()
    keys = {"key_hashes": frozenset({hash_key(b"a"), hash_key(b"b")})}
    one, other = make_server(shared=shared, **keys), make_server(shared=shared, **keys)
    headers = {"authorization": "Bearer a"}
    body = (await one.client.post(PATH, {"input": "Hi"}, headers)).json()
    path = f"{PATH}/{body['id']}"
    assert (await other.client.get(path, headers)).json() == body
    foreign = {"authorization": "Bearer b"}
    for method, suffix in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
        answer = await other.client.request(method, path + suffix, [b""], foreign)
        assert answer.status == 404
    use = {"input": "Hi", "previous_response_id": body["id"]}
    assert (await other.client.post(PATH, use, foreign)).error["param"] == "previous_response_id"
    assert (await other.client.request("DELETE", path, [b""], headers)).json()["deleted"]
    assert (await one.client.get(path, headers)).status == 404


@pytest.fixture
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "POLL_S", 0.01)


async def until_status(server: Server, response_id: str, *statuses: str) -> dict[str, Any]:
    while True:
        body = (await server.client.get(f"{PATH}/{response_id}")).json()
        if body["status"] in statuses:
            return body
        await asyncio.sleep(0.01)


async def test_a_response_in_the_background_outlives_its_answer(
    make_server: MakeServer, quick_polls: None
) -> None:
    server = make_server()
    server.fake.gate.clear()
    answer = await server.client.post(PATH, {"input": "Hi", "background": True})
    begun = strictly(answer.json())
    assert (begun.status, begun.background, begun.output) == ("in_progress", True, [])
    assert (await server.client.get(f"{PATH}/{begun.id}")).json()["status"] == "in_progress"
    server.fake.gate.set()
    ended = strictly(await until_status(server, begun.id, "completed"))
    assert ended.output_text == TEXT
    assert ended.usage is not None
    refused = await server.client.post(f"{PATH}/{begun.id}/cancel", b"")
    assert refused.status == 400


async def test_another_ingress_cancels_what_runs_in_the_background(
    make_server: MakeServer, quick_polls: None
) -> None:
    shared = SharedState()
    server, other = make_server(shared=shared), make_server(shared=shared)
    server.fake.gate.clear()
    begun = (await server.client.post(PATH, {"input": "Hi", "background": True})).json()
    await server.fake.wait_running(1)
    cancelled = await other.client.post(f"{PATH}/{begun['id']}/cancel", b"")
    assert (cancelled.status, cancelled.json()["status"]) == (200, "cancelled")
    await server.edge.close()
    assert server.fake.given_up
    again = await other.client.post(f"{PATH}/{begun['id']}/cancel", b"")
    assert (again.status, again.json()["status"]) == (200, "cancelled")
    kept = strictly(await until_status(other, begun["id"], "cancelled"))
    assert kept.usage is not None


async def test_openais_client_cancels(make_server: MakeServer, quick_polls: None) -> None:
    server = make_server()
    server.fake.gate.clear()
    async with server.openai() as client:
        begun = await client.responses.create(model="tiny", input="Hi", background=True)
        assert begun.status == "in_progress"
        assert (await client.responses.cancel(begun.id)).status == "cancelled"
        await server.edge.close()
        assert (await client.responses.retrieve(begun.id)).status == "cancelled"
        with pytest.raises(openai.NotFoundError):
            await client.responses.cancel("resp_unknown")
    assert server.fake.given_up


async def test_a_streamed_response_can_be_cancelled_and_deleted_in_mid_stream(
    make_server: MakeServer, quick_polls: None
) -> None:
    for method, suffix in (("POST", "/cancel"), ("DELETE", "")):
        server = make_server()
        seen: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def stop_model(
            answer: Answer, server: Server = server, seen: asyncio.Future[Answer] = seen
        ) -> bool:
            if len(answer.chunks) == 4:
                server.fake.gate.clear()
                seen.set_result(answer)
            return False

        body = json.dumps({"input": "Hi", "stream": True}).encode()
        stream = asyncio.create_task(server.client.request("POST", PATH, [body], until=stop_model))
        first = (await seen).chunks[0].split(b"data: ")[1].split(b"\n")[0]
        response_id = json.loads(first)["response"]["id"]
        ended = await server.client.request(method, f"{PATH}/{response_id}{suffix}", [b""])
        assert ended.status == 200
        last = events(await stream)[-1]
        assert last["type"] == "response.incomplete"
        assert last["response"]["status"] == "cancelled"
        text = strictly(last["response"]).output_text
        assert text
        assert TEXT.startswith(text)
        assert text != TEXT
        assert server.fake.given_up
        retrieved = await server.client.get(f"{PATH}/{response_id}")
        if suffix:
            assert retrieved.json() == last["response"]
        else:
            assert retrieved.status == 404


async def test_a_client_that_leaves_a_stream_ends_it_but_not_in_the_background(
    make_server: MakeServer, quick_polls: None
) -> None:
    for background in (False, True):
        server = make_server()
        request = {"input": "Hi", "stream": True, "background": background}
        left = await server.client.request(
            "POST", PATH, [json.dumps(request).encode()], until=lambda a: len(a.chunks) == 3
        )
        first = left.chunks[0].split(b"data: ")[1].split(b"\n")[0]
        response_id = json.loads(first)["response"]["id"]
        await server.edge.close()
        kept = strictly((await server.client.get(f"{PATH}/{response_id}")).json())
        assert kept.status == ("completed" if background else "cancelled")
        assert bool(server.fake.given_up) is not background


async def test_failures_before_and_in_a_stream(make_server: MakeServer) -> None:
    for stream in (False, True):
        server = make_server()
        server.fake.error = Overloaded("too much", retry_after_s=3)
        early = await server.client.post(PATH, {"input": "Hi", "stream": stream})
        assert (early.status, early.headers["retry-after"]) == (429, "3")
    server.fake.error_after = 3
    found = events(await server.client.post(PATH, {"input": "Hi", "stream": True}))
    assert found[-1]["type"] == "response.failed"
    failed = strictly(found[-1]["response"])
    assert failed.error is not None
    assert (failed.error.code, failed.error.message) == ("rate_limit_exceeded", "too much")
    assert (await server.client.get(f"{PATH}/{failed.id}")).json()["status"] == "failed"
    begun = (await server.client.post(PATH, {"input": "Hi", "background": True})).json()
    assert (await until_status(server, begun["id"], "failed"))["error"]["message"] == "too much"


async def test_a_refusal_after_a_keep_alive_is_an_event(make_server: MakeServer) -> None:
    server = make_server(keep_alive_s=0.01)
    server.fake.error = Overloaded("too much")
    server.fake.gate.clear()
    body = json.dumps({"input": "Hi", "stream": True}).encode()

    async def open_gate() -> None:
        await asyncio.sleep(0.1)
        server.fake.gate.set()

    opening = asyncio.create_task(open_gate())
    answer = await server.client.request("POST", PATH, [body])
    await opening
    blocks = [b for b in answer.body.decode().split("\n\n") if b and not b.startswith(":")]
    assert [b.split("\n")[0] for b in blocks] == [
        "event: response.created",
        "event: response.in_progress",
        "event: response.failed",
    ]


async def test_retrieving_refuses_what_it_cannot_do(make_server: MakeServer) -> None:
    server = make_server()
    body = (await server.client.post(PATH, {"input": "Hi"})).json()
    for query, param in (("?stream=true", "stream"), ("?include=x", "include")):
        answer = await server.client.get(f"{PATH}/{body['id']}{query}")
        assert (answer.status, answer.error["param"]) == (400, param)
