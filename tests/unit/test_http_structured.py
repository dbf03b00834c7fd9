"""Structured output over HTTP: what is submitted, what is refused; bombs hold up nobody."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from app.grammar_checker import MAX_GRAMMAR_CHARS, GrammarChecker
from app.output_grammar import Regex, write_grammar
from replicas.errors import InvalidRequest
from tests.grammar_follower import Follower
from tests.http_server import MakeServer, Server, body, chat_body

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
EXPONENTIAL = "start: A0\n" + "".join(f"A{i}: A{i + 1} A{i + 1}\n" for i in range(18))
MANY = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(4000)}}
BOMBS: dict[str, dict[str, Any]] = {
    "repeats": {"guided_regex": "(a{1000}){1000}"},
    "nested_repeats": {"guided_regex": "((a{100}){100}){100}"},
    "many_properties": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "m", "schema": MANY}}
    },
    "exponential": {"guided_grammar": f'{EXPONENTIAL}A18: "x"\n'},
    "many_choices": {"guided_choice": [f"choice number {i} of many" * 3 for i in range(9999)]},
}
BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown_type": ({"guided_json": {"type": "strin"}}, "guided_json", "strin"),
    "unsupported": ({"guided_json": {"not": {"type": "null"}}}, "guided_json", "not"),
    "impossible": ({"guided_json": {"enum": []}}, "guided_json", ""),
    "reference": ({"guided_json": {"$ref": "http://127.0.0.1:1/x"}}, "guided_json", "127.0.0.1"),
    "regex": ({"guided_regex": "(a"}, "guided_regex", "unclosed"),
    "lookahead": ({"guided_regex": "a(?=b)"}, "guided_regex", "look-around"),
    "no_text": ({"guided_regex": "[^\\s\\S]"}, "guided_regex", "no text"),
    "lark": ({"guided_grammar": "start: nobody"}, "guided_grammar", "nobody"),
    "special": ({"guided_grammar": "start: <|nobody|>"}, "guided_grammar", "nobody"),
}


@pytest.fixture
def server(make_server: MakeServer) -> Server:
    server = make_server(takes_grammars=True, max_model_len=400)
    info = server.fake.state.model_info
    assert info is not None
    text = server.tokenizer._tokenizer.to_str()
    server.fake.script = Follower(text, info)
    return server


async def test_every_way_of_asking_shapes_the_answer(server: Server) -> None:
    named = {"name": "s", "schema": SCHEMA, "strict": True}
    for fields in (
        {"response_format": {"type": "json_schema", "json_schema": named}},
        {"structured_outputs": {"json": SCHEMA}},
        {"guided_json": SCHEMA, "n": 3},
    ):
        answer = await server.client.post("/v1/chat/completions", chat_body(**fields))
        assert answer.status == 200, answer.json()
        for choice in ChatCompletion.model_validate(answer.json()).choices:
            assert choice.finish_reason == "stop"
            content = json.loads(choice.message.content or "")
            assert content["b"] in ("x", "y")
            assert content["a"] <= 99
    answer = await server.client.post("/v1/completions", body(guided_choice=["red", "blue"]))
    assert answer.json()["choices"][0]["text"] in ("red", "blue")
    answer = await server.client.post("/v1/completions", body(prompt=["a", "b"], guided_regex="x+"))
    assert len(server.fake.calls) == 8
    assert len({call.sampling.grammar for call in server.fake.calls[-2:]}) == 1


async def test_without_a_demand_there_is_no_grammar(make_server: MakeServer) -> None:
    server = make_server(takes_grammars=True)
    for fields in ({}, {"response_format": {"type": "text"}}):
        answer = await server.client.post("/v1/chat/completions", chat_body(**fields))
        assert answer.status == 200
    assert [call.sampling.grammar for call in server.fake.calls] == ["", ""]


async def test_a_server_without_structured_output_says_so(make_server: MakeServer) -> None:
    answer = await make_server().client.post("/v1/completions", body(guided_regex="a"))
    error = answer.json()["error"]
    assert (answer.status, error["param"]) == (400, "guided_regex")
    assert "engine.structured_output" in error["message"]


@pytest.mark.parametrize("case", BAD)
async def test_a_bad_demand_is_refused_before_anything_is_submitted(
    server: Server, case: str
) -> None:
    fields, param, word = BAD[case]
    answer = await server.client.post("/v1/completions", body(**fields))
    error = answer.json()["error"]
    assert (answer.status, error["param"], error["code"]) == (400, param, "invalid_value")
    assert word in error["message"]
    assert len(error["message"]) < 600
    assert server.fake.calls == []


async def test_bombs_are_refused_while_others_are_served(server: Server) -> None:
    """All at once, with good requests in between; the event loop never stops."""
    await server.client.post("/v1/completions", body(guided_regex="warm"))
    longest_s = 0.0

    async def tick() -> None:
        nonlocal longest_s
        loop = asyncio.get_running_loop()
        while True:
            before_s = loop.time()
            await asyncio.sleep(0.01)
            longest_s = max(longest_s, loop.time() - before_s)

    ticking = asyncio.create_task(tick())
    good = [body(guided_regex=f"x{i}[a-z]") for i in range(4)]
    bombs = [body(**fields) for fields in BOMBS.values()]
    answers = await asyncio.gather(
        *(server.client.post("/v1/completions", fields) for fields in (*bombs, *good))
    )
    ticking.cancel()
    for answer in answers[: len(BOMBS)]:
        error = answer.json()["error"]
        assert (answer.status, error["code"]) == (400, "invalid_value")
        assert (
            "too complex" in error["message"]
            or "at most" in error["message"]
            or "Too many" in (error["message"])
        )
    assert [answer.status for answer in answers[len(BOMBS) :]] == [200] * len(good)
    assert longest_s < 0.5


async def test_a_checker_whose_process_was_killed_starts_another(
    server: Server, model_dir: Path
) -> None:
    info = server.fake.state.model_info
    assert info is not None
    checker = GrammarChecker(model_dir)
    await checker.check('start: "a"', info, param="p")
    worker = await checker._worker  # pyright: ignore[reportGeneralTypeIssues]
    worker._process.kill()
    await worker._reading
    with pytest.raises(InvalidRequest, match="nobody"):
        await checker.check("start: nobody", info, param="p")
    with pytest.raises(InvalidRequest, match=str(MAX_GRAMMAR_CHARS)):
        await checker.check(" " * (MAX_GRAMMAR_CHARS + 1), info, param="p")
    await checker.close()


async def test_a_checker_keeps_its_limit_where_its_parent_ignores_the_signal(
    server: Server, model_dir: Path
) -> None:
    """As libtpu has a process do that starts it."""
    info = server.fake.state.model_info
    assert info is not None
    grammar = write_grammar(Regex(str(BOMBS["nested_repeats"]["guided_regex"])), special={})
    checker = GrammarChecker(model_dir)
    before = signal.signal(signal.SIGPROF, signal.SIG_IGN)
    try:
        with pytest.raises(InvalidRequest, match="takes more than"):
            await checker.check(grammar, info, param="p")
    finally:
        signal.signal(signal.SIGPROF, before)
        await checker.close()
