"""Reads Hugging Face's config.json into a ModelConfig, in full or not at all.

Defaults are those of the reference implementation's config classes, so a key that is absent means
here what it means there. Invariant: a key that would change the computation is either honoured or
refused with its name and value; it is never ignored. Knows no weights and no jax.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from replicas.config import ModelConfig, RopeConfig

logger = logging.getLogger(__name__)

RawConfig = Mapping[str, Any]

# Keys that other models of the same layout use to change the computation, and the values that
# change nothing. Absent and null are always accepted.
_REQUIRED_VALUES: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "hidden_activation": ("silu",),
    "quantization_config": (),
    "compression_config": (),
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1.0,),
    "rotary_pct": (1.0,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "logits_scaling": (1.0,),
    "logit_scale": (1.0,),
    "use_qk_norm": (False,),
    "qk_norm": (False,),
    "qk_layernorm": (False,),
    "no_rope_layers": ([],),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "use_sliding_window": (False,),
    "use_bidirectional_attention": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "alibi": (False,),
}
_DTYPES = ("bfloat16", "float16", "float32")
_ROPE_KINDS = ("default", "linear", "llama3")
_ROPE_KEYS = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
}
_ROPE_KIND_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
}


class UnsupportedModelError(ValueError):
    """The checkpoint asks for something that is not built; the message names key and value."""


def parse_llama(raw: RawConfig) -> ModelConfig:
    """Parse the config of a LlamaForCausalLM checkpoint.

    Raises:
        UnsupportedModelError: naming the key and its value.
    """
    _require_supported(raw, architecture="LlamaForCausalLM")
    num_heads = _integer(raw, "num_attention_heads", 32)
    config = _build(
        raw,
        family="llama",
        intermediate_size=_integer(raw, "intermediate_size", 11008),
        max_position_embeddings=_integer(raw, "max_position_embeddings", 2048),
        num_kv_heads=_optional_integer(raw, "num_key_value_heads", None) or num_heads,
        attention_bias=_boolean(raw, "attention_bias", default=False),
        mlp_bias=_boolean(raw, "mlp_bias", default=False),
        sliding_window=None,
    )
    window = _optional_integer(raw, "sliding_window", None)
    # The reference ignores the key in this family: only a window that masks nothing is the same.
    if window is not None and window < config.max_position_embeddings:
        _refuse("sliding_window", window, "a llama checkpoint attends to its whole context")
    _require_uniform_layers(raw, "full_attention")
    return config


def parse_mistral(raw: RawConfig) -> ModelConfig:
    """Parse the config of a MistralForCausalLM checkpoint.

    Raises:
        UnsupportedModelError: naming the key and its value.
    """
    _require_supported(raw, architecture="MistralForCausalLM")
    num_heads = _integer(raw, "num_attention_heads", 32)
    for key in ("attention_bias", "mlp_bias"):
        if raw.get(key):
            _refuse(key, raw[key], "mistral checkpoints have no biases")
    window = _optional_integer(raw, "sliding_window", 4096)
    _require_uniform_layers(raw, "full_attention" if window is None else "sliding_attention")
    return _build(
        raw,
        family="mistral",
        intermediate_size=_integer(raw, "intermediate_size", 14336),
        max_position_embeddings=_integer(raw, "max_position_embeddings", 4096 * 32),
        num_kv_heads=_optional_integer(raw, "num_key_value_heads", 8) or num_heads,
        attention_bias=False,
        mlp_bias=False,
        sliding_window=window,
    )


def read_config_json(path: Path) -> dict[str, Any]:
    """Read config.json of a checkpoint directory, with generation_config.json's end ids merged in.

    Raises:
        UnsupportedModelError: there is no readable config.json.
    """
    raw = _read_json(path / "config.json")
    generation_path = path / "generation_config.json"
    if generation_path.is_file():
        generation = _read_json(generation_path)
        merged = [*_eos_token_ids(raw), *_eos_token_ids({"eos_token_id": None, **generation})]
        raw["eos_token_id"] = list(dict.fromkeys(merged))
    return raw


def _build(
    raw: RawConfig,
    *,
    family: str,
    intermediate_size: int,
    max_position_embeddings: int,
    num_kv_heads: int,
    attention_bias: bool,
    mlp_bias: bool,
    sliding_window: int | None,
) -> ModelConfig:
    """Read what the families of llama's layout have in common."""
    hidden_size = _integer(raw, "hidden_size", 4096)
    num_heads = _integer(raw, "num_attention_heads", 32)
    head_dim = _optional_integer(raw, "head_dim", None)
    if head_dim is None:
        if hidden_size % num_heads:
            _refuse("hidden_size", hidden_size, f"not a multiple of {num_heads} heads")
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        _refuse("head_dim", head_dim, "rotary embedding needs an even size")
    if num_heads % num_kv_heads:
        _refuse("num_key_value_heads", num_kv_heads, f"does not divide {num_heads} heads")
    return ModelConfig(
        family=family,
        vocab_size=_integer(raw, "vocab_size", 32000),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=_integer(raw, "num_hidden_layers", 32),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        rope=_rope(raw, max_position_embeddings=max_position_embeddings),
        attention_bias=attention_bias,
        mlp_bias=mlp_bias,
        tie_word_embeddings=_boolean(raw, "tie_word_embeddings", default=False),
        sliding_window=sliding_window,
        eos_token_ids=tuple(_eos_token_ids(raw)),
        bos_token_id=_bos_token_id(raw),
        checkpoint_dtype=_dtype(raw),
    )


