"""The gpt-oss family: attention with sinks, windows on some layers, and experts of clamped SwiGLU.

Checkpoints hold the experts of a layer in one tensor for each projection: plain, or in MXFP4, which
becomes the compute dtype at load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from replicas.config import LayerType, ModelConfig, MoEConfig
from replicas.models import hf_config, mxfp4
from replicas.models.decoder_params import (
    DecoderParams,
    attention_specs,
    pre_norm_specs,
)
from replicas.models.derived_spec import ConvertedSpec
from replicas.models.hf_config import RawConfig, ReferenceDefaults
from replicas.models.moe_config import read_experts_per_tok, read_num_experts
from replicas.models.moe_params import ExpertParams, MoEParams, expert_padding, router_specs
from replicas.models.param_spec import Source
from replicas.models.rope_config import read_rope

_DEFAULTS = ReferenceDefaults(
    vocab_size=201_088,
    hidden_size=2880,
    intermediate_size=2880,
    num_hidden_layers=36,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=131_072,
    norm_eps=1e-5,
    bos_token_id=None,
    eos_token_id=None,
)
_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def parse_config(raw: RawConfig) -> ModelConfig:
    """Parse the config of a GptOssForCausalLM checkpoint.

    Raises:
        UnsupportedModelError: naming the key and its value.
    """
    hf_config.require_supported(
        raw,
        architecture="GptOssForCausalLM",
        honoured={"attention_bias", "num_experts", "num_local_experts", "quantization_config"},
    )
    has_bias = hf_config.boolean(raw, "attention_bias", default=True)
    num_layers = hf_config.integer(raw, "num_hidden_layers", _DEFAULTS.num_hidden_layers)
    alternating: list[LayerType] = [
        "full_attention" if index % 2 else "sliding_attention" for index in range(num_layers)
    ]
    layer_types = hf_config.read_layer_types(raw, alternating)
    window = hf_config.optional_integer(raw, "sliding_window", 128)
    if window is None and "sliding_attention" in layer_types:
        hf_config.refuse("sliding_window", window, "layer_types names layers that have one")
    if raw.get("rope_parameters") is None and raw.get("rope_scaling") is None:
        raw = {**raw, "rope_parameters": _DEFAULT_ROPE}
    num_experts = read_num_experts(raw, ("num_local_experts", "num_experts"), default=128)
    return hf_config.read_decoder(
        raw,
        family="gpt_oss",
        defaults=_DEFAULTS,
        rope=read_rope(
            raw,
            head_dim=hf_config.read_head_dim(raw, _DEFAULTS),
            max_position_embeddings=hf_config.read_max_len(raw, _DEFAULTS),
            default_theta=150_000.0,
        ),
        sliding_window=window,
        layer_types=layer_types,
        qkv_bias=has_bias,
        attention_out_bias=has_bias,
        has_sinks=True,
        moe=MoEConfig(
            num_experts=num_experts,
            num_experts_per_tok=read_experts_per_tok(raw, num_experts=num_experts, default=4),
            intermediate_size=hf_config.integer(raw, "intermediate_size", 2880),
            # A softmax over the experts that were picked is that over all, renormalised.
            normalizes=True,
            swiglu_limit=hf_config.number(raw, "swiglu_limit", 7.0),
            swiglu_alpha=hf_config.number(raw, "swiglu_alpha", 1.702),
            is_mxfp4=_is_mxfp4(raw),
        ),
    )


def param_specs(config: ModelConfig, *, num_shards: int = 1) -> DecoderParams:
    """Describe every parameter: shape, logical axes and the checkpoint tensors it is made of."""

    def experts(prefix: str) -> MoEParams:
        return MoEParams(
            router=router_specs(config, f"{prefix}.router", bias="bias"),
            experts=_expert_specs(config, f"{prefix}.experts", num_shards=num_shards),
        )

    return pre_norm_specs(
        config,
        attention=lambda layer: attention_specs(
            config, f"{layer}.self_attn", sinks="sinks", num_shards=num_shards
        ),
        mlp=lambda layer: experts(f"{layer}.mlp"),
        num_shards=num_shards,
    )


def _expert_specs(config: ModelConfig, prefix: str, *, num_shards: int) -> ExpertParams:
    """Describe experts whose gates and ups alternate: they are stored gates first."""
    moe = config.moe
    assert moe is not None
    num_experts, ffn_size, hidden_size = moe.num_experts, moe.intermediate_size, config.hidden_size
    num_padding = expert_padding(config, num_shards)

    def weight(name: str, num_rows: int, num_columns: int, *, has_pairs: bool) -> ConvertedSpec:
        if moe.is_mxfp4:
            sources = mxfp4.sources(f"{prefix}.{name}", (num_experts, num_rows, num_columns))
        else:
            # [E, in, out] in the checkpoint.
            source = Source(name=f"{prefix}.{name}", shape=(num_experts, num_columns, num_rows))
            sources = (source,)

        def convert(tensors: Sequence[np.ndarray]) -> np.ndarray:
            parts = [tensor[0] for tensor in tensors]
            rows = mxfp4.decode(*parts) if moe.is_mxfp4 else parts[0].T
            return _gates_first(rows) if has_pairs else rows

        return ConvertedSpec(
            sources=sources,
            axes=("expert", "expert_ffn", "model"),
            num_entries=num_experts,
            entry_shape=(num_rows, num_columns),
            convert=convert,
            num_padding=num_padding,
        )

    def bias(name: str, num_rows: int, *, has_pairs: bool) -> ConvertedSpec:
        return ConvertedSpec(
            sources=(Source(name=f"{prefix}.{name}", shape=(num_experts, num_rows)),),
            axes=("expert", "expert_ffn"),
            is_float32=True,
            num_entries=num_experts,
            entry_shape=(num_rows,),
            convert=lambda rows: _gates_first(rows[0][0]) if has_pairs else rows[0],
            num_padding=num_padding,
        )

    return ExpertParams(
        gate_up=weight("gate_up_proj", 2 * ffn_size, hidden_size, has_pairs=True),
        gate_up_bias=bias("gate_up_proj_bias", 2 * ffn_size, has_pairs=True),
        down=weight("down_proj", hidden_size, ffn_size, has_pairs=False),
        down_bias=bias("down_proj_bias", hidden_size, has_pairs=False),
    )


def _gates_first(rows: np.ndarray) -> np.ndarray:
    """Reorder rows [2F, ...] of gate, up, gate, up and so on."""
    return np.concatenate([rows[0::2], rows[1::2]])


def _is_mxfp4(raw: RawConfig) -> bool:
    quantization = raw.get("quantization_config")
    if quantization is None:
        return False
    if not isinstance(quantization, Mapping) or quantization.get("quant_method") != "mxfp4":
        hf_config.refuse("quantization_config", quantization, "supported: quant_method 'mxfp4'")
    return True
