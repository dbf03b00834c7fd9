"""Reads Hugging Face's config.json, in full or not at all: what the families' parsers share.

A family's parser states the defaults of the reference implementation's config class, so a key that
is absent means here what it means there, and which keys it honours. Invariant: a key that would
change the computation is either honoured or refused with its name and value; it is never ignored.
Knows no weights and no jax.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from replicas.config import Activation, LayerType, ModelConfig, RopeConfig

RawConfig = Mapping[str, Any]

# Keys that models of similar layouts use to change the computation, and the values that change
# nothing. Absent and null are always accepted; a family takes out the keys that it honours.
_INERT_VALUES: dict[str, tuple[object, ...]] = {
    "quantization_config": (),
    # Keys of other architectures, which the families here do not have.
    "attention_chunk_size": (),
    "attention_k_eq_v": (False,),
    "attention_value_scale": (1.0,),
    "hc_mult": (),
    "index_topk": (),
    "key_multiplier": (1.0,),
    "layer_rope_theta": (),
    "lm_head_multiplier": (1.0,),
    "mlp_layer_types": (),
    "num_attention_heads_per_layer": (),
    "num_kv_shared_layers": (0,),
    "scale_embedding": (False,),
    "shared_expert_intermediate_size": (0,),
    "use_post_norm": (False,),
    "compression_config": (),
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("silu", "swish"),
    "attention_bias": (False,),
    "qkv_bias": (False,),
    "mlp_bias": (False,),
    "use_bias": (False,),
    "lm_head_bias": (False,),
    "layernorm_type": ("rms_norm",),
    "use_parallel_residual": (False,),
    "parallel_attn": (False,),
    "rope_interleaved": (False,),
    "rope_interleave": (False,),
    "partial_rotary_factor": (1.0,),
    "rotary_pct": (1.0,),
    "rotary_emb_base": (),
    "rope_local_base_freq": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),
    "attn_scale": (1.0,),
    "attn_temperature_tuning": (False,),
    "clip_qkv": (),
    "embedding_multiplier": (1.0,),
    "scale_emb": (1, 1.0),
    "scale_depth": (),
    "dim_model_base": (),
    "residual_multiplier": (1.0,),
    "logits_scaling": (1.0,),
    "logit_scale": (1.0,),
    "use_mup": (False,),
    "use_qk_norm": (False,),
    "qk_norm": (False,),
    "qk_layernorm": (False,),
    "attention_sinks": (False,),
    "no_rope_layers": ([],),
    "no_rope_layer_interval": (),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "n_routed_experts": (0,),
    "moe_intermediate_size": (0,),
    "kv_lora_rank": (0,),
    "q_lora_rank": (0,),
    "sliding_window_pattern": (),
    "use_sliding_window": (False,),
    "use_mrope": (False,),
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "alibi": (False,),
    "text_config": (),
    "vision_config": (),
}
_OWN_INT8 = (
    "weights are read as bfloat16, float16 or float32: take such a checkpoint; "
    "`quantization: int8` makes 8 bits of it at load"
)
_ADVICE = {"quantization_config": _OWN_INT8, "compression_config": _OWN_INT8}
_GENERATION_EOS_KEY = "eos_token_id of generation_config.json"
_DTYPES = ("bfloat16", "float16", "float32")
_LAYER_TYPES: tuple[LayerType, ...] = ("full_attention", "sliding_attention")
_ACTIVATIONS: dict[object, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}


class UnsupportedModelError(ValueError):
    """The checkpoint asks for something that is not built; the message names key and value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceDefaults:
    """What the reference implementation's config class has for keys that are absent.

    Attributes:
        num_key_value_heads: None: as many as query heads.
        head_dim: None: hidden_size / num_attention_heads.
        norm_eps: of `norm_eps_key`.
        norm_eps_key: name of the norms' epsilon.
    """

    vocab_size: int = 32_000
    hidden_size: int = 4096
    intermediate_size: int
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int
    norm_eps: float = 1e-6
    norm_eps_key: str = "rms_norm_eps"
    tie_word_embeddings: bool = False
    bos_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 2