def _rope(raw: RawConfig, *, max_position_embeddings: int) -> RopeConfig:
    """Read either spelling: `rope_parameters`, or the older `rope_theta` and `rope_scaling`."""
    spellings = {
        key: raw[key] for key in ("rope_parameters", "rope_scaling") if raw.get(key) is not None
    }
    for key, value in spellings.items():
        if not isinstance(value, Mapping) or any(isinstance(v, Mapping) for v in value.values()):
            _refuse(key, value, "expected one flat mapping for all layers")
    merged: dict[str, Any] = {}
    for key in ("rope_theta", "original_max_position_embeddings"):
        _merge(merged, key, raw.get(key), owner=key)
    for owner, parameters in spellings.items():
        for key, value in parameters.items():
            name = "rope_type" if key == "type" else key
            _merge(merged, name, value, owner=f"{owner}.{key}")

    owner = next(iter(spellings), "rope_parameters")
    kind = merged.pop("rope_type", "default")
    if kind not in _ROPE_KINDS:
        _refuse(f"{owner}.rope_type", kind, f"supported: {', '.join(_ROPE_KINDS)}")
    if merged.get("partial_rotary_factor", 1.0) != 1.0:
        value = merged["partial_rotary_factor"]
        _refuse(f"{owner}.partial_rotary_factor", value, "every dimension of a head is rotated")
    for key in sorted(merged.keys() - _ROPE_KEYS - _ROPE_KIND_KEYS[kind]):
        if (key, merged[key]) != ("factor", 1.0):
            _refuse(f"{owner}.{key}", merged[key], f"rope_type {kind!r} does not use it")
    for key in sorted(_ROPE_KIND_KEYS[kind] - merged.keys()):
        _refuse(f"{owner}.{key}", None, f"rope_type {kind!r} needs it")
    try:
        return RopeConfig(
            kind=kind,
            theta=_number(merged, "rope_theta", 10_000.0),
            factor=_number(merged, "factor", 1.0),
            low_freq_factor=_number(merged, "low_freq_factor", 1.0),
            high_freq_factor=_number(merged, "high_freq_factor", 4.0),
            original_max_position_embeddings=_integer(
                merged, "original_max_position_embeddings", max_position_embeddings
            ),
        )
    except ValueError as error:
        _refuse(owner, dict(merged), str(error))


def _merge(merged: dict[str, Any], key: str, value: object, *, owner: str) -> None:
    """Add `key` unless it is null; two spellings that disagree have no right reading."""
    if value is None:
        return
    if key in merged and merged[key] != value:
        _refuse(owner, value, f"another spelling of the same key says {merged[key]!r}")
    merged[key] = value


def _require_supported(raw: RawConfig, *, architecture: str) -> None:
    architectures = raw.get("architectures")
    if architectures is not None and architecture not in architectures:
        _refuse("architectures", architectures, f"supported: {architecture}")
    for key, accepted in _REQUIRED_VALUES.items():
        value = raw.get(key)
        if value is not None and value not in accepted:
            expected = " or ".join(repr(v) for v in accepted) or "null"
            _refuse(key, value, f"supported: {expected}")


def _require_uniform_layers(raw: RawConfig, kind: str) -> None:
    layer_types = raw.get("layer_types")
    if layer_types is not None and any(layer != kind for layer in layer_types):
        _refuse("layer_types", layer_types, f"every layer must be {kind!r}")


def _eos_token_ids(raw: RawConfig) -> list[int]:
    value = raw.get("eos_token_id", 2)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if not _is_integer(token_id) or token_id < 0:
            _refuse("eos_token_id", value, "expected a token id or a list of them")
    return ids


def _bos_token_id(raw: RawConfig) -> int | None:
    value = raw.get("bos_token_id", 1)
    if value is not None and not _is_integer(value):
        _refuse("bos_token_id", value, "expected a token id or null")
    return value


def _dtype(raw: RawConfig) -> str | None:
    key = "dtype" if raw.get("dtype") is not None else "torch_dtype"
    value = raw.get(key)
    if value is None:
        return None
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    if name not in _DTYPES:
        _refuse(key, value, f"supported: {', '.join(_DTYPES)}")
    return name


def _integer(raw: RawConfig, key: str, default: int) -> int:
    value = raw.get(key, default)
    if not _is_integer(value) or value < 1:
        _refuse(key, value, "expected an integer >= 1")
    return value


def _optional_integer(raw: RawConfig, key: str, default: int | None) -> int | None:
    value = raw.get(key, default)
    return None if value is None else _integer(raw, key, value)


def _number(raw: RawConfig, key: str, default: float) -> float:
    value = raw.get(key, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        _refuse(key, value, "expected a number > 0")
    return float(value)


def _boolean(raw: RawConfig, key: str, *, default: bool) -> bool:
    value = raw.get(key, default)
    if not isinstance(value, bool):
        _refuse(key, value, "expected true or false")
    return value


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedModelError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _refuse(key: str, value: object, reason: str) -> NoReturn:
    raise UnsupportedModelError(f"config.json: {key} = {value!r} is not supported ({reason})")
