"""Parsers of tool calls and reasoning: every style, every chunking, and what is no call."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from app.tool_calls.message import MessageDelta
from app.tool_calls.reader import MessageFormat, MessageReader
from app.tool_calls.styles import CallStyle, ReasoningStyle

NAMES = ("get_weather", "f", "function")
QWEN = MessageFormat("hermes", "think")
LLAMA = MessageFormat("llama3", "none")
MISTRAL = MessageFormat("mistral", "mistral")
DEEPSEEK = MessageFormat("deepseek", "think")
GPT_OSS = MessageFormat("gpt-oss", "gpt-oss")
FORMATS = (QWEN, LLAMA, MISTRAL, DEEPSEEK, GPT_OSS)

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALLED, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
WEATHER = (
    '{"city": "Zürich 🚀", "days": [1, -2.5e3, {"deep": null}], "quote": "\\"</tool_call>\\u00e9"}'
)


def reader(form: MessageFormat, **options: Any) -> MessageReader:
    defaults: dict[str, Any] = {
        "functions": NAMES,
        "is_inside_thought": False,
        "max_calls": None,
        "shows_reasoning": True,
    }
    made = form.reader(**{**defaults, **options})
    assert made is not None
    return made


Parts = tuple[str, str, list[tuple[str, str]]]


def deltas(form: MessageFormat, pieces: Sequence[str], **options: Any) -> list[MessageDelta]:
    parser = reader(form, **options)
    found: list[MessageDelta] = []
    for piece in pieces:
        parser.feed(piece)
        found.append(parser.take())
    parser.finish()
    return [*found, parser.take()]


def joined(found: Sequence[MessageDelta]) -> Parts:
    calls = [call for delta in found for call in delta.tool_calls]
    assert [call.index for call in calls] == list(range(len(calls)))
    assert len({call.id for call in calls}) == len(calls)
    return (
        "".join(delta.content for delta in found),
        "".join(delta.reasoning for delta in found),
        [(call.name, call.arguments) for call in calls],
    )


def parse(form: MessageFormat, text: str, **options: Any) -> Parts:
    return joined(deltas(form, [text], **options))


CASES: list[tuple[MessageFormat, str, Parts]] = [
    (
        QWEN,
        "<think>\nhm, 火星\n</think>\n\nLet me see.\n\n<tool_call>\n"
        f'{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {}, "name": "f"}\n</tool_call>\n',
        ("Let me see.", "hm, 火星", [("get_weather", WEATHER), ("f", "{}")]),
    ),
    # No arguments at all, arguments as text, and no closing marker.
    (
        QWEN,
        '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}',
        ("", "", [("f", "{}"), ("f", '{"a": 1}')]),
    ),
    (
        LLAMA,
        f'{{"name": "get_weather", "parameters": {WEATHER}}}; '
        '{"type": "function", "name": "f", "parameters": {}}',
        ("", "", [("get_weather", WEATHER), ("f", "{}")]),
    ),
    (
        LLAMA,
        'I look.\n<|python_tag|>{"name": "f", "parameters": {"a": 1}}',
        ("I look.", "", [("f", '{"a": 1}')]),
    ),
    (
        MISTRAL,
        '[THINK]so[/THINK][TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}, '
        f'{{"name": "get_weather", "arguments": {WEATHER}}}]',
        ("", "so", [("f", '{"a": 1}'), ("get_weather", WEATHER)]),
    ),
    (
        MISTRAL,
        f"Yes.[TOOL_CALLS]get_weather[CALL_ID]abc[ARGS]{WEATHER}[TOOL_CALLS]f[ARGS]{{}}"
        '[TOOL_CALLS]f{"b": 2}',
        ("Yes.", "", [("get_weather", WEATHER), ("f", "{}"), ("f", '{"b": 2}')]),
    ),
    (
        DEEPSEEK,
        f"<think>\nwell\n</think>\n\nA.{BEGIN}{CALL}function{SEP}get_weather\n```json\n{WEATHER}\n"
        f"```{CALLED}\n{CALL}function{SEP}f\n```json\n{{}}\n```{CALLED}{END}",
        ("A.", "well", [("get_weather", WEATHER), ("f", "{}")]),
    ),
    (
        DEEPSEEK,
        f"{BEGIN}{CALL}get_weather{SEP}{WEATHER}{CALLED}{CALL}function{SEP}{{}}{CALLED}{END} Done",
        ("Done", "", [("get_weather", WEATHER), ("function", "{}")]),
    ),
    (
        GPT_OSS,
        "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>One moment.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.get_weather <|constrain|>json<|message|>{WEATHER}<|call|>",
        ("One moment.", "I think.", [("get_weather", WEATHER)]),
    ),
    (
        GPT_OSS,
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b"
        "<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}",
        ("", "a\nb", [("f", "{}")]),
    ),
    (
        GPT_OSS,
        "<|channel|>analysis<|message|>2+2<|end|><|start|>assistant<|channel|>final<|message|>4 <5",
        ("4 <5", "2+2", []),
    ),
]

MALFORMED: list[tuple[MessageFormat, str]] = [
    (QWEN, 'A <tool_call>{"name": "f", "arguments": {"a": }}</tool_call> B'),
    (QWEN, '<tool_call>\n{"name": "f", "arguments": {"a": "cut off'),
    (QWEN, '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    (QWEN, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    (QWEN, '<tool_call>{"name": "f", "arguments": {}} and more</tool_call>'),
    (QWEN, '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    (QWEN, '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>'),
    (QWEN, '<tool_call>{"name": "f", "arguments": {"a": "raw\nline"}}</tool_call>'),
    (QWEN, '<tool_call>{"name": "f", "arguments": "\\"\\ud800\\""}</tool_call>'),
    (QWEN, f'<tool_call>{{"name": "f", "arguments": {"[" * 100}'),
    (QWEN, f'<tool_call>{{"name": "f", "arguments": {{"a": {"[" * 100}{"]" * 100}}}}}</tool_call>'),
    (QWEN, "The <tool_call> marker, <tool and </tool_call>"),
    (QWEN, "Text with <think>no thought</think> in it"),
    (LLAMA, '{"city": "Paris", "name": "f"}'),
    (LLAMA, '{"name": "f"}'),
    (LLAMA, 'It is {"name": "f", "parameters": {}}'),
    (LLAMA, '<|python_tag|>brave_search.call(query="x")'),
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "f", "arguments": {'),
    (MISTRAL, "[TOOL_CALLS]unknown[ARGS]{}"),
    (MISTRAL, "[TOOL_CALLS]f[ARGS][1]"),
    (DEEPSEEK, f"{BEGIN}{CALL}function{SEP}f\n```json\n{{}}{CALLED}{END}"),
    (DEEPSEEK, f"{BEGIN}{CALL}f{SEP}{{'a': 1}}{CALLED}{END}"),
    (GPT_OSS, "no channel at all"),
    (GPT_OSS, "<|channel|>commentary to=functions.f json<|message|>{'a': 1}<|call|>"),
    (GPT_OSS, "<|channel|>commentary to=browser.open<|message|>{}<|call|>"),
    (GPT_OSS, "<|channel|>unknown<|message|>x"),
]


def test_every_style_is_read() -> None:
    for form, text, expected in CASES:
        assert parse(form, text) == expected


def test_pieces_of_any_size_give_the_same() -> None:
    for form, text, expected in CASES:
        for size in (1, 2, 3, 5, 11):
            pieces = [text[i : i + size] for i in range(0, len(text), size)]
            assert joined(deltas(form, pieces)) == expected


def test_what_is_no_call_is_content_and_nothing_of_it_is_lost() -> None:
    for form, text in MALFORMED:
        for pieces in ([text], list(text)):
            assert joined(deltas(form, pieces)) == (text, "", [])


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    edges = [0, *sorted(at % (len(text) + 1) for at in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


FRAGMENTS = st.sampled_from(
    [
        *(text for _, text, _ in CASES),
        *(text for _, text in MALFORMED),
        *("<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>", "<|end|>"),
        *("[TOOL_CALLS]", "[ARGS]", BEGIN, CALL, SEP, CALLED, END, "<|channel|>", "<|message|>"),
        *(
            '{"name": "f"',
            ', "arguments": {',
            '"a": 1}}',
            "}",
            "]",
            '"',
            "\\",
            ";",
            "f",
            "analysis",
        ),
        *("\n", "  ", "text", "é", "🚀", "<", "[", "{"),
    ]
)


@settings(max_examples=300, deadline=None)
@given(
    form=st.sampled_from(FORMATS),
    fragments=st.lists(FRAGMENTS, max_size=8),
    cuts=st.lists(st.integers(0, 1 << 20), max_size=30),
    is_inside_thought=st.booleans(),
    max_calls=st.sampled_from([None, 1]),
)
def test_no_text_and_no_chunking_breaks_the_guarantees(
    form: MessageFormat,
    fragments: list[str],
    cuts: list[int],
    is_inside_thought: bool,
    max_calls: int | None,
) -> None:
    text = "".join(fragments)
    options: dict[str, Any] = {"is_inside_thought": is_inside_thought, "max_calls": max_calls}
    content, reasoning, calls = joined(deltas(form, cut(text, cuts), **options))
    assert (content, reasoning, calls) == parse(form, text, **options)
    for name, arguments in calls:
        assert name in NAMES
        assert isinstance(json.loads(arguments), dict)
    assert max_calls is None or len(calls) <= max_calls
    # Content and reasoning are the text's own characters, in its order.
    rest = iter(text)
    assert all(char in rest for char in content) or form is GPT_OSS


@settings(max_examples=60, deadline=None)
@given(
    form=st.sampled_from(FORMATS),
    text=st.text(alphabet=st.sampled_from('abc <[{}]>|;"\\\n\t=:é火🚀\u2028\x00'), max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=8),
)
def test_text_without_markers_passes_unchanged(
    form: MessageFormat, text: str, cuts: list[int]
) -> None:
    assert joined(deltas(form, cut(text, cuts))) == (text, "", [])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(
    arguments=st.dictionaries(st.text(), JSON, max_size=4),
    cuts=st.lists(st.integers(0, 1 << 16), max_size=20),
    is_ascii=st.booleans(),
)
def test_all_arguments_arrive_in_every_style(
    arguments: dict[str, Any], cuts: list[int], is_ascii: bool
) -> None:
    raw = json.dumps(arguments, ensure_ascii=is_ascii)
    written = {
        QWEN: f'<tool_call>\n{{"name": "f", "arguments": {raw}}}\n</tool_call>',
        LLAMA: f'{{"name": "f", "parameters": {raw}}}',
        MISTRAL: f"[TOOL_CALLS]f[ARGS]{raw}",
        DEEPSEEK: f"{BEGIN}{CALL}f{SEP}{raw}{CALLED}{END}",
        GPT_OSS: f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{raw}<|call|>",
    }
    for form, text in written.items():
        assert joined(deltas(form, cut(text, cuts))) == ("", "", [("f", raw)])


def test_text_is_held_back_no_longer_than_it_may_become_a_marker() -> None:
    pieces = ["Hel", "lo <", "b> <to", "ol_x", ' {"name"', ": 1} ", "x"]
    found = [delta.content for delta in deltas(QWEN, pieces)]
    assert found == ["Hel", "lo", " <b>", " <tool_x", ' {"name"', ": 1}", " x", ""]
    found = [delta.content for delta in deltas(LLAMA, ['{"na', 'me": "', "Bob", '", "age": 3}'])]
    assert found == ["", "", "", '{"name": "Bob", "age": 3}', ""]
    found = [delta.content for delta in deltas(LLAMA, ['{"', 'city"', ': "Par'])]
    assert found == ["", "", '{"city": "Par', ""]


def test_a_call_is_handed_out_with_its_last_character() -> None:
    *_, (form, text, _) = CASES[:1]
    first_call = text.index("</tool_call>\n<") + len("</tool_call>")
    parser = reader(form)
    parser.feed(text[: first_call - 1])
    assert not parser.take().tool_calls
    parser.feed(text[first_call - 1 : first_call])
    [call] = parser.take().tool_calls
    assert (call.name, call.arguments) == ("get_weather", WEATHER)


def test_a_thought_that_the_prompt_opened_needs_no_marker() -> None:
    assert QWEN.is_inside_thought("<|im_start|>assistant\n<think>\n")
    assert not QWEN.is_inside_thought("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert QWEN.is_inside_thought("x", "<think>half a")
    assert not QWEN.is_inside_thought("x<think>", "<think>a</think> half an")
    assert not LLAMA.is_inside_thought("<think>")
    for text in ("so\n</think>\n\nYes", "<think>\nso\n</think>Yes"):
        assert parse(QWEN, text, is_inside_thought=True) == ("Yes", "so", [])
    assert parse(QWEN, "never ends", is_inside_thought=True) == ("", "never ends", [])
    call = '<tool_call>{"name": "f"}</tool_call>'
    assert parse(QWEN, call, is_inside_thought=True) == ("", call, [])


def test_reasoning_can_be_left_out_and_calls_be_limited() -> None:
    form, text, (content, _, calls) = CASES[0]
    assert parse(form, text, shows_reasoning=False) == (content, "", calls)
    assert parse(form, text + " never read", max_calls=1) == (content, "hm, 火星", calls[:1])
    form, text, _ = CASES[4]
    assert parse(form, text, max_calls=1)[2] == [("f", '{"a": 1}')]


def test_without_tools_only_reasoning_is_looked_for() -> None:
    text = '<think>a</think><tool_call>{"name": "f"}</tool_call> '
    assert parse(QWEN, text, functions=()) == ('<tool_call>{"name": "f"}</tool_call> ', "a", [])
    options: dict[str, Any] = {
        "is_inside_thought": False,
        "max_calls": None,
        "shows_reasoning": True,
    }
    assert LLAMA.reader(functions=(), **options) is None
    assert MessageFormat().reader(functions=NAMES, **options) is None


def test_mistral_gets_ids_that_its_templates_accept() -> None:
    [*_, last] = deltas(MISTRAL, ["[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]f[ARGS]{}"])[:1]
    assert all(len(call.id) == 9 and call.id.isalnum() for call in last.tool_calls)
    [first, *_] = deltas(QWEN, ['<tool_call>{"name": "f"}</tool_call>'])
    assert first.tool_calls[0].id.startswith("call_")


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        ('{{ "<tool_call>" }} <think> {{ "</think>" }}', "hermes", "think"),
        ("<tool_call>\n<function=name>", "none", "none"),
        ("<|start_header_id|>{{ x }} <|python_tag|>", "llama3", "none"),
        ('<|start_header_id|> {"name": 1, "parameters": 2}', "llama3", "none"),
        ("[TOOL_CALLS] [THINK]", "mistral", "mistral"),
        (f"{BEGIN}{CALL}{SEP} </think>", "deepseek", "think"),
        ("<|start|>assistant<|channel|>final<|message|>", "gpt-oss", "gpt-oss"),
        ("<|im_start|>", "none", "none"),
    ],
)
def test_the_style_is_told_by_the_template(
    template: str, calls: CallStyle, reasoning: ReasoningStyle
) -> None:
    found = MessageFormat.resolve(template, calls=None, reasoning=None)
    assert found == MessageFormat(calls, reasoning)
    forced = MessageFormat.resolve(template, calls="none", reasoning="think")
    assert forced == MessageFormat("none", "think")


def test_well_formed_answers_agree_with_transformers() -> None:
    call = {"type": "function", "function": "{content}"}
    template: dict[str, Any] = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "content": {},
            "reasoning": {"open": "<think>\n", "close": "\n</think>\n\n"},
            "tool_calls": {
                "open": "<tool_call>\n",
                "close_pattern": r"\n</tool_call>\n?",
                "content": "json",
                "repeats": True,
                "transform": call,
            },
        },
    }
    form, text, _ = CASES[0]
    theirs = parse_response(text, template, prefix="")
    content, reasoning, calls = parse(form, text)
    assert theirs["content"].strip() == content
    assert theirs["reasoning"] == reasoning
    assert [entry["function"] for entry in theirs["tool_calls"]] == [
        {"name": name, "arguments": json.loads(arguments)} for name, arguments in calls
    ]
