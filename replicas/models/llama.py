"""The Llama family (Llama 2 and 3, SmolLM2): the plain decoder."""

from __future__ import annotations

from replicas.config import ModelConfig
from replicas.models import hf_config
from replicas.models.decoder_params import (
    DecoderParams,
    LayerParams,
    attention_specs,
    decoder_specs,
    gated_mlp_specs,
    norm_spec,
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

    def layer(index: int) -> LayerParams:
        prefix = f"model.layers.{index}"
        return LayerParams(
            attention_norm=norm_spec(f"{prefix}.input_layernorm.weight", config.hidden_size),
            attention=attention_specs(config, f"{prefix}.self_attn", num_shards=num_shards),
            mlp_norm=norm_spec(f"{prefix}.post_attention_layernorm.weight", config.hidden_size),
            mlp=gated_mlp_specs(config, f"{prefix}.mlp", num_shards=num_shards),
        )

    return decoder_specs(
        config,
        layers=[layer(index) for index in range(config.num_layers)],
        final_norm=norm_spec("model.norm.weight", config.hidden_size),
        num_shards=num_shards,
    )
