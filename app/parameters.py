"""Parameters of OpenAI's and vLLM's interfaces that this server does not act on.

For each one the values that change nothing, which are accepted so that clients which spell out
defaults work. Any other value is refused by name: a parameter is never ignored silently. Null
always means "absent" and is dropped before these tables are asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from app.errors import UnsupportedParameter

_SHARED: Final[Mapping[str, tuple[object, ...]]] = {
    # vLLM
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "spaces_between_special_tokens": (True,),
    "logits_processors": ([],),
    "priority": (0,),
    "request_id": (),
    "thinking_token_budget": (),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "guided_decoding_backend": ("auto", "guidance"),
    "guided_json_object": (False,),
    "guided_whitespace_pattern": (),
}

COMPLETION_PARAMETERS: Final[Mapping[str, tuple[object, ...]]] = {
    **_SHARED,
    "best_of": (1,),
    "suffix": ("",),
    "prompt_embeds": (),
}

CHAT_PARAMETERS: Final[Mapping[str, tuple[object, ...]]] = {
    **_SHARED,
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "moderation": (),
    "prediction": (),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": ("in_memory",),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM
    "echo": (False,),
    "add_special_tokens": (False,),
    "documents": ([],),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
}


def drop_without_effect(
    body: Mapping[str, Any], neutral: Mapping[str, tuple[object, ...]]
) -> dict[str, Any]:
    """Return the body without nulls and without parameters at a value that changes nothing.

    Raises:
        UnsupportedParameter: a known parameter has a value that would have an effect.
    """
    kept: dict[str, Any] = {}
    for name, value in body.items():
        if value is None:
            continue
        if name not in neutral:
            kept[name] = value
        elif value not in neutral[name]:
            allowed = ", ".join(repr(choice) for choice in neutral[name])
            hint = f"only {allowed} is accepted" if allowed else "leave it out"
            raise UnsupportedParameter(
                f"'{name}' is not supported by this server; {hint}", param=name
            )
    return kept
