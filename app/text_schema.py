"""Bodies of the endpoints that turn text into tokens and back, or score it.

/tokenize and /detokenize have vLLM's shapes. Invariant: a parsed request holds only values that can
be acted on.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from app.json_types import is_list, is_token_ids
from app.openai_schema import ChatRequest, TokenIds, parse_request
from app.schema_faults import as_invalid_request

MAX_CONTINUATIONS = 64


class _Schema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)

    model: str | None = None


class TokenizeRequest(_Schema):
    """Body of POST /tokenize for a text; for a chat it is that of a chat completion."""

    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(_Schema):
    """Body of POST /detokenize."""

    tokens: TokenIds

    @field_validator("tokens", mode="before", json_schema_input_type=list[int])
    @classmethod
    def _tokens(cls, value: object) -> TokenIds:
        if not is_token_ids(value):
            raise ValueError("must be a list of token ids, integers >= 0")
        return tuple(value)


class ScoreRequest(_Schema):
    """Body of POST /v1/score: how likely each continuation of the prompt is."""

    prompt: str | TokenIds
    continuations: tuple[str | TokenIds, ...] = Field(min_length=1, max_length=MAX_CONTINUATIONS)
    cache_salt: str = Field(default="", max_length=1_000)

    @field_validator("prompt", mode="plain", json_schema_input_type=str | list[int])
    @classmethod
    def _prompt(cls, value: object) -> str | TokenIds:
        return _text(value)

    @field_validator("continuations", mode="plain", json_schema_input_type=list[str | list[int]])
    @classmethod
    def _continuations(cls, value: object) -> tuple[str | TokenIds, ...]:
        if not is_list(value) or not 1 <= len(value) <= MAX_CONTINUATIONS:
            raise ValueError(f"must be a list of 1 to {MAX_CONTINUATIONS} continuations")
        return tuple(_text(entry) for entry in value)


def _text(value: object) -> str | TokenIds:
    if isinstance(value, str) and value:
        return value
    if is_token_ids(value) and value:
        return tuple(value)
    raise ValueError("must be a string or a list of token ids, and not empty")


def parse_text_request[R: (TokenizeRequest, DetokenizeRequest, ScoreRequest)](
    schema: type[R], body: dict[str, Any]
) -> R:
    """Turn a JSON object into a request.

    Raises:
        InvalidRequest: the first parameter at fault is named.
    """
    try:
        return schema.model_validate({k: v for k, v in body.items() if v is not None})
    except ValidationError as error:
        raise as_invalid_request(error) from None


def parse_chat(body: dict[str, Any]) -> ChatRequest:
    """Turn the body of a chat completion, of which only the prompt counts, into a request."""
    return parse_request(ChatRequest, body)