def read_decoder(
    raw: RawConfig,
    *,
    family: str,
    defaults: ReferenceDefaults,
    rope: RopeConfig,
    **fields: Any,
) -> ModelConfig:
    """Read what all decoders have; `fields` are the rest of `ModelConfig`'s.

    Raises:
        UnsupportedModelError: naming the key and its value.
    """
    num_heads = integer(raw, "num_attention_heads", defaults.num_attention_heads)
    num_kv_heads = optional_integer(raw, "num_key_value_heads", defaults.num_key_value_heads)
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    if num_heads % num_kv_heads:
        refuse("num_key_value_heads", num_kv_heads, f"does not divide {num_heads} heads")
    return ModelConfig(
        family=family,
        vocab_size=integer(raw, "vocab_size", defaults.vocab_size),
        hidden_size=integer(raw, "hidden_size", defaults.hidden_size),
        intermediate_size=integer(raw, "intermediate_size", defaults.intermediate_size),
        num_layers=integer(raw, "num_hidden_layers", defaults.num_hidden_layers),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=read_head_dim(raw, defaults),
        max_position_embeddings=read_max_len(raw, defaults),
        norm_eps=number(raw, defaults.norm_eps_key, defaults.norm_eps),
        rope=rope,
        tie_word_embeddings=boolean(
            raw, "tie_word_embeddings", default=defaults.tie_word_embeddings
        ),
        eos_token_ids=tuple(_eos_token_ids(raw, defaults.eos_token_id)),
        bos_token_id=_bos_token_id(raw, defaults.bos_token_id),
        checkpoint_dtype=_dtype(raw),
        **fields,
    )


def read_head_dim(raw: RawConfig, defaults: ReferenceDefaults) -> int:
    """Read the size of a head, stated or implied."""
    head_dim = optional_integer(raw, "head_dim", defaults.head_dim)
    if head_dim is None:
        hidden_size = integer(raw, "hidden_size", defaults.hidden_size)
        num_heads = integer(raw, "num_attention_heads", defaults.num_attention_heads)
        if hidden_size % num_heads:
            refuse("hidden_size", hidden_size, f"not a multiple of {num_heads} heads")
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        refuse("head_dim", head_dim, "rotary embedding needs an even size")
    return head_dim


def read_max_len(raw: RawConfig, defaults: ReferenceDefaults) -> int:
    """Read the longest context that the checkpoint was made for, in tokens."""
    return integer(raw, "max_position_embeddings", defaults.max_position_embeddings)


def require_supported(raw: RawConfig, *, architecture: str, honoured: Collection[str] = ()) -> None:
    """Refuse another architecture, and keys that the family does not honour.

    Raises:
        UnsupportedModelError: naming the key and its value.
    """
    architectures = raw.get("architectures")
    if architectures is not None and architecture not in architectures:
        refuse("architectures", architectures, f"supported: {architecture}")
    for key, accepted in _INERT_VALUES.items():
        value = raw.get(key)
        if key not in honoured and value is not None and value not in accepted:
            expected = " or ".join(repr(v) for v in accepted) or "null"
            refuse(key, value, _ADVICE.get(key, f"supported: {expected}"))


def require_uniform_layers(raw: RawConfig, kind: LayerType) -> None:
    """Refuse `layer_types` that name another kind, where the reference ignores the key."""
    layer_types = raw.get("layer_types")
    if layer_types is not None and any(layer != kind for layer in layer_types):
        refuse("layer_types", layer_types, f"every layer must be {kind!r}")


