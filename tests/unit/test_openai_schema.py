"""Request bodies: what is accepted, what is refused and how the refusal names its cause."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as ChatParams
from openai.types.completion_create_params import (
    CompletionCreateParamsStreaming as CompletionParams,
)

from app.errors import InvalidJSON, MissingParameter, UnknownParameter, UnsupportedParameter
from app.generation_config import SamplingDefaults
from app.openai_schema import (
    ChatRequest,
    CompletionRequest,
    choice_seed,
    parse_request,
)
from app.schema_faults import parse_json
from replicas.errors import InvalidRequest

PROMPT: dict[str, Any] = {"prompt": "a"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}


def completion(**fields: Any) -> CompletionRequest:
    return parse_request(CompletionRequest, {**PROMPT, **fields})


def chat(**fields: Any) -> ChatRequest:
    return parse_request(ChatRequest, {**CHAT, **fields})


def test_defaults_are_openais() -> None:
    request = completion()
    assert (request.max_tokens, request.n, request.stream) == (16, 1, False)
    sampling = request.sampling(
        max_tokens=16, seed=7, choice=0, defaults=SamplingDefaults(), bad_words=()
    )
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (1.0, 1.0, 0, 7)
    assert chat().max_output_tokens is None


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", ("text",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_prompts_come_in_four_kinds(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompt == expected


@pytest.mark.parametrize(
    "prompt",
    [[], [[]], [[1], []], ["a", 1], [1, "a"], [True], [-1], [1.5], 5, {"a": 1}, [[1], "a"]],
)
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as info:
        completion(prompt=prompt)
    assert info.value.param == "prompt"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("max_tokens", value) for value in (-1, 0, 1.5, "5", True)],
        *[("min_p", value) for value in (-0.1, 1.1, "1")],
        *[("presence_penalty", value) for value in (-2.1, 2.1, "1")],
        *[("frequency_penalty", value) for value in (-2.1, 2.1)],
        *[("repetition_penalty", value) for value in (0, -1, 1e4)],
        *[("logit_bias", value) for value in ({"a": 1}, {"1": 101}, {"1": "2"}, [1], {"-1": 1})],
        ("logit_bias", {str(i): 1 for i in range(301)}),
        *[("allowed_token_ids", value) for value in ([-1], "a", [1.5])],
        *[("bad_words", value) for value in ("a", [""], [1], ["a"] * 33)],
        *[("min_tokens", value) for value in (-1, 1.5)],
        *[("prompt_logprobs", value) for value in (-1, 21, True)],
        *[("truncate_prompt_tokens", value) for value in (0, -2)],
        ("truncation_side", "middle"),
        *[("temperature", value) for value in (1e9, 2.1, -0.1, "1", True, [1])],
        *[("top_p", value) for value in (0, -0.5, 1.01)],
        *[("top_k", value) for value in (-2, 0.5)],
        *[("n", value) for value in (0, -1, 129, 1.5)],
        *[("seed", value) for value in (1.5, "x", 2**64, -(2**63) - 1)],
        *[("stop", value) for value in (["x"] * 1000, "", ["a", ""], 5, [5], "x" * 5000)],
        *[("stop_token_ids", value) for value in ([-1], ["a"], 5, [True], [1] * 1000)],
        ("ignore_eos", "yes"),
        ("stream", 1),
        ("user", 5),
        ("metadata", {"a": 1}),
        ("model", 5),
        ("cache_salt", "x" * 2000),
        ("return_token_ids", "true"),
    ],
)
def test_a_value_out_of_range_names_its_parameter(field: str, value: Any) -> None:
    for parse in (completion, chat):
        with pytest.raises(InvalidRequest) as info:
            parse(**{field: value})
        assert info.value.param is not None
        assert info.value.param.split("[")[0] in (field, f"{field}.a")
        assert info.value.code == "invalid_value"
        assert len(info.value.message) < 500


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 2),
        ("suffix", "x"),
        ("guided_whitespace_pattern", " "),
        ("guided_decoding_backend", "xgrammar"),
    ],
)
def test_an_unsupported_parameter_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(UnsupportedParameter, match=f"'{field}'") as info:
        completion(**{field: value})
    assert (info.value.param, info.value.status) == (field, 400)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("reasoning_effort", "high"),
        ("modalities", ["audio"]),
        ("audio", {"voice": "x"}),
        ("store", True),
        ("web_search_options", {}),
        ("chat_template", "x"),
    ],
)
def test_an_unsupported_chat_parameter_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(UnsupportedParameter) as info:
        chat(**{field: value})
    assert info.value.param == field


def test_values_that_change_nothing_are_accepted() -> None:
    neutral = {
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "logprobs": None,
        "user": "me",
        "n": 1,
        "seed": None,
        "stop": None,
        "min_p": 0,
        "repetition_penalty": 1.0,
        "metadata": {"a": "b"},
        "stream_options": None,
    }
    completion(**neutral, echo=False, best_of=1, suffix=None)
    chat(
        **{**neutral, "logprobs": False},
        store=False,
        tools=[],
        tool_choice="auto",
        parallel_tool_calls=True,
        response_format={"type": "text"},
        service_tier="auto",
        safety_identifier="x",
        prompt_cache_key="y",
    )


@pytest.mark.parametrize(
    ("schema", "params"), [(CompletionRequest, CompletionParams), (ChatRequest, ChatParams)]
)
def test_every_parameter_of_openai_is_known(schema: Any, params: Any) -> None:
    known = set(schema.model_fields) | set(schema.neutral)
    assert set(get_type_hints(params)) <= known


def test_an_unknown_key_is_named() -> None:
    with pytest.raises(UnknownParameter, match="'temprature'") as info:
        completion(temprature=1)
    assert (info.value.param, info.value.code) == ("temprature", "unknown_parameter")


def test_a_missing_key_is_named() -> None:
    with pytest.raises(MissingParameter, match="'messages'"):
        parse_request(ChatRequest, {"model": "x"})
    with pytest.raises(MissingParameter, match="'prompt'"):
        parse_request(CompletionRequest, {"prompt": None})


CALL_ARGUMENTS = "messages[0].tool_calls[0].function.arguments"


def call(arguments: str = "{}") -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"id": "call_1", "type": "function", "function": function}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"properties": schema}
    return schema


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ({}, "tools"),
        (["f"], "tools[0]"),
        ([{"type": "web_search"}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "function", "function": {}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "two words"}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "f" * 65}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "f", "x": 1}}], "tools[0].function.x"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}],
            "tools[0].function.parameters",
        ),
        (
            [{"type": "function", "function": {"name": "f", "parameters": []}}],
            "tools[0].function.parameters",
        ),
        (
            [{"type": "function", "function": {"name": "f", "parameters": deep(33)}}],
            "tools[0].function.parameters",
        ),
        ([{"type": "function", "function": {"name": "f"}}] * 2, "tools"),
        ([{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)], "tools"),
        (
            [{"type": "function", "function": {"name": "f", "description": "x" * (512 << 10)}}],
            "tools",
        ),
    ],
)
def test_a_bad_tool_is_named(tools: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as info:
        chat(tools=tools)
    assert info.value.param == param
    assert len(info.value.message) < 500


def test_tools_within_the_limits_are_accepted() -> None:
    function = {
        "name": "get-weather_2",
        "description": None,
        "parameters": deep(30),
        "strict": False,
    }
    request = chat(tools=[{"type": "function", "function": function}], tool_choice="auto")
    assert [tool.function.name for tool in request.offered_tools] == ["get-weather_2"]
    assert (
        chat(tools=[{"type": "function", "function": function}], tool_choice="none").offered_tools
        == ()
    )
    messages = [
        CHAT["messages"][0],
        {"role": "assistant", "content": None, "tool_calls": [{**call(" "), "index": 0}]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "5"}]},
    ]
    assert chat(messages=messages).messages[1].tool_calls[0].function.arguments == "{}"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"role": "alien", "content": "a"}], "messages[0].role"),
        ([{"content": "a"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": ["a"]}], "messages[0].content"),
        ([{"role": "user", "content": "a", "colour": 1}], "messages[0].colour"),
        ([{"role": "tool", "content": "a"}], "messages[0]"),
        ([{"role": "user", "content": "a", "tool_call_id": "x"}], "messages[0]"),
        ([{"role": "user", "content": "a", "tool_calls": [call()]}], "messages[0]"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].id"),
        ([{"role": "assistant", "tool_calls": [call("[1]")]}], CALL_ARGUMENTS),
        ([{"role": "assistant", "tool_calls": [call("{'a': 1}")]}], CALL_ARGUMENTS),
        (
            [{"role": "assistant", "tool_calls": [call(f'{{"a": {"[" * 40}{"]" * 40}}}')]}],
            CALL_ARGUMENTS,
        ),
        ([{"role": "assistant", "function_call": {"name": "f"}}], "messages"),
    ],
)
def test_a_bad_message_is_named(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as info:
        parse_request(ChatRequest, {"messages": messages})
    assert info.value.param == param


def test_a_received_assistant_message_may_be_passed_back() -> None:
    message = {
        "role": "assistant",
        "content": "Hi",
        "refusal": None,
        "annotations": [],
        "tool_calls": None,
        "function_call": None,
        "audio": None,
        "reasoning_content": "because",
    }
    request = chat(messages=[CHAT["messages"][0], message])
    assert request.messages[1].text == "Hi"
    assert request.messages[1].reasoning_text == "because"


def test_parameters_that_exclude_each_other_are_named() -> None:
    for param, fields in (
        ("top_logprobs", {"top_logprobs": 2}),
        ("continue_final_message", {"continue_final_message": True, "add_generation_prompt": True}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"messages": []}}),
    ):
        with pytest.raises(InvalidRequest) as info:
            chat(**fields)
        assert info.value.param == param
    for parse in (completion, chat):
        with pytest.raises(InvalidRequest, match="prompt_logprobs"):
            parse(prompt_logprobs=1, stream=True)
    assert completion(max_tokens=0, echo=True).max_tokens == 0


def test_what_a_request_leaves_out_is_the_models_default() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_k=20, repetition_penalty=1.1)
    sampling = completion(top_k=-1, bad_words=["x"]).sampling(
        max_tokens=9, seed=0, choice=0, defaults=defaults, bad_words=((5,),)
    )
    assert (sampling.temperature, sampling.top_k, sampling.repetition_penalty) == (0.6, 0, 1.1)
    assert sampling.bad_words == ((5,),)


def test_max_completion_tokens_goes_before_max_tokens() -> None:
    assert chat(max_tokens=5, max_completion_tokens=9).max_output_tokens == 9
    assert chat(max_tokens=5).max_output_tokens == 5


def test_stream_options_need_a_stream() -> None:
    with pytest.raises(InvalidRequest, match="stream_options"):
        completion(stream_options={"include_usage": True})
    options = completion(stream=True, stream_options={"include_usage": True}).stream_options
    assert options.include_usage


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nope",
        b"[1]",
        b'"text"',
        b"null",
        b"5",
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": 1e999}',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b"\xff\xfe{}",
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidJSON):
        parse_json(body)


def test_a_huge_integer_is_not_a_seed() -> None:
    body = parse_json(json.dumps({"prompt": "a", "seed": 10**30}).encode())
    with pytest.raises(InvalidRequest, match="seed"):
        parse_request(CompletionRequest, body)


def test_seeds_of_choices_differ_and_the_first_is_the_requests_own() -> None:
    seeds = [choice_seed(seed, choice) for seed in range(50) for choice in range(20)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert choice_seed(-1, 0) == 2**64 - 1
    assert choice_seed(5, 0) == 5
