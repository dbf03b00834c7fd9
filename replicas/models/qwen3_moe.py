"""The Qwen3-MoE family: Qwen3's attention, with q and k norms, and experts in most layers."""

from __future__ import annotations

from replicas.config import ModelConfig, MoEConfig
from replicas.models import hf_config
from replicas.models.decoder_params import (
    DecoderParams,
    GatedMlpParams,
    attention_specs,
    gated_mlp_specs,
    pre_norm_specs,
)
from replicas.models.hf_config import RawConfig, ReferenceDefaults
from replicas.models.moe_config import (
    read_experts_per_tok,
    read_layer_indices,
    read_num_experts,
)
from replicas.models.moe_params import MoEParams, expert_specs, router_specs
from replicas.models.rope_config import read_plain_rope

_DEFAULTS = ReferenceDefaults(
    vocab_size=151_936,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=24,
    num_key_value_heads=4,
    max_position_embeddings=32_768,
    bos_token_id=None,
    eos_token_id=None,
)


def parse_config(raw: RawConfig) -> ModelConfig:
    """Parse the config of a Qwen3MoeForCausalLM checkpoint.

    Raises:
        UnsupportedModelError: naming the key and its value.
    """
    hf_config.require_supported(
        raw,
        architecture="Qwen3MoeForCausalLM",
        honoured={
            "hidden_act",
            "attention_bias",
            "num_experts",
            "num_local_experts",
            "moe_intermediate_size",
            "use_sliding_window",
        },
    )
    window = hf_config.optional_integer(raw, "sliding_window", 4096)
    if not hf_config.boolean(raw, "use_sliding_window", default=False):
        window = None
    hf_config.require_uniform_layers(
        raw, "full_attention" if window is None else "sliding_attention"
    )
    has_bias = hf_config.boolean(raw, "attention_bias", default=False)
    num_experts = read_num_experts(raw, ("num_experts", "num_local_experts"), default=128)
    num_layers = hf_config.integer(raw, "num_hidden_layers", _DEFAULTS.num_hidden_layers)
    sparse_step = hf_config.integer(raw, "decoder_sparse_step", 1)
    mlp_only = read_layer_indices(raw, "mlp_only_layers", num_layers=num_layers)
    return hf_config.read_decoder(
        raw,
        family="qwen3_moe",
        defaults=_DEFAULTS,
        rope=read_plain_rope(raw, _DEFAULTS),
        activation=hf_config.read_activation(raw),
        sliding_window=window,
        qkv_bias=has_bias,
        attention_out_bias=has_bias,
        moe=MoEConfig(
            num_experts=num_experts,
            num_experts_per_tok=read_experts_per_tok(raw, num_experts=num_experts, default=8),
            intermediate_size=hf_config.integer(raw, "moe_intermediate_size", 768),
            normalizes=hf_config.boolean(raw, "norm_topk_prob", default=False),
            dense_layers=tuple(
                index
                for index in range(num_layers)
                if index in mlp_only or (index + 1) % sparse_step
            ),
        ),
    )


def param_specs(config: ModelConfig, *, num_shards: int = 1) -> DecoderParams:
    """Describe every parameter: shape, logical axes and the checkpoint tensors it is made of."""
    assert config.moe is not None
    dense_layers = {f"model.layers.{index}" for index in config.moe.dense_layers}

    def mlp(layer: str) -> GatedMlpParams | MoEParams:
        if layer in dense_layers:
            return gated_mlp_specs(config, f"{layer}.mlp", num_shards=num_shards)
        return MoEParams(
            router=router_specs(config, f"{layer}.mlp.gate"),
            experts=expert_specs(config, f"{layer}.mlp.experts", num_shards=num_shards),
        )

    return pre_norm_specs(
        config,
        attention=lambda layer: attention_specs(
            config, f"{layer}.self_attn", has_head_norms=True, num_shards=num_shards
        ),
        mlp=mlp,
        num_shards=num_shards,
    )