def read_layer_types(raw: RawConfig, default: Sequence[LayerType]) -> tuple[LayerType, ...]:
    """Read the kind of each layer; `default` has one entry per layer.

    Raises:
        UnsupportedModelError: a kind is unknown, or their number is not that of the layers.
    """
    layer_types = raw.get("layer_types")
    if layer_types is None:
        return tuple(default)
    if not isinstance(layer_types, list) or any(t not in _LAYER_TYPES for t in layer_types):
        refuse("layer_types", layer_types, f"supported: a list of {' and '.join(_LAYER_TYPES)}")
    if len(layer_types) != len(default):
        refuse("layer_types", layer_types, f"there are {len(default)} layers")
    return tuple(layer_types)


def require_window(raw: RawConfig, window: int | None, layer_types: Sequence[LayerType]) -> None:
    """Refuse layers with a window where there is none."""
    if window is None and "sliding_attention" in layer_types:
        refuse("sliding_window", raw.get("sliding_window"), "layer_types has sliding layers")


def read_activation(raw: RawConfig, key: str = "hidden_act", default: str = "silu") -> Activation:
    """Read the MLP's nonlinearity.

    Raises:
        UnsupportedModelError: it is not built.
    """
    value = raw.get(key, default)
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        refuse(key, value, f"supported: {', '.join(map(str, _ACTIVATIONS))}")
    return _ACTIVATIONS[value]


def read_config_json(path: Path) -> dict[str, Any]:
    """Read config.json of a checkpoint directory, with generation_config.json's end ids beside it.

    Raises:
        UnsupportedModelError: there is no readable config.json.
    """
    raw = _read_json(path / "config.json")
    generation_path = path / "generation_config.json"
    if generation_path.is_file():
        raw[_GENERATION_EOS_KEY] = _read_json(generation_path).get("eos_token_id")
    return raw


def integer(raw: RawConfig, key: str, default: int) -> int:
    """Read an integer >= 1."""
    value = raw.get(key, default)
    if not _is_integer(value) or value < 1:
        refuse(key, value, "expected an integer >= 1")
    return value


def optional_integer(raw: RawConfig, key: str, default: int | None) -> int | None:
    """Read an integer >= 1 or null."""
    value = raw.get(key, default)
    return None if value is None else integer(raw, key, value)


def number(raw: RawConfig, key: str, default: float) -> float:
    """Read a finite number > 0."""
    value = raw.get(key, default)
    if not _is_number(value) or not 0 < value < math.inf:
        refuse(key, value, "expected a number > 0")
    return float(value)


def optional_number(raw: RawConfig, key: str, default: float | None = None) -> float | None:
    """Read a finite number > 0 or null."""
    value = raw.get(key, default)
    return None if value is None else number(raw, key, value)


def boolean(raw: RawConfig, key: str, *, default: bool) -> bool:
    """Read true or false."""
    value = raw.get(key, default)
    if not isinstance(value, bool):
        refuse(key, value, "expected true or false")
    return value


def refuse(key: str, value: object, reason: str) -> NoReturn:
    """Raise UnsupportedModelError for a key and its value."""
    raise UnsupportedModelError(f"config.json: {key} = {value!r} is not supported ({reason})")


def _eos_token_ids(raw: RawConfig, default: int | tuple[int, ...] | None) -> list[int]:
    """Return the end ids of config.json, then those that only generation_config.json has."""
    token_ids: list[int] = []
    for value in (raw.get("eos_token_id", default), raw.get(_GENERATION_EOS_KEY)):
        ids = list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
        if any(not _is_integer(token_id) or token_id < 0 for token_id in ids):
            refuse("eos_token_id", value, "expected a token id or a list of them")
        token_ids += ids
    return list(dict.fromkeys(token_ids))


def _bos_token_id(raw: RawConfig, default: int | None) -> int | None:
    value = raw.get("bos_token_id", default)
    if value is not None and not _is_integer(value):
        refuse("bos_token_id", value, "expected a token id or null")
    return value


def _dtype(raw: RawConfig) -> str | None:
    key = "dtype" if raw.get("dtype") is not None else "torch_dtype"
    value = raw.get(key)
    if value is None:
        return None
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    if name not in _DTYPES:
        refuse(key, value, f"supported: {', '.join(_DTYPES)}")
    return name


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedModelError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value
