"""The Qwen3 family: Qwen2's windows, q and k normalised head by head."""

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
from replicas.models.qwen2 import read_window
from replicas.models.rope_config import read_plain_rope

_DEFAULTS = ReferenceDefaults(
    vocab_size=151936,
    intermediate_size=22016,
    num_key_value_heads=32,
    head_dim=128,
    max_position_embeddings=32768,
    bos_token_id=None,
    eos_token_id=None,
)


def parse_config(raw: RawConfig) -> ModelConfig:
    """Parse the config of a Qwen3ForCausalLM checkpoint.

    Raises:
        UnsupportedModelError: naming the key and its value.
    """
    hf_config.require_supported(
        raw,
        architecture="Qwen3ForCausalLM",
        honoured={"hidden_act", "attention_bias", "use_sliding_window"},
    )
    has_bias = hf_config.boolean(raw, "attention_bias", default=False)
    window, layer_types = read_window(raw, num_layers=_DEFAULTS.num_hidden_layers)
    return hf_config.read_decoder(
        raw,
        family="qwen3",
        defaults=_DEFAULTS,
        rope=read_plain_rope(raw, _DEFAULTS),
        activation=hf_config.read_activation(raw),
        sliding_window=window,
        layer_types=layer_types,
        qkv_bias=has_bias,
        attention_out_bias=has_bias,
    )


def param_specs(config: ModelConfig, *, num_shards: int = 1) -> DecoderParams:
    """Describe every parameter: shape, logical axes and the checkpoint tensors it is fused from."""
    return pre_norm_specs(
        config,
        attention=lambda layer: attention_specs(
            config, f"{layer}.self_attn", has_head_norms=True, num_shards=num_shards
        ),
        mlp=lambda layer: gated_mlp_specs(config, f"{layer}.mlp", num_shards=num_shards),
        num_shards=num_shards,
    )
