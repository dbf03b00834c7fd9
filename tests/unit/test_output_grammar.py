"""Grammars say what clients asked for: texts they take and refuse, by llguidance itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from app.output_grammar import (
    NO_FRAME,
    Choices,
    Constraint,
    Frame,
    JsonSchema,
    Lark,
    Regex,
    Tag,
    Tags,
    write_grammar,
)
from app.tool_calls.guided import guided_calls, message_frame
from app.tool_calls.reader import MessageFormat
from app.tool_calls.schema import NamedTool, Tool, ToolChoice
from replicas.errors import InvalidRequest
from replicas.grammar import Vocabulary
from tests.tiny_tokenizer import byte_level

A_IS_INT: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
MARKERS = (
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "[TOOL_CALLS]",
    "<｜tool▁sep｜>",
    "<|channel|>",
)


@cache
def vocabulary(special: tuple[str, ...] = ()) -> tuple[tokenizers.Tokenizer, Vocabulary]:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([tokenizers.AddedToken(t, special=True) for t in special])
    return tokenizer, Vocabulary(tokenizer.to_str(), vocab_size=700, eos_token_ids=[1])


def takes(
    constraint: Constraint, text: str, *, frame: Frame = NO_FRAME, special: Sequence[str] = ()
) -> bool:
    """Whether a whole text follows the grammar."""
    tokenizer, known = vocabulary(tuple(special))
    grammar = write_grammar(constraint, frame=frame, special=known.special_tokens())
    matcher = known.matcher(grammar)
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    return matcher.replay(token_ids) and matcher.is_accepting


@pytest.mark.parametrize(
    ("constraint", "right", "wrong"),
    [
        (JsonSchema(A_IS_INT), ['{"a": 1}', '{\n    "a" : -12 }'], ['{"a": "1"}', "{}", "x", ""]),
        (JsonSchema({"type": "object"}), ["{}", '{"b": [1, {}]}'], ["[]", '{"b"', "1"]),
        (JsonSchema(A_IS_INT), ['{"a":1}'], ['{"a":' + " " * 40 + "1}"]),
        (Regex(r"[a-z]+/\d{2}"), ["ab/12"], ["ab/1", "ab12", "AB/12", "ab/123"]),
        (Regex(r"^a\/b$"), ["a/b"], ["a", "a\\/b"]),
        (Regex("a\nb|\\\nc"), ["a\nb", "\nc"], ["ab", "nc"]),
        (Lark('start: A "!"*\nA: /[ab]/\n'), ["a", "b!!"], ["", "!", "ab"]),
    ],
)
def test_texts_that_follow_are_taken_and_others_are_not(
    constraint: Constraint, right: list[str], wrong: list[str]
) -> None:
    assert [text for text in right if not takes(constraint, text)] == []
    assert [text for text in wrong if takes(constraint, text)] == []


# The tokenizer has "Ä" as a token of its own, whose id also stands for a byte.
LETTERS = st.characters(codec="utf-8", exclude_characters="Ä")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(LETTERS, min_size=1), min_size=1, max_size=3))
def test_choices_are_taken_literally(texts: list[str]) -> None:
    for text in texts:
        assert takes(Choices(tuple(texts)), text)
        assert takes(Choices(tuple(texts)), text + "\0") == (text + "\0" in texts)


@pytest.mark.parametrize("special", [(), ("<f", "</f>")])
def test_tags_stand_in_free_text(special: tuple[str, ...]) -> None:
    tags = Tags(
        (
            Tag("<f", "<f=a>", A_IS_INT, "</f>"),
            Tag("<f", "<f=b>", {"type": "object"}, "</f>"),
        )
    )
    right = ["", "hello", 'x <f=a>{"a": 1}</f> y <f=b>{}</f>', '<f=a>{"a": 1}</f>']
    wrong = ["<f=c>", '<f=a>{"b": 1}</f>', 'x <f=a>{"a": 1}', "<f"]
    assert [text for text in right if not takes(tags, text, special=special)] == []
    assert [text for text in wrong if takes(tags, text, special=special)] == []


@pytest.mark.parametrize("special", [(), ("<think>", "</think>")])
def test_reasoning_precedes_what_is_constrained(special: tuple[str, ...]) -> None:
    schema = JsonSchema(A_IS_INT)
    may = message_frame("think", is_inside_thought=False, is_call=False)
    must = message_frame("think", is_inside_thought=True, is_call=False)
    thought = '\nhm {"b"}\n</think>\n\n'
    assert takes(schema, f'<think>{thought}{{"a": 1}}', frame=may, special=special)
    assert takes(schema, '{"a": 1}', frame=may, special=special)
    assert not takes(schema, f'<think>{thought}{{"b": 1}}', frame=may, special=special)
    assert takes(schema, f'{thought}{{"a": 1}}', frame=must, special=special)
    assert not takes(schema, '{"a": 1}', frame=must, special=special)


def test_harmony_constrains_the_final_channel() -> None:
    frame = message_frame("gpt-oss", is_inside_thought=False, is_call=False)
    final = '<|channel|>final<|message|>{"a": 1}'
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    for special in ((), ("<|channel|>", "<|message|>", "<|end|>", "<|start|>")):
        assert takes(JsonSchema(A_IS_INT), final, frame=frame, special=special)
        assert takes(JsonSchema(A_IS_INT), thought + final, frame=frame, special=special)
        assert not takes(JsonSchema(A_IS_INT), '{"a": 1}', frame=frame, special=special)


def tools(*, strict: bool = True) -> list[Tool]:
    function = {"parameters": A_IS_INT, "strict": strict}
    return [
        Tool.model_validate({"type": "function", "function": {"name": name, **function}})
        for name in ("first", "second")
    ]


DEEPSEEK_V3 = (
    "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n{}\n```<｜tool▁call▁end｜>",
    "\n",
)
STYLES: dict[str, tuple[str, str, tuple[str, str, str]]] = {
    "hermes": (
        "hermes",
        "",
        ("{}", '<tool_call>\n{{"name": "NAME", "arguments": {}}}\n</tool_call>', "\n"),
    ),
    "llama3": ("llama3", "", ("{}", '{{"name": "NAME", "parameters": {}}}', "; ")),
    "mistral": ("mistral", "", ("[TOOL_CALLS][{}]", '{{"name": "NAME", "arguments": {}}}', ", ")),
    "mistral_v11": ("mistral", "[ARGS]", ("{}", "[TOOL_CALLS]NAME[ARGS]{}", "")),
    "deepseek_v3": ("deepseek", "```json", DEEPSEEK_V3),
    "deepseek_v31": (
        "deepseek",
        "",
        (
            "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
            "",
        ),
    ),
    "gpt-oss": (
        "gpt-oss",
        "",
        (
            "{}",
            " to=functions.NAME<|channel|>commentary <|constrain|>json<|message|>{}",
            "",
        ),
    ),
}


def written(style: str, *calls: tuple[str, str]) -> str:
    whole, call, separator = STYLES[style][2]
    texts = [call.format(arguments).replace("NAME", name) for name, arguments in calls]
    return whole.format(separator.join(texts))


def constraint_of(style: str, choice: ToolChoice, *, is_single: bool = False) -> Constraint:
    name, template, _ = STYLES[style]
    calls = guided_calls(tools(), choice, style=name, template=template, is_single=is_single)  # pyright: ignore[reportArgumentType]
    assert calls is not None
    return calls


SECOND = NamedTool.model_validate({"type": "function", "function": {"name": "second"}})
RIGHT = '{"a": 1}'


@pytest.mark.parametrize("special", [(), MARKERS], ids=["text", "special"])
@pytest.mark.parametrize("style", STYLES)
def test_a_demanded_call_follows_its_schema_and_is_read_back(
    style: str, special: tuple[str, ...]
) -> None:
    def is_taken(text: str, choice: ToolChoice, *, is_single: bool = False) -> bool:
        return takes(constraint_of(style, choice, is_single=is_single), text, special=special)

    one, other = written(style, ("first", RIGHT)), written(style, ("second", RIGHT))
    two = written(style, ("first", RIGHT), ("second", RIGHT))
    assert is_taken(one, "required")
    assert is_taken(other, SECOND)
    assert not is_taken(one, SECOND)
    assert not is_taken(written(style, ("third", RIGHT)), "required")
    assert not is_taken(written(style, ("first", '{"b": 1}')), "required")
    assert not is_taken("I would rather talk.", "required")
    assert is_taken(two, "required") == (style != "gpt-oss")
    assert not is_taken(two, "required", is_single=True)
    assert not is_taken(two, SECOND)
    reader = MessageFormat(STYLES[style][0], "none").reader(  # pyright: ignore[reportArgumentType]
        functions=["first", "second"], is_inside_thought=False, max_calls=None, shows_reasoning=True
    )
    assert reader is not None
    reader.feed(one if style == "gpt-oss" else two)
    reader.finish()
    message = reader.take()
    names = [call.name for call in message.tool_calls]
    assert (message.content, names) == ("", ["first", "second"][: 1 if style == "gpt-oss" else 2])


@pytest.mark.parametrize("style", [style for style in STYLES if style != "gpt-oss"])
def test_calls_of_strict_functions_follow_their_schemas_in_free_text_too(style: str) -> None:
    call, text = written(style, ("first", RIGHT)), "Let me see. "
    calls = constraint_of(style, "auto")
    assert takes(calls, "")
    assert takes(calls, "No { call < needed")
    assert takes(calls, call)
    assert not takes(calls, written(style, ("first", '{"b": 1}')))
    if style != "llama3":  # there, calls stand at the beginning only
        assert takes(calls, text + call)
        assert not takes(calls, text + written(style, ("first", '{"b": 1}')))


def test_where_nothing_is_demanded_nothing_is_constrained() -> None:
    form = {"style": "hermes", "template": "", "is_single": False}
    assert guided_calls(tools(strict=False), "auto", **form) is None  # pyright: ignore[reportArgumentType]
    assert guided_calls([], "none", **form) is None  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidRequest, match="strict"):
        guided_calls(tools(), "auto", style="gpt-oss", template="", is_single=False)


def test_schemas_of_other_functions_count_as_far_as_they_are_understood() -> None:
    schema = {"properties": {"a": {"type": "integer"}, "b": {"not": {}}}, "required": ["a"]}
    function = {"name": "f", "parameters": schema}
    tool = Tool.model_validate({"type": "function", "function": function})
    calls = guided_calls([tool], "required", style="llama3", template="", is_single=True)
    assert calls is not None
    assert takes(calls, '{"name": "f", "parameters": {"a": 1, "b": 2}}')
    assert not takes(calls, '{"name": "f", "parameters": {"a": "x"}}')
