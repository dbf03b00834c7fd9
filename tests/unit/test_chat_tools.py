"""Chat completions with tools and reasoning over a fake token client, for several templates."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from app.chat import ChatTemplate
from app.chat_message import ChatMessage
from app.coalesced import stream_items
from app.tool_calls.schema import Tool
from replicas.errors import InvalidRequest
from tests.chat_server import (
    ARGUMENTS,
    DEEPSEEK,
    GPT_OSS,
    QWEN,
    TOOLS,
    WEATHER,
    Server,
    call_text,
)
from tests.tiny_tokenizer import CHAT_TEMPLATE

PAST = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": ARGUMENTS},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "5 degrees"},
]


@pytest.fixture
def make_server(tmp_path: Path) -> Callable[..., Server]:
    return lambda *args, **options: Server(tmp_path, *args, **options)


def seen(completion: ChatCompletion) -> tuple[Any, ...]:
    [choice] = completion.choices
    message = choice.message
    calls = [(c.type, c.function.name, c.function.arguments) for c in message.tool_calls or ()]  # pyright: ignore[reportAttributeAccessIssue]
    reasoning = getattr(message, "reasoning_content", None)
    return choice.finish_reason, message.content, reasoning, calls


STYLES = pytest.mark.parametrize(
    ("template", "special", "text"),
    [
        (QWEN, (), f"<think>\nhm\n</think>\n\nLet me see.\n{call_text()}"),
        (QWEN, ("<tool_call>", "</tool_call>", "<think>", "</think>"),
         f"<think>\nhm\n</think>\n\nLet me see.\n{call_text()}"),
        (
            DEEPSEEK + "{# </think> #}",
            ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"),
            "<think>hm</think>Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function"
            f"<｜tool▁sep｜>get_weather\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>"
            "<｜tool▁calls▁end｜>",
        ),
        (
            GPT_OSS,
            ("<|channel|>", "<|start|>", "<|message|>", "<|end|>", "<|constrain|>"),
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary"
            "<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary "
            f"to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}",
        ),
    ],
    ids=["qwen", "qwen-special", "deepseek", "gpt-oss"],
)  # fmt: skip


@STYLES
async def test_a_call_and_its_reasoning_are_answered_whole_and_streamed(
    make_server: Callable[..., Server], template: str, special: Sequence[str], text: str
) -> None:
    expected = ("tool_calls", "Let me see.", "hm", [("function", "get_weather", ARGUMENTS)])
    for tokens_per_delta in (1, 7):
        server = make_server(template, text, special=special, tokens_per_delta=tokens_per_delta)
        whole, streamed = await server.whole(), await server.streamed()
        assert seen(whole) == seen(streamed) == expected
        assert whole.usage is not None
        assert streamed.usage == whole.usage
        assert whole.usage.completion_tokens == len(server.output)
        details = whole.usage.completion_tokens_details
        assert details is not None
        assert details.reasoning_tokens is not None
        assert 1 <= details.reasoning_tokens < len(server.output) // 2
        ids = {c.choices[0].message.tool_calls[0].id for c in (whole, streamed)}  # pyright: ignore[reportOptionalSubscript]
        assert len(ids) == 2


async def test_a_message_that_only_calls_has_no_content(make_server: Callable[..., Server]) -> None:
    two = f"{call_text()}\n{call_text('{}', 'f')}\n"
    server = make_server(QWEN, two)
    answer = (await server.post()).json()["choices"][0]
    assert answer["message"]["content"] is None
    assert "reasoning_content" not in answer["message"]
    assert [call["function"]["name"] for call in answer["message"]["tool_calls"]] == [
        "get_weather",
        "f",
    ]
    assert not server.fake.given_up
    streamed = await server.streamed()
    assert [c[1] for c in seen(streamed)[3]] == ["get_weather", "f"]


async def test_without_parallel_calls_the_first_ends_the_answer(
    make_server: Callable[..., Server],
) -> None:
    two = f"{call_text()}\n{call_text('{}', 'f')}\n"
    counts: set[int] = set()
    for tokens_per_delta in (1, 5, 1000):
        server = make_server(QWEN, two, tokens_per_delta=tokens_per_delta)
        whole = await server.whole(parallel_tool_calls=False)
        streamed = await server.streamed(parallel_tool_calls=False)
        first = ("tool_calls", [("function", "get_weather", ARGUMENTS)])
        for completion in (whole, streamed):
            assert (seen(completion)[0], seen(completion)[3]) == first
            assert completion.usage is not None
            counts.add(completion.usage.completion_tokens)
        assert len(server.fake.given_up) == (0 if tokens_per_delta == 1000 else 2)
    assert len(counts) == 1
    assert counts.pop() < len(server.output) - 5


async def test_what_is_cut_off_is_content_and_says_so(make_server: Callable[..., Server]) -> None:
    server = make_server(QWEN, call_text())
    limit = len(server.output) - 8
    for ask in (server.whole, server.streamed):
        completion = await ask(max_tokens=limit)
        reason, content, _, calls = seen(completion)
        assert (reason, calls) == ("length", [])
        assert content == server.tokenizer.decode(server.output[:limit], skip_special_tokens=True)


async def test_a_malformed_call_is_content(make_server: Callable[..., Server]) -> None:
    bad = call_text('{"city": }')
    server = make_server(QWEN, f"Well {bad} then")
    for ask in (server.whole, server.streamed):
        assert seen(await ask()) == ("stop", f"Well {bad} then", None, [])


async def test_each_choice_has_calls_of_its_own(make_server: Callable[..., Server]) -> None:
    server = make_server(QWEN, call_text())
    completion = await server.whole(n=3)
    ids = [choice.message.tool_calls[0].id for choice in completion.choices]  # pyright: ignore[reportOptionalSubscript]
    assert len(set(ids)) == 3
    assert all(choice.finish_reason == "tool_calls" for choice in completion.choices)


async def test_tools_come_into_the_prompt_unless_none_may_be_called(
    make_server: Callable[..., Server],
) -> None:
    server = make_server(QWEN, call_text())
    await server.whole()
    assert json.dumps(WEATHER, ensure_ascii=False) in server.prompt
    assert seen(await server.whole(tool_choice="none")) == ("stop", call_text(), None, [])
    assert "get_weather" not in server.prompt
    await server.whole(messages=PAST)
    assert ' "arguments": {"city": "Zürich 🚀"}}' in server.prompt
    assert "5 degrees" in server.prompt


async def test_a_demanded_call_comes_whatever_the_model_likes(
    make_server: Callable[..., Server],
) -> None:
    """The model is random: only the grammar makes it call, and each call suits its schema."""
    server = make_server(
        QWEN,
        "",
        special=("<tool_call>", "</tool_call>"),
        takes_grammars=True,
        reasoning_style="none",
    )
    city = {"type": "string", "enum": ["Oslo", "Rome"]}
    parameters = {
        "type": "object",
        "properties": {"city": city},
        "required": ["city"],
        "additionalProperties": False,
    }
    function = {"name": "get_weather", "parameters": parameters}
    other = {"name": "f", "parameters": {"additionalProperties": False}}
    tools = [{"type": "function", "function": f} for f in (function, other)]
    named = {"type": "function", "function": {"name": "get_weather"}}
    limits = {"max_tokens": 2000, "tools": tools}
    for seed in range(2):
        reason, content, _, calls = seen(await server.whole(tool_choice=named, seed=seed, **limits))
        assert len(calls) == 1, (reason, content)
        [(_, name, arguments)] = calls
        assert (reason, content, name) == ("tool_calls", None, "get_weather")
        assert json.loads(arguments)["city"] in city["enum"]
        single = {"tool_choice": "required", "parallel_tool_calls": False}
        reason, _, _, calls = seen(await server.streamed(**single, seed=seed, **limits))
        assert (reason, len(calls)) == ("tool_calls", 1)
    answer = await server.post(tool_choice=named, response_format={"type": "json_object"})
    assert answer.json()["error"]["param"] == "response_format"
    strict = [{"type": "function", "function": {**function, "strict": True}}]
    await server.whole(tools=strict, max_tokens=20)
    assert "Oslo" in server.fake.calls[-1].sampling.grammar
    await server.service.close()


async def test_reasoning_may_be_opened_by_the_prompt_and_left_out(
    make_server: Callable[..., Server],
) -> None:
    server = make_server(QWEN, "I think so.\n</think>\n\nYes.")
    thinks = {"chat_template_kwargs": {"thinks": True}, "tools": []}
    whole = await server.whole(**thinks)
    assert seen(whole) == seen(await server.streamed(**thinks))
    assert seen(whole) == ("stop", "Yes.", "I think so.", [])
    hidden = await server.whole(**thinks, include_reasoning=False)
    assert seen(hidden) == ("stop", "Yes.", None, [])
    assert hidden.usage == whole.usage
    # Without the opening, what the model writes is content.
    assert seen(await server.whole(tools=[]))[1:3] == ("I think so.\n</think>\n\nYes.", None)
    past = {"role": "assistant", "content": "Yes.", "reasoning_content": "earlier"}
    await server.whole(messages=[*PAST[:1], past, *PAST[:1]])
    assert "<think>\nearlier\n</think>\n\nYes." in server.prompt


async def test_reasoning_without_an_end_is_counted_and_never_content(
    make_server: Callable[..., Server],
) -> None:
    server = make_server(QWEN, "<think>on and on and on")
    completion = await server.streamed(max_tokens=len(server.output) - 2)
    reason, content, reasoning, _ = seen(completion)
    assert (reason, content or "") == ("length", "")
    assert reasoning.startswith("on and")


@pytest.mark.parametrize(
    ("template", "config", "message"),
    [
        (CHAT_TEMPLATE, {}, "how it writes tool calls is not known"),
        (CHAT_TEMPLATE, {"tool_call_style": "hermes"}, "takes no tools"),
        (QWEN, {"tool_call_style": "none"}, "how it writes tool calls is not known"),
    ],
)
async def test_tools_are_refused_where_they_could_not_work(
    make_server: Callable[..., Server], template: str, config: dict[str, Any], message: str
) -> None:
    server = make_server(template, "x", **config)
    answer = await server.post()
    assert (answer.status, answer.error["param"]) == (400, "tools")
    assert message in answer.error["message"]
    assert (await server.post(tools=[])).status == 200
    assert (await server.post(tool_choice="none")).status == 200
    answer = await server.client.post("/tokenize", {"messages": PAST[:1], "tools": TOOLS})
    assert (answer.status, answer.error["param"]) == (400, "tools")


async def test_anthropics_messages_have_content_without_reasoning(
    make_server: Callable[..., Server],
) -> None:
    server = make_server(QWEN, "<think>hm</think>Yes.", tokens_per_delta=1000)
    body = {"model": "tiny", "max_tokens": 100, "messages": PAST[:1]}
    answer = (await server.client.post("/v1/messages", body)).json()
    assert [block["text"] for block in answer["content"]] == ["Yes."]
    streamed = (await server.client.post("/v1/messages", {**body, "stream": True})).body.decode()
    assert '"text":"Yes."' in streamed
    assert "hm" not in streamed


async def test_styles_can_be_set(make_server: Callable[..., Server]) -> None:
    server = make_server(QWEN, f"<think>a</think>{call_text()}", reasoning_style="none")
    assert seen(await server.whole())[1:3] == ("<think>a</think>", None)


async def test_calls_in_a_chat_are_refused_by_a_template_that_loses_them(
    make_server: Callable[..., Server],
) -> None:
    answer = await make_server(CHAT_TEMPLATE, "x").post(tools=[], messages=PAST)
    assert (answer.status, answer.error["param"]) == (400, "messages")


async def test_deployments_get_calls_by_handle(make_server: Callable[..., Server]) -> None:
    server = make_server(QWEN, f"<think>a</think>b {call_text()}")
    generation = await server.service.plan_chat({"messages": PAST[:1], "tools": TOOLS})
    *items, usage = [item async for item in stream_items(server.service, generation)]
    assert "".join(item["text"] for item in items) == "b"
    assert "".join(item.get("reasoning_content", "") for item in items) == "a"
    [call] = [call for item in items for call in item.get("tool_calls", ())]
    assert (call["name"], call["arguments"], items[-1]["finish_reason"]) == (
        "get_weather",
        ARGUMENTS,
        "tool_calls",
    )
    assert usage["usage"]["completion_tokens"] == len(server.output)


def test_templates_get_what_they_want() -> None:
    messages = [ChatMessage.model_validate(message) for message in PAST_CLEAN]
    tools = [Tool.model_validate(tool) for tool in TOOLS]
    assert "\n```json\n" + ARGUMENTS + "\n```" in ChatTemplate(DEEPSEEK, {}).render(messages)
    shown = ChatTemplate(QWEN, {})
    assert '"arguments": {"city": "Zürich 🚀"}}' in shown.render(messages)
    # A description that a template cannot do without.
    assert "get_weather: The weatherf: <|start|>" in ChatTemplate(GPT_OSS, {}).render(
        messages[:1], tools=tools
    )
    # A template of its own for chats with tools.
    two = ChatTemplate(CHAT_TEMPLATE, {}, tool_source=QWEN)
    assert two.render(messages[:1], tools=tools) == shown.render(messages[:1], tools=tools)
    assert "get_weather" not in two.render(messages[:1])
    names = ChatTemplate("{% for m in messages %}{{ m.name or '-' }}{% endfor %}", {})
    assert not names.tool_support.takes_calls
    with pytest.raises(InvalidRequest, match="takes no tool calls"):
        names.render(messages)


def test_renders_tools_like_transformers() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    clean: list[dict[str, Any]] = json.loads(json.dumps(PAST))
    clean[1]["content"] = ""
    clean[1]["tool_calls"][0]["function"]["arguments"] = json.loads(ARGUMENTS)
    [reference], _ = render_jinja_template(
        [clean], tools=[WEATHER], chat_template=QWEN, add_generation_prompt=True
    )
    messages = [ChatMessage.model_validate(message) for message in PAST_CLEAN]
    tools = [Tool.model_validate(WEATHER)]
    assert ChatTemplate(QWEN, {}).render(messages, tools=tools) == reference


PAST_CLEAN = [{k: v for k, v in message.items() if v is not None} for message in PAST]
