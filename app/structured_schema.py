"""What clients say of the form of an output: `response_format` and vLLM's parameters.

OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*`. At most one of
them may demand something. Invariant: a parsed demand has a depth and a size that the code behind
it can take; whether its grammar is a good one is found out later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import orjson
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from app.json_types import is_deeper, is_list, is_object
from app.output_grammar import Choices, Constraint, JsonSchema, Lark, Regex, Tag, Tags

MAX_SCHEMA_DEPTH = 64
MAX_CHOICES = 10_000
MAX_TAGS = 128
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

Text = Annotated[str, Field(min_length=1, max_length=256 << 10)]
Literals = Annotated[str, Field(max_length=1_000)]


class _Schema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


class NamedSchema(_Schema):
    """OpenAI's `json_schema`; always enforced, whatever `strict` says."""

    name: Annotated[str, Field(max_length=256)] = ""
    description: Annotated[str, Field(max_length=10_000)] | None = None
    json_schema: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @field_validator("json_schema", mode="plain", json_schema_input_type=dict[str, Any] | bool)
    @classmethod
    def _check(cls, value: object) -> dict[str, Any] | bool:
        if not is_object(value) and not isinstance(value, bool):
            raise ValueError("must be a JSON schema: an object, or true or false")
        return check_schema(value)


class TagSchema(_Schema):
    """A structural tag of vLLM's."""

    begin: Annotated[str, Field(min_length=1, max_length=1_000)]
    json_schema: dict[str, Any] = Field(alias="schema")
    end: Literals

    @field_validator("json_schema")
    @classmethod
    def _check(cls, value: dict[str, Any]) -> dict[str, Any]:
        return check_schema(value)


Trigger = Annotated[str, Field(min_length=1, max_length=1_000)]


class StructuralTags(_Schema):
    """Free text in which each trigger begins a tag."""

    type: Literal["structural_tag"] = "structural_tag"
    structures: tuple[TagSchema, ...] = Field(min_length=1, max_length=MAX_TAGS)
    triggers: tuple[Trigger, ...] = Field(min_length=1, max_length=MAX_TAGS)

    @field_validator("structures", "triggers", mode="before")
    @classmethod
    def _lists(cls, value: object) -> object:
        return tuple(value) if is_list(value) else value

    @model_validator(mode="after")
    def _have_triggers(self) -> StructuralTags:
        _as_tags(self.structures, self.triggers)
        return self

    def constraint(self) -> Tags:
        """The same for the grammar."""
        return _as_tags(self.structures, self.triggers)


