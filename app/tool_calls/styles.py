"""Which style a model speaks: found out from its chat template, or named in the configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal

from app.tool_calls import deepseek, harmony, hermes, llama3, mistral
from app.tool_calls.content import CallMarkers, ThoughtMarkers
from app.tool_calls.message import mistral_id, openai_id

CallStyle = Literal["none", "hermes", "llama3", "mistral", "deepseek", "gpt-oss"]
ReasoningStyle = Literal["none", "think", "mistral", "gpt-oss"]

CALL_MARKERS: Final[Mapping[CallStyle, CallMarkers]] = {
    "hermes": CallMarkers(openers=(hermes.OPEN,), read=hermes.read_hermes),
    "llama3": CallMarkers(openers=(llama3.PYTHON_TAG,), read=llama3.read_llama3, is_bare=True),
    "mistral": CallMarkers(openers=(mistral.TOOL_CALLS,), read=mistral.read_mistral),
    "deepseek": CallMarkers(
        openers=(deepseek.CALLS_BEGIN, deepseek.CALL_BEGIN),
        read=deepseek.read_deepseek,
        closers=(deepseek.CALLS_END,),
    ),
}
THOUGHT_MARKERS: Final[Mapping[ReasoningStyle, ThoughtMarkers]] = {
    "think": ThoughtMarkers("<think>", "</think>"),
    "mistral": ThoughtMarkers("[THINK]", "[/THINK]"),
}
# Formats that use Hermes' marker around something else: Qwen3-Coder's and GLM's XML.
_NOT_HERMES = ("<function=", "<arg_key>")


def detect_call_style(template: str) -> CallStyle:
    """Return the style in which a chat template writes calls down, or "none"."""
    if harmony.CHANNEL in template and harmony.MESSAGE in template:
        return "gpt-oss"
    if deepseek.CALL_BEGIN in template:
        return "deepseek"
    if mistral.TOOL_CALLS in template:
        return "mistral"
    if hermes.OPEN in template:
        return "none" if any(marker in template for marker in _NOT_HERMES) else "hermes"
    speaks_llama = "<|start_header_id|>" in template and '"parameters"' in template
    return "llama3" if speaks_llama or llama3.PYTHON_TAG in template else "none"


def detect_reasoning_style(template: str) -> ReasoningStyle:
    """Return the style in which a chat template writes reasoning down, or "none"."""
    if harmony.CHANNEL in template and harmony.MESSAGE in template:
        return "gpt-oss"
    if "[THINK]" in template:
        return "mistral"
    return "think" if "</think>" in template or "<think>" in template else "none"


def id_maker(style: CallStyle) -> Callable[[], str]:
    """Return what makes ids of calls that the style's chat templates accept."""
    return mistral_id if style == "mistral" else openai_id


def visible_markers(calls: CallStyle, reasoning: ReasoningStyle) -> frozenset[str]:
    """Return the literals that a parser needs to see, which may be special tokens."""
    markers: set[str] = set()
    if calls == "llama3":
        markers = {llama3.PYTHON_TAG}
    elif calls == "hermes":
        markers = {hermes.OPEN, hermes.CLOSE}
    elif calls == "mistral":
        markers = {mistral.TOOL_CALLS, mistral.ARGS, mistral.CALL_ID}
    elif calls == "deepseek":
        markers = {
            deepseek.CALLS_BEGIN,
            deepseek.CALLS_END,
            deepseek.CALL_BEGIN,
            deepseek.CALL_END,
            deepseek.SEPARATOR,
        }
    if (thought := THOUGHT_MARKERS.get(reasoning)) is not None:
        markers |= {thought.begin, thought.end}
    if "gpt-oss" in (calls, reasoning):
        markers |= set(harmony.MARKERS)
    return frozenset(markers)
