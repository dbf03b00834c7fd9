"""The GPT-NeoX family (also Pythia): layer norms, biases, an MLP without a gate.

Attention and MLP may read the same residual stream ("parallel residual").
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax

from replicas.config import ModelConfig
from replicas.models import decoder, hf_config, layers
from replicas.models.decoder import StepContext
from replicas.models.decoder_params import (
    AttentionParams,
    DecoderParams,
    LayerNormParams,
    MlpParams,
    attention_specs,
    decoder_specs,
    down_spec,
    model_bias_spec,
    norm_spec,
    up_spec,
)
from replicas.models.hf_config import RawConfig, ReferenceDefaults
from replicas.models.kv_cache import KVPages
from replicas.models.param_spec import Source
from replicas.models.rope_config import read_rope

if TYPE_CHECKING:
    from jaxtyping import Array, Float32, Int32

_DEFAULTS = ReferenceDefaults(
    vocab_size=50432,
    hidden_size=6144,
    intermediate_size=24576,
    num_hidden_layers=44,
    num_attention_heads=64,
    max_position_embeddings=2048,
    norm_eps=1e-5,
    norm_eps_key="layer_norm_eps",
    bos_token_id=0,
    eos_token_id=2,
)
_HONOURED = {
    "hidden_act",
    "attention_bias",
    "partial_rotary_factor",
    "rotary_emb_base",
    "rotary_pct",
    "use_parallel_residual",
}


class NeoXLayerParams(NamedTuple):
    """Weights of one layer.

    Attributes:
        attention_norm: of the attention's input.
        attention: the attention block.
        mlp_norm: of the MLP's input.
        mlp: the MLP.
    """

    attention_norm: LayerNormParams
    attention: AttentionParams
    mlp_norm: LayerNormParams
    mlp: MlpParams


def parse_config(raw: RawConfig) -> ModelConfig:
    """Parse the config of a GPTNeoXForCausalLM checkpoint.

    Raises:
        UnsupportedModelError: naming the key and its value.
    """
    hf_config.require_supported(raw, architecture="GPTNeoXForCausalLM", honoured=_HONOURED)
    hf_config.require_uniform_layers(raw, "full_attention")
    rope = read_rope(
        raw,
        head_dim=hf_config.read_head_dim(raw, _DEFAULTS),
        max_position_embeddings=hf_config.read_max_len(raw, _DEFAULTS),
        theta_key="rotary_emb_base",
        default_partial=0.25,
        partial_key="rotary_pct",
    )
    has_bias = hf_config.boolean(raw, "attention_bias", default=True)
    config = hf_config.read_decoder(
        raw,
        family="gpt_neox",
        defaults=_DEFAULTS,
        rope=rope,
        activation=hf_config.read_activation(raw, default="gelu"),
        qkv_bias=has_bias,
        attention_out_bias=has_bias,
        mlp_bias=True,
        is_parallel=hf_config.boolean(raw, "use_parallel_residual", default=True),
    )
    # Keys of other families, which the reference does not read in this one.
    effective = {
        "head_dim": config.hidden_size // config.num_heads,
        "num_key_value_heads": config.num_heads,
        "rope_theta": rope.theta,
        "partial_rotary_factor": (rope.rotary_dim or config.head_dim) / config.head_dim,
    }
    for key, value in effective.items():
        if raw.get(key) is not None and raw[key] != value:
            hf_config.refuse(key, raw[key], f"supported: {value!r}, which other keys say")
    return config


def param_specs(config: ModelConfig, *, num_shards: int = 1) -> DecoderParams:
    """Describe every parameter: shape, logical axes and the checkpoint tensors it is fused from."""

    def norm(name: str) -> LayerNormParams:
        return LayerNormParams(
            norm_spec(f"{name}.weight", config.hidden_size),
            norm_spec(f"{name}.bias", config.hidden_size),
        )

    def layer(prefix: str) -> NeoXLayerParams:
        mlp = f"{prefix}.mlp"
        return NeoXLayerParams(
            attention_norm=norm(f"{prefix}.input_layernorm"),
            attention=attention_specs(
                config,
                f"{prefix}.attention",
                qkv=_interleaved_qkv,
                out="dense",
                num_shards=num_shards,
            ),
            mlp_norm=norm(f"{prefix}.post_attention_layernorm"),
            mlp=MlpParams(
                up=up_spec(config, f"{mlp}.dense_h_to_4h.weight", num_shards=num_shards),
                up_bias=up_spec(config, f"{mlp}.dense_h_to_4h.bias", num_shards=num_shards),
                down=down_spec(config, f"{mlp}.dense_4h_to_h.weight", num_shards=num_shards),
                down_bias=model_bias_spec(config, f"{mlp}.dense_4h_to_h.bias"),
            ),
        )

    return decoder_specs(
        config,
        layers=[layer(f"gpt_neox.layers.{index}") for index in range(config.num_layers)],
        final_norm=norm("gpt_neox.final_layer_norm"),
        embedding="gpt_neox.embed_in.weight",
        head="embed_out.weight",
        num_shards=num_shards,
    )


def compute_logits(
    params: DecoderParams,
    hidden: Float32[Array, "R M"],
    num_rows: Int32[Array, " 1"],
    config: ModelConfig,
    *,
    axis_name: str | None = None,
) -> Float32[Array, "R V"]:
    """Apply the final norm and the output head; see `decoder.compute_logits`."""
    with jax.named_scope("logits"):
        normed = layers.layer_norm(hidden, *params.final_norm, eps=config.norm_eps)
        return decoder.project_to_vocab(params, normed, num_rows, config, axis_name=axis_name)


def _run_layer(
    layer: NeoXLayerParams,
    hidden: Float32[Array, "T M"],
    kv_pages: KVPages,
    index: int,
    step: StepContext,
) -> tuple[Float32[Array, "T M"], KVPages]:
    eps = step.config.norm_eps
    normed = layers.layer_norm(hidden, *layer.attention_norm, eps=eps)
    attended, kv_pages = decoder.attend_pages(layer.attention, normed, kv_pages, index, step)
    mlp_input = hidden if step.config.is_parallel else hidden + attended
    normed = layers.layer_norm(mlp_input, *layer.mlp_norm, eps=eps)
    return hidden + attended + decoder.mlp(layer.mlp, normed, step), kv_pages


forward = functools.partial(decoder.forward, run_layer=_run_layer)
"""Run one step; see `decoder.forward`."""


def _interleaved_qkv(config: ModelConfig, prefix: str, suffix: str) -> tuple[Source, ...]:
    """Return the sources of q, k and v: one tensor holds them head by head."""
    columns = () if suffix == "bias" else (config.hidden_size,)
    return tuple(
        Source(
            name=f"{prefix}.query_key_value.{suffix}",
            shape=(3 * config.num_heads * config.head_dim, *columns),
            num_groups=config.num_heads,
            begin=part * config.head_dim,
            end=(part + 1) * config.head_dim,
        )
        for part in range(3)
    )
