"""The Mixtral family: Mistral's attention over a mixture of experts in every layer."""

from __future__ import annotations

from replicas.config import ModelConfig, MoEConfig
from replicas.models import hf_config
from replicas.models.decoder_params import (
    DecoderParams,
    attention_specs,
    pre_norm_specs,
)
from replicas.models.hf_config import RawConfig, ReferenceDefaults
from replicas.models.moe_config import read_experts_per_tok, read_num_experts
from replicas.models.moe_params import MoEParams, expert_specs, router_specs
from replicas.models.rope_config import read_rope

_DEFAULTS = ReferenceDefaults(
    intermediate_size=14336,
    num_key_value_heads=8,
    max_position_embeddings=4096 * 32,
    norm_eps=1e-5,
)


def parse_config(raw: RawConfig) -> ModelConfig:
    """Parse the config of a MixtralForCausalLM checkpoint.

    Raises:
        UnsupportedModelError: naming the key and its value.
    """
    hf_config.require_supported(
        raw,
        architecture="MixtralForCausalLM",
        honoured={"hidden_act", "num_experts", "num_local_experts"},
    )
    window = hf_config.optional_integer(raw, "sliding_window", None)
    hf_config.require_uniform_layers(
        raw, "full_attention" if window is None else "sliding_attention"
    )
    num_experts = read_num_experts(raw, ("num_local_experts", "num_experts"), default=8)
    return hf_config.read_decoder(
        raw,
        family="mixtral",
        defaults=_DEFAULTS,
        rope=read_rope(
            raw,
            head_dim=hf_config.read_head_dim(raw, _DEFAULTS),
            max_position_embeddings=hf_config.read_max_len(raw, _DEFAULTS),
            default_theta=1e6,
        ),
        activation=hf_config.read_activation(raw),
        sliding_window=window,
        moe=MoEConfig(
            num_experts=num_experts,
            num_experts_per_tok=read_experts_per_tok(raw, num_experts=num_experts, default=2),
            intermediate_size=hf_config.integer(raw, "intermediate_size", 14336),
            normalizes=True,
        ),
    )


def param_specs(config: ModelConfig, *, num_shards: int = 1) -> DecoderParams:
    """Describe every parameter: shape, logical axes and the checkpoint tensors it is made of."""

    def experts(prefix: str) -> MoEParams:
        return MoEParams(
            router=router_specs(config, f"{prefix}.gate"),
            experts=expert_specs(
                config, f"{prefix}.experts", gate="w1", up="w3", down="w2", num_shards=num_shards
            ),
        )

    return pre_norm_specs(
        config,
        attention=lambda layer: attention_specs(
            config, f"{layer}.self_attn", num_shards=num_shards
        ),
        mlp=lambda layer: experts(f"{layer}.block_sparse_moe"),
        num_shards=num_shards,
    )
