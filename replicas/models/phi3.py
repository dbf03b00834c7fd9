"""The Phi-3 family (also Phi-4): Llama with q, k, v in one tensor and gate, up in another."""

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
from replicas.models.param_spec import Source
from replicas.models.rope_config import read_rope

_DEFAULTS = ReferenceDefaults(
    vocab_size=32064,
    hidden_size=3072,
    intermediate_size=8192,
    max_position_embeddings=4096,
    norm_eps=1e-5,
    eos_token_id=32000,
)
_ORIGINAL_KEY = "original_max_position_embeddings"


def parse_config(raw: RawConfig) -> ModelConfig:
    """Parse the config of a Phi3ForCausalLM checkpoint.

    Raises:
        UnsupportedModelError: naming the key and its value.
    """
    hf_config.require_supported(
        raw,
        architecture="Phi3ForCausalLM",
        honoured={"hidden_act", "partial_rotary_factor"},
    )
    window = hf_config.optional_integer(raw, "sliding_window", None)
    hf_config.require_uniform_layers(
        raw, "full_attention" if window is None else "sliding_attention"
    )
    rope = read_rope(
        {_ORIGINAL_KEY: 4096, **raw},
        head_dim=hf_config.read_head_dim(raw, _DEFAULTS),
        max_position_embeddings=hf_config.read_max_len(raw, _DEFAULTS),
        partial_key="partial_rotary_factor",
        aliases={"su": "longrope", "yarn": "longrope"},
        kinds=("default", "longrope"),
    )
    return hf_config.read_decoder(
        raw,
        family="phi3",
        defaults=_DEFAULTS,
        rope=rope,
        activation=hf_config.read_activation(raw),
        sliding_window=window,
    )


def param_specs(config: ModelConfig, *, num_shards: int = 1) -> DecoderParams:
    """Describe every parameter: shape, logical axes and the checkpoint tensors it is fused from."""
    return pre_norm_specs(
        config,
        attention=lambda layer: attention_specs(
            config, f"{layer}.self_attn", qkv=_fused_qkv, num_shards=num_shards
        ),
        mlp=lambda layer: gated_mlp_specs(
            config, f"{layer}.mlp", fused="gate_up_proj", num_shards=num_shards
        ),
        num_shards=num_shards,
    )


def _fused_qkv(config: ModelConfig, prefix: str, suffix: str) -> tuple[Source, ...]:
    """Return the sources of q, k and v: rows of one tensor, in this order."""
    ends = [
        heads * config.head_dim
        for heads in (
            config.num_heads,
            config.num_heads + config.num_kv_heads,
            config.num_heads + 2 * config.num_kv_heads,
        )
    ]
    columns = () if suffix == "bias" else (config.hidden_size,)
    return tuple(
        Source(name=f"{prefix}.qkv_proj.{suffix}", shape=(ends[-1], *columns), begin=begin, end=end)
        for begin, end in zip([0, *ends], ends, strict=False)
    )
