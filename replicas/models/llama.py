"""The Llama family (Llama 2 and 3, SmolLM2, Mistral): pre-norm, rotary, grouped-query, SwiGLU.

Pure functions over a tree of weights, written for one shard: head counts come from the shapes.
Layers are unrolled, since a scan copies each layer's weights and pages. Invariant: the residual
stream, norms, rotations and all accumulation are f32; only matmul operands and the cache have the
weights' dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from replicas.config import ModelConfig
from replicas.models import kv_cache, layers
from replicas.models.inputs import ModelInputs
from replicas.models.kv_cache import Attention, KVPages
from replicas.models.param_spec import ParamSpec, Source
from replicas.models.sharding import num_sharded_kv_heads

if TYPE_CHECKING:
    from jaxtyping import Array, Float32, Int32


class LayerParams(NamedTuple):
    """Weights of one layer, [out, in]; biases are None where the checkpoint has none.

    Attributes:
        attention_norm: [M] f32.
        qkv: [(H + 2K) D, M], rows of q, k, v (of each shard in turn).
        qkv_bias: [(H + 2K) D].
        attention_out: [M, H D].
        attention_out_bias: [M].
        mlp_norm: [M] f32.
        gate_up: [2F, M], rows of gate, up (of each shard in turn).
        gate_up_bias: [2F].
        down: [M, F].
        down_bias: [M].
    """

    attention_norm: Any
    qkv: Any
    qkv_bias: Any
    attention_out: Any
    attention_out_bias: Any
    mlp_norm: Any
    gate_up: Any
    gate_up_bias: Any
    down: Any
    down_bias: Any


class LlamaParams(NamedTuple):
    """Weights of the model.

    Attributes:
        embedding: [V, M].
        layers: one entry per layer; a tuple, or a `LayerStack` of packed weights.
        final_norm: [M] f32.
        head: [V, M], or None when tied to the embedding.
    """

    embedding: Any
    layers: Iterable[LayerParams]
    final_norm: Any
    head: Any


def param_specs(config: ModelConfig, *, num_shards: int = 1) -> LlamaParams:
    """Describe every parameter: shape, logical axes and the checkpoint tensors it is fused from.

    Raises:
        ValueError: the model does not divide over `num_shards`.
    """
    vocab_shape = (config.vocab_size, config.hidden_size)
    vocab_axes = ("vocab", "model")
    head = None
    if not config.tie_word_embeddings:
        head = _spec(vocab_axes, Source(name="lm_head.weight", shape=vocab_shape))
    return LlamaParams(
        embedding=_spec(vocab_axes, Source(name="model.embed_tokens.weight", shape=vocab_shape)),
        layers=tuple(
            _layer_specs(config, f"model.layers.{i}", num_shards) for i in range(config.num_layers)
        ),
        final_norm=_norm_spec(config, "model.norm.weight"),
        head=head,
    )


def prepare_params(
    params: LlamaParams,
    pack: Callable[[Array], Any],
    pack_gate_up: Callable[[Array], Any] | None = None,
    stack: Callable[[Iterable[LayerParams]], Iterable[LayerParams]] = tuple,
) -> LlamaParams:
    """Return the weights with every matmul operand replaced by `pack(weight)`.

    The hook for layouts that a platform's kernels want: `layers.linear` receives what `pack`
    returned, `layers.gated_linear` what `pack_gate_up` did (used where there is no bias). `stack`
    takes the layers one by one, as they are packed. A tied head becomes a packed copy of its own,
    since the lookup needs plain rows.
    """

    def pack_layer(layer: LayerParams) -> LayerParams:
        pack_fused = (
            pack if pack_gate_up is None or layer.gate_up_bias is not None else pack_gate_up
        )
        return layer._replace(
            qkv=pack(layer.qkv),
            attention_out=pack(layer.attention_out),
            gate_up=pack_fused(layer.gate_up),
            down=pack(layer.down),
        )

    head = pack(params.embedding if params.head is None else params.head)
    return params._replace(layers=stack(pack_layer(layer) for layer in params.layers), head=head)


def forward(
    params: LlamaParams,
    kv_pages: KVPages,
    inputs: ModelInputs,
    config: ModelConfig,
    *,
    attention: Attention,
    axis_name: str | None = None,
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

    Returns:
        hidden: residual stream before the final norm (`compute_logits` applies it).
        kv_pages: the updated pages.
    """
    dtype = params.embedding.dtype
    with jax.named_scope("embed"):
        hidden = layers.embed(params.embedding, inputs.token_ids, axis_name=axis_name)
    with jax.named_scope("rope_angles"):
        angles = layers.rope_angles(inputs.positions, config.rope, config.head_dim)

    for index, layer in enumerate(params.layers):
        with jax.named_scope(f"layer_{index}"):
            attended, kv_pages = _attend(
                layer,
                hidden,
                kv_pages,
                index,
                angles,
                inputs,
                config,
                attention=attention,
                dtype=dtype,
            )
            hidden += layers.add_bias(
                layers.sum_over(attended, axis_name), layer.attention_out_bias
            )
            activated = _feed_forward(layer, hidden, inputs, config, dtype=dtype)
            hidden += layers.add_bias(layers.sum_over(activated, axis_name), layer.down_bias)
    return hidden, kv_pages


