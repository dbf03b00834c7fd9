"""The DeepSeek-V3 family, Kimi-K2 included: latent attention, and sigmoid-routed experts.

The layers that predict further tokens (MTP) are not computed; their tensors are skipped.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from replicas.config import MLAConfig, ModelConfig, MoEConfig
from replicas.models import decoder, hf_config, mla, moe
from replicas.models.data_parallel import find_own_sequences
from replicas.models.decoder_params import (
    DecoderParams,
    GatedMlpParams,
    gated_mlp_specs,
    pre_norm_specs,
)
from replicas.models.hf_config import RawConfig, ReferenceDefaults
from replicas.models.inputs import ModelInputs
from replicas.models.kv_cache import Attention, KVPages
from replicas.models.moe_config import read_count, read_experts_per_tok, read_num_experts
from replicas.models.moe_params import MoEParams, expert_specs, router_specs
from replicas.models.rope_config import read_rope, yarn_mscale

if TYPE_CHECKING:
    from jaxtyping import Array, Float32

_DEFAULTS = ReferenceDefaults(
    vocab_size=129_280,
    hidden_size=7168,
    intermediate_size=18_432,
    num_hidden_layers=61,
    num_attention_heads=128,
    num_key_value_heads=128,
    max_position_embeddings=4096,
    bos_token_id=0,
    eos_token_id=1,
)
_HONOURED = {
    "hidden_act",
    "attention_bias",
    "n_routed_experts",
    "num_experts",
    "num_local_experts",
    "moe_intermediate_size",
    "kv_lora_rank",
    "q_lora_rank",
    "rope_interleave",
}
# What the original configurations state and the reference takes for granted.
_FIXED_VALUES: dict[str, object] = {
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
}


def parse_config(raw: RawConfig, *, family: str = "deepseek_v3") -> ModelConfig:
    """Parse the config of a DeepseekV3ForCausalLM checkpoint.

    Raises:
        UnsupportedModelError: naming the key and its value.
    """
    hf_config.require_supported(raw, architecture="DeepseekV3ForCausalLM", honoured=_HONOURED)
    for key, expected in _FIXED_VALUES.items():
        if raw.get(key, expected) != expected:
            hf_config.refuse(key, raw[key], f"supported: {expected!r}")
    latent = _read_latent_attention(raw)
    rope = read_rope(
        raw,
        head_dim=latent.qk_rope_head_dim,
        max_position_embeddings=hf_config.read_max_len(raw, _DEFAULTS),
        is_interleaved=raw.get("rope_interleave", True) is not None
        and hf_config.boolean(raw, "rope_interleave", default=True),
    )
    has_bias = hf_config.boolean(raw, "attention_bias", default=False)
    return hf_config.read_decoder(
        # One row of the cache serves all heads, whatever the checkpoint calls its KV heads.
        {**raw, "num_key_value_heads": 1, "head_dim": latent.qk_rope_head_dim},
        family=family,
        defaults=_DEFAULTS,
        rope=rope,
        activation=hf_config.read_activation(raw),
        attention_scale=_attention_scale(raw, latent, factor=rope.factor),
        qkv_bias=has_bias,
        attention_out_bias=has_bias,
        mla=latent,
        moe=_read_moe(raw),
        num_skipped_layers=_read_num_skipped(raw),
    )


parse_kimi_k2 = functools.partial(parse_config, family="kimi_k2")


def param_specs(config: ModelConfig, *, num_shards: int = 1) -> DecoderParams:
    """Describe every parameter: shape, logical axes and the checkpoint tensors it is made of."""
    assert config.moe is not None
    dense_layers = {f"model.layers.{index}" for index in config.moe.dense_layers}
    shared_size = config.moe.shared_intermediate_size

    def mlp(layer: str) -> GatedMlpParams | MoEParams:
        prefix = f"{layer}.mlp"
        if layer in dense_layers:
            return gated_mlp_specs(config, prefix, num_shards=num_shards)
        shared = None
        if shared_size:
            shared = gated_mlp_specs(
                config, f"{prefix}.shared_experts", ffn_size=shared_size, num_shards=num_shards
            )
        return MoEParams(
            router=router_specs(config, f"{prefix}.gate", correction="e_score_correction_bias"),
            experts=expert_specs(config, f"{prefix}.experts", num_shards=num_shards),
            shared=shared,
        )

    return pre_norm_specs(
        config,
        attention=lambda layer: mla.latent_attention_specs(
            config, f"{layer}.self_attn", num_shards=num_shards
        ),
        mlp=mlp,
        num_shards=num_shards,
    )


def forward(
    params: DecoderParams,
    kv_pages: KVPages,
    inputs: ModelInputs,
    config: ModelConfig,
    *,
    attention: Attention,
    axis_name: str | None = None,
) -> tuple[Float32[Array, "T M"], KVPages]:
    """Run one step; see `decoder.forward`. `attention` is of `kernels.mla_reference`'s signature.

    With `axis_name`, `kv_pages` are those of this device's sequences.
    """
    own = None
    if axis_name is not None:
        assert isinstance(kv_pages, tuple)
        num_pages = kv_pages[0].shape[0]
        own = find_own_sequences(inputs, num_pages=num_pages, axis_name=axis_name)
    return decoder.forward(
        params,
        kv_pages,
        inputs,
        config,
        attention=attention,
        axis_name=axis_name,
        run_layer=functools.partial(
            decoder.pre_norm_layer,
            attend=functools.partial(mla.attend_latents, own=own),
            run_mlp=moe.run_mlp,
        ),
    )


def _read_latent_attention(raw: RawConfig) -> MLAConfig:
    latent = MLAConfig(
        q_lora_rank=hf_config.optional_integer(raw, "q_lora_rank", 1536),
        kv_lora_rank=hf_config.integer(raw, "kv_lora_rank", 512),
        qk_nope_head_dim=hf_config.integer(raw, "qk_nope_head_dim", 128),
        qk_rope_head_dim=hf_config.integer(raw, "qk_rope_head_dim", 64),
        v_head_dim=hf_config.integer(raw, "v_head_dim", 128),
    )
    num_heads = hf_config.integer(raw, "num_attention_heads", _DEFAULTS.num_attention_heads)
    implied = {
        "num_key_value_heads": num_heads,
        "head_dim": latent.qk_rope_head_dim,
        "qk_head_dim": latent.qk_nope_head_dim + latent.qk_rope_head_dim,
    }
    stated = {"num_key_value_heads": 128, **raw}
    for key, expected in implied.items():
        if stated.get(key) is not None and stated[key] != expected:
            hf_config.refuse(key, stated[key], f"the other keys imply {expected}")
    return latent


def _read_num_skipped(raw: RawConfig) -> int:
    """Read the number of layers that predict further tokens; it has two names."""
    names = [key for key in ("num_nextn_predict_layers", "num_mtp_layers") if key in raw]
    counts = {key: read_count(raw, key, 1) for key in names}
    if len(set(counts.values())) > 1:
        hf_config.refuse(names[1], counts[names[1]], f"{names[0]} says {counts[names[0]]}")
    return next(iter(counts.values()), 1)


def _attention_scale(raw: RawConfig, latent: MLAConfig, *, factor: float) -> float:
    """Return the factor of the scores: YaRN's temperature is in it if `mscale_all_dim` is."""
    scale = (latent.qk_nope_head_dim + latent.qk_rope_head_dim) ** -0.5
    parameters = (raw.get("rope_scaling") or {}) | (raw.get("rope_parameters") or {})
    all_dim = hf_config.optional_number(parameters, "mscale_all_dim")
    return scale if all_dim is None else scale * yarn_mscale(factor, all_dim) ** 2


