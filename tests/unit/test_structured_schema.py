"""The parameters that say what an output must look like, as clients spell them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.lib._pydantic import to_strict_json_schema
from pydantic import BaseModel

from app.openai_schema import ChatRequest, CompletionRequest, parse_request
from app.output_grammar import Choices, JsonSchema, Lark, Regex, Tag, Tags
from app.tool_calls.schema import NamedTool
from replicas.errors import InvalidRequest

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
TAGS = {
    "structures": [{"begin": "<f=a>", "schema": {"type": "object"}, "end": "</f>"}],
    "triggers": ["<", "<f"],
}
AS_TAGS = Tags((Tag("<f", "<f=a>", {"type": "object"}, "</f>"),))
TOOLS = [{"type": "function", "function": {"name": "f", "strict": True}}]


class Person(BaseModel):
    name: str
    age: int


def deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"a": schema}
    return schema


def chat(**fields: Any) -> ChatRequest:
    return parse_request(ChatRequest, {**CHAT, **fields})


def completion(**fields: Any) -> CompletionRequest:
    return parse_request(CompletionRequest, {"prompt": "x", **fields})


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None}, None),
        ({"response_format": {"type": "json_object"}}, JsonSchema({"type": "object"})),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "Person",
                        "strict": True,
                        "schema": to_strict_json_schema(Person),
                    },
                }
            },
            JsonSchema(to_strict_json_schema(Person)),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "any"}}},
            JsonSchema({}),
        ),
        ({"response_format": {"type": "structural_tag", **TAGS}}, AS_TAGS),
        ({"structured_outputs": {"json": {"type": "array"}}}, JsonSchema({"type": "array"})),
        ({"structured_outputs": {"json": '{"type": "array"}'}}, JsonSchema({"type": "array"})),
        ({"structured_outputs": {"json_object": True}}, JsonSchema({"type": "object"})),
        ({"structured_outputs": {"regex": "a+"}}, Regex("a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Choices(("a", "b"))),
        ({"structured_outputs": {"grammar": "start: A"}}, Lark("start: A")),
        ({"structured_outputs": {"structural_tag": TAGS}}, AS_TAGS),
        ({"structured_outputs": {"structural_tag": json.dumps(TAGS)}}, AS_TAGS),
        ({"guided_json": {"type": "array"}}, JsonSchema({"type": "array"})),
        ({"guided_json": '{"type": "array"}'}, JsonSchema({"type": "array"})),
        ({"guided_regex": "a+"}, Regex("a+")),
        ({"guided_choice": ["a"]}, Choices(("a",))),
        ({"guided_grammar": "start: A", "guided_decoding_backend": "auto"}, Lark("start: A")),
    ],
)
def test_every_spelling_demands_the_same(fields: dict[str, Any], constraint: object) -> None:
    for parse in (chat, completion):
        demand = parse(**fields).demand()
        assert (None if demand is None else demand.constraint) == constraint
        assert demand is None or demand.param in fields


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object", "json_schema": {}}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": deep(65)}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        (
            {"response_format": {"type": "structural_tag", **TAGS, "triggers": ["x"]}},
            "response_format",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"backend": "x"}}, "structured_outputs.backend"),
        ({"guided_json": deep(65)}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": ["a"] * 10_001}, "guided_choice"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ],
)
def test_a_bad_demand_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    for parse in (chat, completion):
        with pytest.raises(InvalidRequest) as info:
            parse(**fields)
        assert info.value.param == param
        assert len(info.value.message) < 500


def test_calls_can_be_demanded() -> None:
    assert chat(tools=TOOLS, tool_choice="required").tool_choice == "required"
    named = chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "f"}})
    assert isinstance(named.tool_choice, NamedTool)
    assert [tool.function.strict for tool in named.offered_tools] == [True]


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": "any", "tools": TOOLS},
        {"tool_choice": 3, "tools": TOOLS},
        {"tool_choice": {"type": "function"}, "tools": TOOLS},
        {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": TOOLS},
        {"tool_choice": {"type": "function", "function": {"name": "f", "x": 1}}, "tools": TOOLS},
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}, "tools": TOOLS},
    ],
)
def test_a_bad_choice_of_tools_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as info:
        chat(**fields)
    assert info.value.param == "tool_choice"
