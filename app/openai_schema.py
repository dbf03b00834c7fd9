"""What a client may ask: the request bodies of OpenAI's completions and chat completions.

Pydantic models in strict mode with vLLM's extensions that this server implements; `parse_*` turn
a JSON body into one, or refuse it with an error that names the parameter. Knows no tokenizer:
limits that need token counts are checked where the tokens are. Invariant: a parsed request holds
only values that the engine can act on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from app.chat_message import ChatMessage, Hint, clean_message
from app.generation_config import SamplingDefaults
from app.json_types import is_list, is_object, is_token_ids
from app.parameters import CHAT_PARAMETERS, COMPLETION_PARAMETERS, drop_without_effect
from app.schema_faults import as_invalid_request
from app.structured_schema import GuidedParams
from app.tool_calls.schema import (
    Tool,
    ToolChoice,
    check_names,
    check_tool_choice,
    check_tools,
    parse_tool_choice,
)
from replicas.errors import InvalidRequest
from replicas.wire import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_REPETITION_PENALTY,
    MAX_STOP_TOKEN_IDS,
    MIN_REPETITION_PENALTY,
    SamplingParams,
)

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1_000
MAX_BAD_WORD_STRINGS = MAX_BAD_WORDS // 2
"""Each may begin a word or not: two token sequences."""
MAX_CHOICES = 128
_UINT64 = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15

TokenIds = tuple[int, ...]


class _Schema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


class StreamOptions(_Schema):
    """Options that count only with `stream`."""

    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False
    include_obfuscation: Literal[False] = False


class GenerationParams(_Schema):
    """What completions and chat completions have in common."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    # None: the model's own default, see `SamplingDefaults`.
    temperature: float | None = Field(default=None, ge=0.0, le=2.0, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=-1, le=1 << 30)
    min_p: float | None = Field(default=None, ge=0.0, le=1.0, allow_inf_nan=False)
    repetition_penalty: float | None = Field(
        default=None, ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY, allow_inf_nan=False
    )
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0, allow_inf_nan=False)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0, allow_inf_nan=False)
    # Token ids, written as JSON writes keys: as strings.
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: TokenIds = ()
    bad_words: tuple[str, ...] = ()
    min_tokens: int = Field(default=0, ge=0)
    seed: int | None = Field(default=None, ge=-(1 << 63), le=_UINT64)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    # -1: as many as the context has room for.
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    truncation_side: Literal["left", "right"] = "left"
    cache_salt: str = Field(default="", max_length=1_000)
    # Hints to a provider; they change no answer here.
    user: Hint | None = None
    metadata: dict[str, str] | None = Field(default=None, max_length=16)
    safety_identifier: Hint | None = None
    prompt_cache_key: Hint | None = None

    @field_validator("stop", mode="before", json_schema_input_type=str | list[str])
    @classmethod
    def _stop_strings(cls, value: object) -> tuple[str, ...]:
        stops = [value] if isinstance(value, str) else value
        if not is_list(stops):
            raise ValueError("must be a string or a list of strings")
        if len(stops) > MAX_STOP_STRINGS:
            raise ValueError(f"at most {MAX_STOP_STRINGS} stop strings, got {len(stops)}")
        for stop in stops:
            if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARS:
                raise ValueError(
                    f"each stop string must be a string of 1 to {MAX_STOP_CHARS} characters"
                )
        return tuple(stops)

    @field_validator(
        "stop_token_ids", "allowed_token_ids", mode="before", json_schema_input_type=list[int]
    )
    @classmethod
    def _token_ids(cls, value: object, info: ValidationInfo) -> TokenIds:
        if not is_token_ids(value):
            raise ValueError("must be a list of token ids, integers >= 0")
        if info.field_name == "stop_token_ids" and len(value) > MAX_STOP_TOKEN_IDS:
            raise ValueError(f"at most {MAX_STOP_TOKEN_IDS} ids, got {len(value)}")
        return tuple(value)

    @field_validator("logit_bias", mode="before", json_schema_input_type=dict[str, float])
    @classmethod
    def _biases(cls, value: object) -> tuple[tuple[int, float], ...]:
        if not is_object(value):
            raise ValueError("must be an object that maps token ids to biases")
        if len(value) > MAX_LOGIT_BIAS:
            raise ValueError(f"at most {MAX_LOGIT_BIAS} entries, got {len(value)}")
        biases: list[tuple[int, float]] = []
        for key, bias in value.items():
            if not (key.isascii() and key.isdecimal() and len(key) < 10):
                raise ValueError(f"each key must be a token id, got {key[:20]!r}")
            if type(bias) not in (int, float) or not -100 <= bias <= 100:
                raise ValueError(f"the bias of {key} must be a number from -100 to 100")
            biases.append((int(key), float(bias)))
        return tuple(biases)

    @field_validator("bad_words", mode="before", json_schema_input_type=list[str])
    @classmethod
    def _bad_words(cls, value: object) -> tuple[str, ...]:
        if not is_list(value) or not all(isinstance(word, str) and word.strip() for word in value):
            raise ValueError("must be a list of strings that are not blank")
        if len(value) > MAX_BAD_WORD_STRINGS:
            raise ValueError(f"at most {MAX_BAD_WORD_STRINGS} words, got {len(value)}")
        return tuple(value)

    @field_validator("truncate_prompt_tokens", mode="after")
    @classmethod
    def _truncation(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("must be at least 1, or -1")
        return value

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives of each output token; None: no log-probabilities."""
        return None

    def sampling(
        self,
        *,
        max_tokens: int,
        seed: int,
        choice: int,
        defaults: SamplingDefaults,
        bad_words: tuple[TokenIds, ...],
        grammar: str = "",
    ) -> SamplingParams:
        """Return the sampling parameters of one choice.

        Args:
            max_tokens: output limit, tokens.
            seed: the request's seed, given or drawn.
            choice: index among the n choices of one prompt.
            defaults: of what the request leaves out.
            bad_words: the tokens of `bad_words`.
            grammar: that the output follows; empty: none.
        """

        def chosen[T: (int, float)](value: T | None, default: T) -> T:
            return default if value is None else value

        return SamplingParams(
            temperature=chosen(self.temperature, defaults.temperature),
            top_k=max(0, chosen(self.top_k, defaults.top_k)),
            top_p=chosen(self.top_p, defaults.top_p),
            min_p=chosen(self.min_p, defaults.min_p),
            repetition_penalty=chosen(self.repetition_penalty, defaults.repetition_penalty),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            allowed_token_ids=self.allowed_token_ids,
            bad_words=bad_words,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            seed=choice_seed(seed, choice),
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            logprobs=self.num_logprobs,
            prompt_logprobs=self.wanted_prompt_logprobs,
            grammar=grammar,
        )

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        """Alternatives of each prompt token; None: no log-probabilities of the prompt."""
        return self.prompt_logprobs


class CompletionRequest(GuidedParams, GenerationParams):
    """Body of POST /v1/completions."""

    # A str, or token ids; one entry per prompt.
    prompt: tuple[str | TokenIds, ...]
    # 0 with `echo`: only the prompt comes back.
    max_tokens: int = Field(default=16, ge=0)
    add_special_tokens: bool = True
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = COMPLETION_PARAMETERS

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives of each output token."""
        return self.logprobs

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        """Alternatives of each prompt token: an echoed prompt has those of the output."""
        if self.prompt_logprobs is None and self.echo:
            return self.logprobs
        if self.echo and self.logprobs is not None:
            return max(self.logprobs, self.prompt_logprobs or 0)
        return self.prompt_logprobs

    @model_validator(mode="after")
    def _has_output(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: must be at least 1 without 'echo'")
        return self

    @field_validator(
        "prompt",
        mode="plain",
        json_schema_input_type=str | list[str] | list[int] | list[list[int]],
    )
    @classmethod
    def _prompts(cls, value: object) -> tuple[str | TokenIds, ...]:
        if isinstance(value, str):
            return (value,)
        if not is_list(value) or not value:
            raise ValueError(
                "must be a string, a list of strings, a list of token ids, or a list of lists of "
                "token ids, and not empty"
            )
        if is_token_ids(value):
            return (tuple(value),)
        if all(isinstance(prompt, str) for prompt in value):
            return tuple(value)
        if all(is_token_ids(prompt) and prompt for prompt in value):
            return tuple(tuple(prompt) for prompt in value)
        raise ValueError(
            "a list must hold only strings, only token ids (integers >= 0), or only lists of token "
            "ids that are not empty"
        )


class ChatRequest(GuidedParams, GenerationParams):
    """Body of POST /v1/chat/completions."""

    messages: tuple[ChatMessage, ...] = Field(min_length=1)
    # None: as many tokens as the context has room for.
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MAX_LOGPROBS)
    # None: true, unless the last message is to be continued.
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, max_length=32)
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    include_reasoning: bool = True

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = CHAT_PARAMETERS

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives of each output token."""
        return self.top_logprobs if self.logprobs else None

    @model_validator(mode="after")
    def _agrees(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: is only allowed together with 'logprobs': true")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError(
                "continue_final_message: cannot be true together with 'add_generation_prompt'"
            )
        if reserved := {"messages", "tools", "documents"} & self.chat_template_kwargs.keys():
            raise ValueError(f"chat_template_kwargs: '{min(reserved)}' cannot be set there")
        check_names(self.tools)
        check_tool_choice(self.tool_choice, self.tools)
        return self

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """The tools that the model is told of: none where it must not call any."""
        return () if self.tool_choice == "none" else self.tools

    @field_validator("tools", mode="before", json_schema_input_type=list[Tool])
    @classmethod
    def _tools(cls, value: object) -> tuple[object, ...]:
        return check_tools(value)

    @field_validator("tool_choice", mode="plain", json_schema_input_type=ToolChoice)
    @classmethod
    def _tool_choice(cls, value: object) -> ToolChoice:
        return parse_tool_choice(value)

    @property
    def max_output_tokens(self) -> int | None:
        """The newer `max_completion_tokens` where both are given."""
        return self.max_completion_tokens or self.max_tokens

    @field_validator("messages", mode="before")
    @classmethod
    def _messages(cls, value: object) -> tuple[object, ...]:
        if not isinstance(value, list):
            raise ValueError("must be a list of messages")
        return tuple(map(clean_message, cast("list[object]", value)))


def choice_seed(seed: int, choice: int) -> int:
    """Derive the seed of the i-th choice: the request's own for the first, mixed for the others.

    One step of SplitMix64 (Steele, Lea & Flood 2014), so that close seeds do not share streams.
    """
    if choice == 0:
        return seed & _UINT64
    z = (seed + choice * _GOLDEN_GAMMA) & _UINT64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _UINT64
    return z ^ (z >> 31)


def parse_request[R: (CompletionRequest, ChatRequest)](schema: type[R], body: dict[str, Any]) -> R:
    """Turn a JSON object into a request.

    Raises:
        InvalidRequest: a parameter is unknown, unsupported, missing or out of range; the error
            names the first one at fault.
    """
    body = drop_without_effect(body, schema.neutral)
    if "stream_options" in body and not body.get("stream"):
        raise InvalidRequest(
            "'stream_options' is only allowed together with 'stream': true", param="stream_options"
        )
    if body.get("stream") and "prompt_logprobs" in body:
        raise InvalidRequest(
            "'prompt_logprobs' come with a whole answer only: leave 'stream' out",
            param="prompt_logprobs",
        )
    if is_object(options := body.get("stream_options")):
        body["stream_options"] = {k: v for k, v in options.items() if v is not None}
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        raise as_invalid_request(error) from None
