"""The decoder that the families share: embedding, layers, final norm, head, over paged attention.

Pure functions over a tree of weights, written for one shard: head counts come from the shapes. A
family runs these as they are, or gives `forward` a layer of its own made of the blocks below.
Layers are unrolled, since a scan copies each layer's weights and pages. Invariant: the residual
stream, norms, rotations and all accumulation are f32; only matmul operands and the cache have the
weights' dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from replicas.config import ModelConfig, RopeConfig
from replicas.models import kv_cache, layers
from replicas.models.decoder_params import (
    AttentionParams,
    DecoderParams,
    GatedMlpParams,
    LayerParams,
    MlpParams,
)
from replicas.models.inputs import ModelInputs
from replicas.models.kv_cache import Attention, KVPages
from replicas.models.rope import Angles, apply_rope, rope_angles

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Int32


class StepContext(NamedTuple):
    """What every layer of one step reads beside its weights.

    Attributes:
        inputs: the step.
        angles: of every rotary embedding in use.
        config: static.
        attention: a function of the signature of `kernels.reference.ragged_paged_attention`.
        dtype: of matmul operands and the cache.
        axis_name: mesh axis that the weights are sharded over, inside a shard_map.
    """

    inputs: ModelInputs
    angles: Mapping[RopeConfig, Angles]
    config: ModelConfig
    attention: Attention
    dtype: Any
    axis_name: str | None


type RunLayer = Callable[
    [Any, Float32[Array, "T M"], KVPages, int, StepContext],
    tuple[Float32[Array, "T M"], KVPages],
]


type Attend = RunLayer  # of a normed input; what it returns is added to the residual stream
type RunMlp = Callable[[Any, Float32[Array, "T M"], StepContext], Float32[Array, "T M"]]


def attend_pages(
    weights: AttentionParams,
    normed: Float32[Array, "T M"],
    kv_pages: KVPages,
    index: int,
    step: StepContext,
) -> tuple[Float32[Array, "T M"], KVPages]:
    """Project, rotate, attend in layer `index` and project back."""
    config, num_tokens = step.config, step.inputs.num_tokens
    num_rows, num_kv_heads = normed.shape[0], kv_cache.num_kv_heads(kv_pages)
    with jax.named_scope("qkv"):
        qkv = layers.linear(normed.astype(step.dtype), weights.qkv, num_tokens)
        qkv = layers.add_bias(qkv, weights.qkv_bias).reshape(num_rows, -1, config.head_dim)
        num_heads = qkv.shape[1] - 2 * num_kv_heads
        q, k, v = jnp.split(qkv, (num_heads, num_heads + num_kv_heads), axis=1)
        if weights.q_norm is not None:
            q = layers.head_norm(q, weights.q_norm, eps=config.norm_eps)
            k = layers.head_norm(k, weights.k_norm, eps=config.norm_eps)
    with jax.named_scope("rope"):
        rope = config.rope_of(index)
        q = apply_rope(q, step.angles[rope], is_interleaved=rope.is_interleaved)
        k = apply_rope(k, step.angles[rope], is_interleaved=rope.is_interleaved)
    with jax.named_scope("attention"):
        out, kv_pages = kv_cache.attend(
            step.attention,
            q.astype(step.dtype),
            k.astype(step.dtype),
            v.astype(step.dtype),
            kv_pages,
            step.inputs,
            layer=index,
            sm_scale=config.sm_scale,
            sliding_window=config.window_of(index),
            sinks=weights.sinks,
        )
    with jax.named_scope("attention_out"):
        return project_heads_out(out, weights.out, weights.out_bias, step), kv_pages


def project_heads_out(
    out: Float[Array, "T H D"], weight: Any, bias: Any, step: StepContext
) -> Float32[Array, "T M"]:
    """Project what the heads of every shard gave back to the residual stream."""
    out = out.reshape(out.shape[0], -1).astype(step.dtype)
    projected = layers.linear(out, weight, step.inputs.num_tokens)
    return layers.add_bias(layers.sum_over(projected, step.axis_name), bias)


def gated_mlp(
    weights: GatedMlpParams, normed: Float32[Array, "T M"], step: StepContext
) -> Float32[Array, "T M"]:
    """Return down(activation(gate) * up)."""
    num_tokens = step.inputs.num_tokens
    with jax.named_scope("gate_up"):
        gated = layers.gated_linear(
            normed.astype(step.dtype),
            weights.gate_up,
            weights.gate_up_bias,
            num_tokens,
            activation=step.config.activation,
        )
    with jax.named_scope("down"):
        down = layers.linear(gated.astype(step.dtype), weights.down, num_tokens)
        return layers.add_bias(layers.sum_over(down, step.axis_name), weights.down_bias)


def mlp(
    weights: MlpParams, normed: Float32[Array, "T M"], step: StepContext
) -> Float32[Array, "T M"]:
    """Return down(activation(up))."""
    num_tokens = step.inputs.num_tokens
    with jax.named_scope("up"):
        up = layers.linear(normed.astype(step.dtype), weights.up, num_tokens)
        up = layers.activate(layers.add_bias(up, weights.up_bias), step.config.activation)
    with jax.named_scope("down"):
        down = layers.linear(up.astype(step.dtype), weights.down, num_tokens)
        return layers.add_bias(layers.sum_over(down, step.axis_name), weights.down_bias)


def pre_norm_layer(
    layer: LayerParams,
    hidden: Float32[Array, "T M"],
    kv_pages: KVPages,
    index: int,
    step: StepContext,
    *,
    attend: Attend = attend_pages,
    run_mlp: RunMlp = gated_mlp,
) -> tuple[Float32[Array, "T M"], KVPages]:
    """Add attention, then an MLP, each of a normed input; outputs are normed if so stored."""
    eps = step.config.norm_eps
    normed = layers.rms_norm(hidden, layer.attention_norm, eps=eps)
    attended, kv_pages = attend(layer.attention, normed, kv_pages, index, step)
    if layer.attention_out_norm is not None:
        attended = layers.rms_norm(attended, layer.attention_out_norm, eps=eps)
    hidden += attended
    activated = run_mlp(layer.mlp, layers.rms_norm(hidden, layer.mlp_norm, eps=eps), step)
    if layer.mlp_out_norm is not None:
        activated = layers.rms_norm(activated, layer.mlp_out_norm, eps=eps)
    return hidden + activated, kv_pages


def forward(
    params: DecoderParams,
    kv_pages: KVPages,
    inputs: ModelInputs,
    config: ModelConfig,
    *,
    attention: Attention,
    axis_name: str | None = None,
    run_layer: RunLayer = pre_norm_layer,
    embedding_scale: float | None = None,
) -> tuple[Float32[Array, "T M"], KVPages]:
    """Run one step over all layers; write the step's keys and values into the pages.

    Args:
        params: weights, or one shard of them.
        kv_pages: pages [N, 2K, page, D] of each layer, or [L, N, 2K, page, D] where `attention`
            takes the `layer`; updated in place when donated.
        inputs: one step, padded to its bucket.
        config: static.
        attention: `kernels.reference.ragged_paged_attention` or a function of that signature.
        axis_name: mesh axis that the weights are sharded over, inside a shard_map.
        run_layer: the family's layer.
        embedding_scale: factor of the embeddings, rounded to their dtype; None for 1.

    Returns:
        hidden: residual stream before the final norm (`compute_logits` applies it).
        kv_pages: the updated pages.
    """
    dtype = params.embedding.dtype
    with jax.named_scope("embed"):
        hidden = layers.embed(params.embedding, inputs.token_ids, axis_name=axis_name)
        if embedding_scale is not None:
            hidden *= jnp.asarray(embedding_scale, dtype).astype(jnp.float32)
    with jax.named_scope("rope_angles"):
        angles = {
            rope: rope_angles(inputs.positions, rope, config.head_dim) for rope in config.ropes
        }
    step = StepContext(inputs, angles, config, attention, dtype, axis_name)
    for index, layer in enumerate(params.layers):
        with jax.named_scope(f"layer_{index}"):
            hidden, kv_pages = run_layer(layer, hidden, kv_pages, index, step)
    return hidden, kv_pages


def compute_logits(
    params: DecoderParams,
    hidden: Float32[Array, "R M"],
    num_rows: Int32[Array, " 1"],
    config: ModelConfig,
    *,
    axis_name: str | None = None,
) -> Float32[Array, "R V"]:
    """Apply the final norm and the output head to selected rows of `forward`'s hidden states.

    The first `num_rows` are in use; the logits of the others are finite junk.
    """
    with jax.named_scope("logits"):
        normed = layers.rms_norm(hidden, params.final_norm, eps=config.norm_eps)
        return project_to_vocab(params, normed, num_rows, config, axis_name=axis_name)


def project_to_vocab(
    params: DecoderParams,
    normed: Float32[Array, "R M"],
    num_rows: Int32[Array, " 1"],
    config: ModelConfig,
    *,
    axis_name: str | None = None,
) -> Float32[Array, "R V"]:
    """Apply the output head to rows that went through the final norm."""
    head = params.embedding if params.head is None else params.head
    logits = layers.linear(normed.astype(params.embedding.dtype), head, num_rows)
    if axis_name is not None:
        logits = lax.all_gather(logits, axis_name, axis=1, tiled=True)[:, : config.vocab_size]
    return layers.soft_cap(logits, config.final_logit_softcapping)
