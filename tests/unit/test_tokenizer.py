"""The tokenizer of a model directory, against transformers' own reading of the same files."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from app.chat import ChatTemplate
from app.chat_message import ChatMessage
from app.errors import ConfigError
from app.tokenizer import Tokenizer
from replicas.errors import ContextLengthExceeded, InvalidRequest
from tests.tiny_tokenizer import CHAT_TEMPLATE, write_model_dir


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_model_dir(tmp_path / "model")


@pytest.fixture
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


TEXTS = [
    "Hello world",
    "",
    " leading and  double ",
    "日本語 😀\n",
    "<|im_start|>user\nhi<|im_end|>",
]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": 'A "quote" & <tag>'},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "More\n"},
    ],
]
TEMPLATES = {
    "chatml": CHAT_TEMPLATE,
    "blocks": (
        "{%- for m in messages %}\n    {%- if loop.first and m.role != 'system' %}\n"
        "        {{- bos_token }}no system\n    {%- endif %}\n"
        "    {%- if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}\n"
        "    {%- continue %}{%- endif %}\n"
        "    {{- m | tojson }}\n    {{- {'b': 1, 'a': '<é>'} | tojson(indent=2) }}\n"
        "{%- endfor %}\n{{ eos_token }}{%- if add_generation_prompt %}go{% endif %}"
    ),
    "namespace": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{{ ns.n }}: {{ m['content'].strip() }}{% if ns.n == 3 %}{% break %}{% endif %}\n"
        "{% endfor %}{{ strftime_now('%Y') | length }}"
    ),
}


def test_encodes_and_decodes_like_transformers(model_dir: Path, tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(str(model_dir))
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=True)
        assert ids == reference(text)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == reference.decode(
            ids, skip_special_tokens=True
        )


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS, ids=["one", "four"])
def test_renders_chats_like_transformers(name: str, chat: list[dict[str, Any]]) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    special = {"bos_token": "<s>", "eos_token": "</s>"}
    template = ChatTemplate(TEMPLATES[name], special)
    [reference], _ = render_jinja_template(
        [chat], chat_template=TEMPLATES[name], add_generation_prompt=True, **special
    )
    assert template.render([ChatMessage(**message) for message in chat]) == reference


def test_a_template_that_refuses_a_chat_blames_the_messages() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidRequest, match="roles must alternate") as info:
        template.render([ChatMessage(role="user", content="a")])
    assert info.value.param == "messages"


def test_a_template_cannot_leave_its_sandbox() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", {})
    with pytest.raises(InvalidRequest):
        template.render([ChatMessage(role="user", content="a")])


def test_developer_is_system_to_templates_that_do_not_know_it() -> None:
    message = ChatMessage(role="developer", content="x")
    assert ChatTemplate("{{ messages[0].role }}", {}).render([message]) == "system"
    knows = ChatTemplate("{{ messages[0].role }}{# developer #}", {})
    assert knows.render([message]) == "developer"


def test_text_parts_are_joined_by_line_breaks() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = ChatMessage.model_validate({"role": "user", "content": parts})
    assert ChatTemplate("{{ messages[0].content }}", {}).render([message]) == "a\nb"


def test_named_templates_and_token_objects_are_read(model_dir: Path) -> None:
    (model_dir / "chat_template.jinja").unlink()
    config = {
        "chat_template": [
            {"name": "tool_use", "template": "wrong"},
            {"name": "default", "template": "{{ bos_token }}!"},
        ],
        "bos_token": {"content": "<s>", "special": True},
    }
    (model_dir / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    template = Tokenizer.load(model_dir).chat_template
    assert template is not None
    assert template.render([ChatMessage(role="user", content="a")]) == "<s>!"


def test_a_model_without_a_template_has_none(model_dir: Path) -> None:
    (model_dir / "chat_template.jinja").unlink()
    assert Tokenizer.load(model_dir).chat_template is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("chat_template.jinja", "{% if %}"),
    ],
)
def test_a_broken_model_directory_is_named(model_dir: Path, name: str, content: str | None) -> None:
    if content is None:
        (model_dir / name).unlink()
    else:
        (model_dir / name).write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=str(model_dir)):
        Tokenizer.load(model_dir)


async def test_a_prompt_over_the_context_is_refused(tokenizer: Tokenizer) -> None:
    ids = await tokenizer.encode_within("Hello world", max_tokens=50, add_special_tokens=True)
    with pytest.raises(ContextLengthExceeded, match=f"has {len(ids)} tokens; at most 1"):
        await tokenizer.encode_within("Hello world", max_tokens=1, add_special_tokens=True)


async def test_a_hopeless_prompt_is_refused_without_encoding_it(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "encode", lambda *_, **__: pytest.fail("encoded"))
    with pytest.raises(ContextLengthExceeded, match="1000000 characters"):
        await tokenizer.encode_within("a" * 1_000_000, max_tokens=100, add_special_tokens=True)


async def test_the_event_loop_runs_while_a_long_prompt_is_encoded(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop_has_run = threading.Event()
    encode = tokenizer.encode

    def encode_after_the_loop_ran(text: str, *, add_special_tokens: bool) -> list[int]:
        assert loop_has_run.wait(10)
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode", encode_after_the_loop_ran)
    text = "Hello world " * 5_000
    asyncio.get_running_loop().call_soon(loop_has_run.set)
    ids = await tokenizer.encode_within(text, max_tokens=100_000, add_special_tokens=True)
    assert ids == encode(text, add_special_tokens=True)
