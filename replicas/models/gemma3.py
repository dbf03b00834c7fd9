"""The text models of Gemma 3: norms on both sides of each block, windows and two rotary bases.

Norm weights are stored minus 1; embeddings are multiplied by sqrt(M).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from replicas.config import ModelConfig, RopeConfig
from replicas.models import decoder, hf_config
from replicas.models.decoder_params import (
    DecoderParams,
    NormNames,
    attention_specs,
    gated_mlp_specs,
    pre_norm_specs,
)
from replicas.models.hf_config import RawConfig, ReferenceDefaults
from replicas.models.inputs import ModelInputs
from replicas.models.kv_cache import KVPages
from replicas.models.rope_config import make_rope, merge_parameters

if TYPE_CHECKING:
    from jaxtyping import Array, Float32

_DEFAULTS = ReferenceDefaults(
    vocab_size=262_208,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    max_position_embeddings=131_072,
    tie_word_embeddings=True,
    bos_token_id=2,
    eos_token_id=1,
)
_HONOURED = {
    "hidden_activation",
    "attention_bias",
    "final_logit_softcapping",
    "query_pre_attn_scalar",
    "rope_local_base_freq",
    "sliding_window_pattern",
}
_NORM_NAMES = NormNames(
    attention="input_layernorm",
    attention_out="post_attention_layernorm",
    mlp="pre_feedforward_layernorm",
    mlp_out="post_feedforward_layernorm",
)
_NORM_OFFSET = 1.0


def parse_config(raw: RawConfig) -> ModelConfig:
    """Parse the config of a Gemma3ForCausalLM checkpoint.

    Raises:
        UnsupportedModelError: naming the key and its value.
    """
    hf_config.require_supported(raw, architecture="Gemma3ForCausalLM", honoured=_HONOURED)
    num_layers = hf_config.integer(raw, "num_hidden_layers", _DEFAULTS.num_hidden_layers)
    # Of every so many layers the last one sees the whole context.
    pattern = hf_config.integer(raw, "sliding_window_pattern", 6)
    layer_types = hf_config.read_layer_types(
        raw,
        [
            "sliding_attention" if (layer + 1) % pattern else "full_attention"
            for layer in range(num_layers)
        ],
    )
    window = hf_config.optional_integer(raw, "sliding_window", 4096)
    hf_config.require_window(raw, window, layer_types)
    has_bias = hf_config.boolean(raw, "attention_bias", default=False)
    rope, sliding_rope = _read_ropes(raw)
    return hf_config.read_decoder(
        raw,
        family="gemma3_text",
        defaults=_DEFAULTS,
        rope=rope,
        sliding_rope=sliding_rope,
        activation=hf_config.read_activation(raw, "hidden_activation", "gelu_pytorch_tanh"),
        sliding_window=window,
        layer_types=layer_types,
        attention_scale=hf_config.number(raw, "query_pre_attn_scalar", 256) ** -0.5,
        qkv_bias=has_bias,
        attention_out_bias=has_bias,
        final_logit_softcapping=hf_config.optional_number(raw, "final_logit_softcapping"),
    )


def param_specs(config: ModelConfig, *, num_shards: int = 1) -> DecoderParams:
    """Describe every parameter: shape, logical axes and the checkpoint tensors it is fused from."""
    return pre_norm_specs(
        config,
        attention=lambda layer: attention_specs(
            config,
            f"{layer}.self_attn",
            has_head_norms=True,
            norm_offset=_NORM_OFFSET,
            num_shards=num_shards,
        ),
        mlp=lambda layer: gated_mlp_specs(config, f"{layer}.mlp", num_shards=num_shards),
        norms=_NORM_NAMES,
        norm_offset=_NORM_OFFSET,
        num_shards=num_shards,
    )


def forward(
    params: DecoderParams,
    kv_pages: KVPages,
    inputs: ModelInputs,
    config: ModelConfig,
    **options: Any,
) -> tuple[Float32[Array, "T M"], KVPages]:
    """Run one step; see `decoder.forward`."""
    scale = math.sqrt(config.hidden_size)
    return decoder.forward(params, kv_pages, inputs, config, embedding_scale=scale, **options)


def _read_ropes(raw: RawConfig) -> tuple[RopeConfig, RopeConfig]:
    """Read the rotary embeddings of full and of sliding layers.

    `rope_parameters` by layer type, or the older `rope_theta`, `rope_scaling` (both of full layers)
    and `rope_local_base_freq`.
    """
    nested = raw.get("rope_parameters")
    nested = {} if nested is None else nested
    layer_types = ("full_attention", "sliding_attention")
    if not isinstance(nested, Mapping) or not nested.keys() <= set(layer_types):
        hf_config.refuse("rope_parameters", nested, f"expected {' and '.join(layer_types)}")
    older = ({"rope_theta": raw.get("rope_theta")}, {"rope_theta": raw.get("rope_local_base_freq")})
    scaling = raw.get("rope_scaling")
    ropes: list[RopeConfig] = []
    for layer_type, theta, default in zip(layer_types, older, (1e6, 1e4), strict=True):
        owner = f"rope_parameters.{layer_type}"
        merged = merge_parameters({}, theta, owner="config.json")
        for name, parameters in (("rope_scaling", scaling), (owner, nested.get(layer_type))):
            if parameters is None or (name == "rope_scaling" and layer_type != "full_attention"):
                continue
            if not isinstance(parameters, Mapping):
                hf_config.refuse(name, parameters, "expected a mapping")
            merge_parameters(merged, parameters, owner=name)
        if merged.get("truncate", True) is not True:
            # The reference looks it up in the outer mapping, and never finds it.
            hf_config.refuse(f"{owner}.truncate", merged["truncate"], "supported: true")
        ropes.append(
            make_rope(
                merged,
                owner=owner,
                head_dim=hf_config.read_head_dim(raw, _DEFAULTS),
                max_position_embeddings=hf_config.read_max_len(raw, _DEFAULTS),
                default_theta=default,
            )
        )
    return ropes[0], ropes[1]