class ResponseFormat(_Schema):
    """`response_format`; its type "structural_tag" is vLLM's."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: NamedSchema | None = None
    structures: tuple[TagSchema, ...] = Field(default=(), max_length=MAX_TAGS)
    triggers: tuple[Trigger, ...] = Field(default=(), max_length=MAX_TAGS)

    @field_validator("structures", "triggers", mode="before")
    @classmethod
    def _lists(cls, value: object) -> object:
        return tuple(value) if is_list(value) else value

    @model_validator(mode="after")
    def _agrees(self) -> ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("'json_schema' belongs to type 'json_schema', which needs it")
        if bool(self.structures and self.triggers) != (self.type == "structural_tag"):
            raise ValueError(
                "'structures' and 'triggers' belong to type 'structural_tag', which needs them"
            )
        _as_tags(self.structures, self.triggers)
        return self

    def constraint(self) -> Constraint | None:
        """What it demands, or None."""
        if self.structures:
            return _as_tags(self.structures, self.triggers)
        if self.type == "json_object":
            return JsonSchema(_ANY_OBJECT)
        if self.json_schema is not None:
            return JsonSchema(_as_object(self.json_schema.json_schema))
        return None


class StructuredOutputs(_Schema):
    """vLLM's `structured_outputs`: one of its members."""

    json_: dict[str, Any] | None = Field(default=None, alias="json")
    regex: Text | None = None
    choice: tuple[Text, ...] | None = Field(default=None, min_length=1, max_length=MAX_CHOICES)
    grammar: Text | None = None
    json_object: bool | None = None
    structural_tag: StructuralTags | None = None

    @field_validator("json_", "structural_tag", mode="before")
    @classmethod
    def _json_text(cls, value: object) -> object:
        return _parsed(value)

    @field_validator("json_")
    @classmethod
    def _depth(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        return check_schema(value)

    @field_validator("choice", mode="before")
    @classmethod
    def _choices(cls, value: object) -> object:
        return tuple(value) if is_list(value) else value

    @model_validator(mode="after")
    def _has_one(self) -> StructuredOutputs:
        if len(self._demands()) != 1:
            raise ValueError(
                "needs exactly one of 'json', 'regex', 'choice', 'grammar', 'json_object' and "
                "'structural_tag'"
            )
        return self

    def constraint(self) -> Constraint:
        """What it demands."""
        return self._demands()[0]

    def _demands(self) -> list[Constraint]:
        found: list[Constraint | None] = [
            None if self.json_ is None else JsonSchema(self.json_),
            None if self.regex is None else Regex(self.regex),
            None if self.choice is None else Choices(self.choice),
            None if self.grammar is None else Lark(self.grammar),
            JsonSchema(_ANY_OBJECT) if self.json_object else None,
            None if self.structural_tag is None else self.structural_tag.constraint(),
        ]
        return [demand for demand in found if demand is not None]


class Demand(NamedTuple):
    """What an output must look like, and the parameter that says so."""

    param: str
    constraint: Constraint


class GuidedParams(_Schema):
    """The parameters of a request that say what its output must look like."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | None = None
    guided_regex: Text | None = None
    guided_choice: tuple[Text, ...] | None = Field(
        default=None, min_length=1, max_length=MAX_CHOICES
    )
    guided_grammar: Text | None = None

    @field_validator("guided_json", mode="before", json_schema_input_type=str | dict[str, Any])
    @classmethod
    def _guided_json(cls, value: object) -> object:
        return _parsed(value)

    @field_validator("guided_json")
    @classmethod
    def _guided_depth(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        return check_schema(value)

    @field_validator("guided_choice", mode="before", json_schema_input_type=list[str])
    @classmethod
    def _guided_choice(cls, value: object) -> object:
        return tuple(value) if is_list(value) else value

    @model_validator(mode="after")
    def _demands_one(self) -> GuidedParams:
        if len(self._demands()) > 1:
            first, second = (demand.param for demand in self._demands()[:2])
            raise ValueError(f"{second}: cannot be used together with '{first}'")
        return self

    def demand(self) -> Demand | None:
        """What the output must look like, or None."""
        return next(iter(self._demands()), None)

    def _demands(self) -> list[Demand]:
        form, outputs = self.response_format, self.structured_outputs
        found: dict[str, Constraint | None] = {
            "response_format": None if form is None else form.constraint(),
            "structured_outputs": None if outputs is None else outputs.constraint(),
            "guided_json": None if self.guided_json is None else JsonSchema(self.guided_json),
            "guided_regex": None if self.guided_regex is None else Regex(self.guided_regex),
            "guided_choice": None if self.guided_choice is None else Choices(self.guided_choice),
            "guided_grammar": None if self.guided_grammar is None else Lark(self.guided_grammar),
        }
        return [Demand(param, demand) for param, demand in found.items() if demand is not None]


def check_schema[T](value: T) -> T:
    """Check the depth of a JSON schema.

    Raises:
        ValueError: it is nested too deeply.
    """
    if is_deeper(value, MAX_SCHEMA_DEPTH):
        raise ValueError(f"is nested deeper than {MAX_SCHEMA_DEPTH} levels")
    return value


def _as_tags(structures: Sequence[TagSchema], triggers: Sequence[str]) -> Tags:
    """Find the trigger of each tag, the longest that begins it.

    Raises:
        ValueError: none does.
    """
    tags: list[Tag] = []
    for tag in structures:
        trigger = max((t for t in triggers if tag.begin.startswith(t)), key=len, default=None)
        if trigger is None:
            raise ValueError(f"no trigger begins the tag {tag.begin[:40]!r}")
        tags.append(Tag(trigger, tag.begin, tag.json_schema, tag.end))
    return Tags(tuple(tags))


def _as_object(schema: Mapping[str, Any] | bool | None) -> Mapping[str, Any]:
    """A schema that may be one of JSON's two trivial ones."""
    if schema is False:
        return {"enum": []}
    return {} if schema is True or schema is None else schema


def _parsed(value: object) -> object:
    """A JSON text as what it says; clients of vLLM may send either."""
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from None
