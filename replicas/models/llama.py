"""The Llama family (Llama 2 and 3, SmolLM2): the plain decoder."""

from __future__ import annotations

from replicas.config import ModelConfig
from replicas.models import hf_config
from replicas.models.decoder_params import (
    DecoderParams,
    attention_specs,
    gated_mlp_specs,
    pre_norm_specs,
)
from replicas.models.hf_config import RawConfig, ReferenceDefaults
from replicas.models.rope_config import read_plain_rope

_DEFAULTS = ReferenceDefaults(intermediate_size=11008, max_position_embeddings=2048)


def parse_config(raw: RawConfig) -> ModelConfig:
    """Parse the config of a LlamaForCausalLM checkpoint.

    Raises:
        UnsupportedModelError: naming the key and its value.
    """
    hf_config.require_supported(
        raw,
        architecture="LlamaForCausalLM",
        honoured={"hidden_act", "attention_bias", "mlp_bias"},
    )
    has_bias = hf_config.boolean(raw, "attention_bias", default=False)
    config = hf_config.read_decoder(
        raw,
        family="llama",
        defaults=_DEFAULTS,
        rope=read_plain_rope(raw, _DEFAULTS),
        activation=hf_config.read_activation(raw),
        qkv_bias=has_bias,
        attention_out_bias=has_bias,
        mlp_bias=hf_config.boolean(raw, "mlp_bias", default=False),
    )
    window = hf_config.optional_integer(raw, "sliding_window", None)
    # The reference ignores the key in this family: only a window that masks nothing is the same.
    if window is not None and window < config.max_position_embeddings:
        hf_config.refuse("sliding_window", window, "a llama checkpoint sees its whole context")
    hf_config.require_uniform_layers(raw, "full_attention")
    return config


def param_specs(config: ModelConfig, *, num_shards: int = 1) -> DecoderParams:
    """Describe every parameter: shape, logical axes and the checkpoint tensors it is fused from."""
    return pre_norm_specs(
        config,
        attention=lambda layer: attention_specs(
            config, f"{layer}.self_attn", num_shards=num_shards
        ),
        mlp=lambda layer: gated_mlp_specs(config, f"{layer}.mlp", num_shards=num_shards),
        num_shards=num_shards,
    )
