"""The GLM-4 family (0414): norms around each block, half of each head rotated in pairs."""

from __future__ import annotations

from replicas.config import ModelConfig
from replicas.models import hf_config
from replicas.models.decoder_params import (
    DecoderParams,
    NormNames,
    attention_specs,
    gated_mlp_specs,
    pre_norm_specs,
)
from replicas.models.hf_config import RawConfig, ReferenceDefaults
from replicas.models.rope_config import read_rope

_DEFAULTS = ReferenceDefaults(
    vocab_size=151552,
    intermediate_size=13696,
    num_hidden_layers=40,
    num_key_value_heads=2,
    head_dim=128,
    max_position_embeddings=131072,
    norm_eps=1.5625e-07,
    bos_token_id=None,
    eos_token_id=(151329, 151336, 151338),
)
_NORM_NAMES = NormNames(
    attention="input_layernorm",
    attention_out="post_self_attn_layernorm",
    mlp="post_attention_layernorm",
    mlp_out="post_mlp_layernorm",
)


def parse_config(raw: RawConfig) -> ModelConfig:
    """Parse the config of a Glm4ForCausalLM checkpoint.

    Raises:
        UnsupportedModelError: naming the key and its value.
    """
    hf_config.require_supported(
        raw,
        architecture="Glm4ForCausalLM",
        honoured={"hidden_act", "attention_bias", "partial_rotary_factor"},
    )
    hf_config.require_uniform_layers(raw, "full_attention")
    rope = read_rope(
        raw,
        head_dim=hf_config.read_head_dim(raw, _DEFAULTS),
        max_position_embeddings=hf_config.read_max_len(raw, _DEFAULTS),
        default_partial=0.5,
        partial_key="partial_rotary_factor",
        is_interleaved=True,
    )
    if raw.get("eos_token_id") is None:
        raw = {key: value for key, value in raw.items() if key != "eos_token_id"}
    return hf_config.read_decoder(
        raw,
        family="glm4",
        defaults=_DEFAULTS,
        rope=rope,
        activation=hf_config.read_activation(raw),
        qkv_bias=hf_config.boolean(raw, "attention_bias", default=True),
    )


def param_specs(config: ModelConfig, *, num_shards: int = 1) -> DecoderParams:
    """Describe every parameter: shape, logical axes and the checkpoint tensors it is fused from."""
    return pre_norm_specs(
        config,
        attention=lambda layer: attention_specs(
            config, f"{layer}.self_attn", num_shards=num_shards
        ),
        mlp=lambda layer: gated_mlp_specs(
            config, f"{layer}.mlp", fused="gate_up_proj", num_shards=num_shards
        ),
        norms=_NORM_NAMES,
        num_shards=num_shards,
    )