def compute_logits(
    params: LlamaParams,
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
        normed = layers.rms_norm(hidden, params.final_norm, eps=config.rms_norm_eps)
        head = params.embedding if params.head is None else params.head
        logits = layers.linear(normed.astype(params.embedding.dtype), head, num_rows)
        if axis_name is not None:
            logits = lax.all_gather(logits, axis_name, axis=1, tiled=True)
        return logits


def _attend(
    layer: LayerParams,
    hidden: Float32[Array, "T M"],
    kv_pages: KVPages,
    index: int,
    angles: tuple[Array, Array],
    inputs: ModelInputs,
    config: ModelConfig,
    *,
    attention: Attention,
    dtype: jnp.dtype,
) -> tuple[Float32[Array, "T M"], KVPages]:
    """Project, rotate, attend and project back; the result is partial over the tensor axis."""
    num_kv_heads = kv_cache.num_kv_heads(kv_pages)
    with jax.named_scope("qkv"):
        normed = layers.rms_norm(hidden, layer.attention_norm, eps=config.rms_norm_eps)
        qkv = layers.linear(normed.astype(dtype), layer.qkv, inputs.num_tokens)
        qkv = layers.add_bias(qkv, layer.qkv_bias)
        qkv = qkv.reshape(hidden.shape[0], -1, config.head_dim)
        num_heads = qkv.shape[1] - 2 * num_kv_heads
        q, k, v = jnp.split(qkv, (num_heads, num_heads + num_kv_heads), axis=1)
    with jax.named_scope("rope"):
        q = layers.apply_rope(q, angles)
        k = layers.apply_rope(k, angles)
    with jax.named_scope("attention"):
        out, kv_pages = kv_cache.attend(
            attention,
            q.astype(dtype),
            k.astype(dtype),
            v.astype(dtype),
            kv_pages,
            inputs,
            layer=index,
            sm_scale=config.head_dim**-0.5,
            sliding_window=config.sliding_window,
        )
    with jax.named_scope("attention_out"):
        out = out.reshape(hidden.shape[0], -1).astype(dtype)
        return layers.linear(out, layer.attention_out, inputs.num_tokens), kv_pages


def _feed_forward(
    layer: LayerParams,
    hidden: Float32[Array, "T M"],
    inputs: ModelInputs,
    config: ModelConfig,
    *,
    dtype: jnp.dtype,
) -> Float32[Array, "T M"]:
    """Gated MLP; the result is partial over the tensor axis."""
    with jax.named_scope("gate_up"):
        normed = layers.rms_norm(hidden, layer.mlp_norm, eps=config.rms_norm_eps)
        normed = normed.astype(dtype)
        gated = layers.gated_linear(normed, layer.gate_up, layer.gate_up_bias, inputs.num_tokens)
    with jax.named_scope("down"):
        return layers.linear(gated.astype(dtype), layer.down, inputs.num_tokens)


def _layer_specs(config: ModelConfig, prefix: str, num_shards: int) -> LayerParams:
    hidden_size, ffn_size = config.hidden_size, config.intermediate_size
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    repeats = num_sharded_kv_heads(config, num_shards) // config.num_kv_heads

    def fused_qkv(suffix: str, columns: tuple[int, ...]) -> ParamSpec:
        name = f"{prefix}.self_attn.{{}}_proj.{suffix}"
        kv = {"shape": (kv_size, *columns), "num_heads": config.num_kv_heads, "repeats": repeats}
        return ParamSpec(
            sources=(
                Source(name=name.format("q"), shape=(q_size, *columns)),
                Source(name=name.format("k"), **kv),
                Source(name=name.format("v"), **kv),
            ),
            axes=("qkv_rows", "model")[: 1 + len(columns)],
            num_shards=num_shards,
        )

    def fused_gate_up(suffix: str, columns: tuple[int, ...]) -> ParamSpec:
        shape = (ffn_size, *columns)
        return ParamSpec(
            sources=(
                Source(name=f"{prefix}.mlp.gate_proj.{suffix}", shape=shape),
                Source(name=f"{prefix}.mlp.up_proj.{suffix}", shape=shape),
            ),
            axes=("gate_up_rows", "model")[: 1 + len(columns)],
            num_shards=num_shards,
        )

    def output(name: str, axis: str, columns: int) -> ParamSpec:
        source = Source(name=f"{prefix}.{name}.weight", shape=(hidden_size, columns))
        return _spec(("model", axis), source)

    def output_bias(name: str) -> ParamSpec:
        return _spec(("model",), Source(name=f"{prefix}.{name}.bias", shape=(hidden_size,)))

    return LayerParams(
        attention_norm=_norm_spec(config, f"{prefix}.input_layernorm.weight"),
        qkv=fused_qkv("weight", (hidden_size,)),
        qkv_bias=fused_qkv("bias", ()) if config.attention_bias else None,
        attention_out=output("self_attn.o_proj", "attention_out", q_size),
        attention_out_bias=output_bias("self_attn.o_proj") if config.attention_bias else None,
        mlp_norm=_norm_spec(config, f"{prefix}.post_attention_layernorm.weight"),
        gate_up=fused_gate_up("weight", (hidden_size,)),
        gate_up_bias=fused_gate_up("bias", ()) if config.mlp_bias else None,
        down=output("mlp.down_proj", "ffn", ffn_size),
        down_bias=output_bias("mlp.down_proj") if config.mlp_bias else None,
    )


def _norm_spec(config: ModelConfig, name: str) -> ParamSpec:
    source = Source(name=name, shape=(config.hidden_size,))
    return ParamSpec(sources=(source,), axes=("model",), is_float32=True)


def _spec(axes: tuple[str, ...], source: Source) -> ParamSpec:
    return ParamSpec(sources=(source,), axes=axes)