def _read_moe(raw: RawConfig) -> MoEConfig:
    num_experts = read_num_experts(
        raw, ("n_routed_experts", "num_local_experts", "num_experts"), default=256
    )
    per_token = read_experts_per_tok(raw, num_experts=num_experts, default=8)
    num_groups = hf_config.integer(raw, "n_group", 8)
    per_token_groups = hf_config.integer(raw, "topk_group", 4)
    if num_experts % num_groups or num_experts < 2 * num_groups:
        hf_config.refuse("n_group", num_groups, f"groups of at least 2 of {num_experts} experts")
    num_in_reach = per_token_groups * (num_experts // num_groups)
    if per_token_groups > num_groups or num_in_reach < per_token:
        hf_config.refuse(
            "topk_group",
            per_token_groups,
            f"there are {num_groups} groups, and {per_token} experts are picked",
        )
    ffn_size = hf_config.integer(raw, "moe_intermediate_size", 2048)
    return MoEConfig(
        num_experts=num_experts,
        num_experts_per_tok=per_token,
        intermediate_size=ffn_size,
        shared_intermediate_size=ffn_size * read_count(raw, "n_shared_experts", 1),
        dense_layers=tuple(range(read_count(raw, "first_k_dense_replace", 3))),
        scoring="sigmoid",
        normalizes=hf_config.boolean(raw, "norm_topk_prob", default=True),
        normalizer_epsilon=1e-20,
        scaling_factor=hf_config.number(raw, "routed_scaling_factor", 2.5),
        num_groups=num_groups,
        num_groups_per_tok=per_token_groups,
    )
