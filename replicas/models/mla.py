"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, 2.1): one row of cache a token.

A row is the latent that keys and values of all heads are projections of, then one rotated key part
for all heads. The up-projections are absorbed: queries are taken to the latent space and the
weighted latents out of it, so that a step never sees the keys of a head. Written for one shard:
projections are sharded by head, the cache by sequence (`data_parallel`). Invariant: as in
`decoder`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from replicas.config import ModelConfig
from replicas.models import layers
from replicas.models.data_parallel import OwnSequences
from replicas.models.decoder import StepContext, project_heads_out
from replicas.models.decoder_params import Packing, norm_spec
from replicas.models.derived_spec import ConvertedSpec
from replicas.models.kv_cache import KVPages
from replicas.models.param_spec import ParamSpec, Source
from replicas.models.rope import apply_rope
from replicas.models.sharding import round_up

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from jaxtyping import Array, Float, Float32

_LATENT_EPS = 1e-6
"""Of both latent norms: the reference leaves them at its default, whatever config.json says."""


class LatentAttentionParams(NamedTuple):
    """Weights of the block, [out, in]; None for those that the checkpoint has not.

    Attributes:
        down: [Q + R + P, M], to the query's latent (if there is one), the latent of keys and
            values, and the key part that is rotated.
        down_bias: [Q + R + P].
        q_norm: [Q] f32, of the query's latent.
        q: [H (N + P), Q], or [H (N + P), M] without a query latent.
        latent_norm: [R] f32.
        key: [H, R, N], from a head's query to the latent space.
        value: [H, V, R], from the latent space to a head's output.
        out: [M, H V].
        out_bias: [M].
    """

    down: Any
    down_bias: Any
    q_norm: Any
    q: Any
    latent_norm: Any
    key: Any
    value: Any
    out: Any
    out_bias: Any

    def packed(self, config: ModelConfig, packing: Packing) -> LatentAttentionParams:
        """See `PackableParams`."""
        del config
        pack = packing.linear
        return self._replace(down=pack(self.down), q=pack(self.q), out=pack(self.out))


def attend_latents(
    weights: LatentAttentionParams,
    normed: Float32[Array, "T M"],
    kv_pages: KVPages,
    index: int,
    step: StepContext,
    *,
    own: OwnSequences | None = None,
) -> tuple[Float32[Array, "T M"], KVPages]:
    """Project, rotate, attend over the latents of layer `index` and project back.

    With `own`, which a mesh needs, this device holds and attends over some sequences only.
    """
    config, num_tokens = step.config, step.inputs.num_tokens
    mla = config.mla
    assert mla is not None
    assert isinstance(kv_pages, tuple)
    num_rows = normed.shape[0]
    with jax.named_scope("down"):
        normed = normed.astype(step.dtype)
        down = layers.add_bias(layers.linear(normed, weights.down, num_tokens), weights.down_bias)
        split = down.shape[1] - mla.cache_dim
        q_latent, latent, k_rotated = jnp.split(down, (split, split + mla.kv_lora_rank), axis=1)
        latent = layers.rms_norm(latent, weights.latent_norm, eps=_LATENT_EPS)
    with jax.named_scope("q"):
        if weights.q_norm is not None:
            normed = layers.rms_norm(q_latent, weights.q_norm, eps=_LATENT_EPS).astype(step.dtype)
        q = layers.linear(normed, weights.q, num_tokens)
        q = q.reshape(num_rows, -1, mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        q_plain, q_rotated = jnp.split(q, (mla.qk_nope_head_dim,), axis=2)
    with jax.named_scope("rope"):
        angles, is_interleaved = step.angles[config.rope], config.rope.is_interleaved
        q_rotated = apply_rope(q_rotated, angles, is_interleaved=is_interleaved)
        k_rotated = apply_rope(k_rotated[:, None], angles, is_interleaved=is_interleaved)[:, 0]
    with jax.named_scope("attention"):
        q_latent = _project_heads(q_plain.astype(step.dtype), weights.key)
        q = jnp.concatenate([q_latent, q_rotated], axis=2).astype(step.dtype)
        latents = jnp.concatenate([latent, k_rotated], axis=1).astype(step.dtype)
        pages = kv_pages[index]

        def attend(q: Float[Array, "T H C"], latents: Float[Array, "T C"]) -> Float[Array, "T H R"]:
            nonlocal pages
            indices = step.inputs if own is None else own
            out, pages = step.attention(
                q,
                latents,
                pages,
                indices.kv_lens,
                indices.page_indices,
                indices.cu_q_lens,
                indices.num_seqs,
                sm_scale=config.sm_scale,
                num_value_dims=mla.kv_lora_rank,
            )
            return out

        out = attend(q, latents) if own is None else own.attend(attend, q, latents)
        kv_pages = (*kv_pages[:index], pages, *kv_pages[index + 1 :])
    with jax.named_scope("attention_out"):
        values = _project_heads(out, weights.value)
        return project_heads_out(values, weights.out, weights.out_bias, step), kv_pages


def latent_attention_specs(
    config: ModelConfig, prefix: str, *, num_shards: int
) -> LatentAttentionParams:
    """Describe the block whose tensor names begin with `prefix`."""
    mla = config.mla
    assert mla is not None
    num_heads, hidden_size = config.num_heads, config.hidden_size
    num_padding = round_up(num_heads, num_shards) - num_heads
    q_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    kv_dim = mla.qk_nope_head_dim + mla.v_head_dim
    has_q_latent = mla.q_lora_rank is not None
    down_sizes = {"q_a_proj": mla.q_lora_rank or 0, "kv_a_proj_with_mqa": mla.cache_dim}

    def down(suffix: str) -> ParamSpec:
        columns = () if suffix == "bias" else (hidden_size,)
        sources = tuple(
            Source(name=f"{prefix}.{name}.{suffix}", shape=(size, *columns))
            for name, size in down_sizes.items()
            if size
        )
        return ParamSpec(sources=sources, axes=("latent", "model")[: 1 + len(columns)])

    def of_heads(
        convert: Callable[[np.ndarray], np.ndarray], head_shape: tuple[int, int]
    ) -> ConvertedSpec:
        shape = (num_heads * kv_dim, mla.kv_lora_rank)
        return ConvertedSpec(
            sources=(Source(name=f"{prefix}.kv_b_proj.weight", shape=shape),),
            axes=("heads", "head_dim", "latent"),
            num_entries=num_heads,
            entry_shape=head_shape,
            convert=lambda rows: convert(rows[0]),
            num_padding=num_padding,
        )

    q_source = Source(
        name=f"{prefix}.{'q_b_proj' if has_q_latent else 'q_proj'}.weight",
        shape=(num_heads * q_dim, mla.q_lora_rank or hidden_size),
        num_padding_rows=num_padding * q_dim,
    )
    out_source = Source(
        name=f"{prefix}.o_proj.weight",
        shape=(hidden_size, num_heads * mla.v_head_dim),
        num_padding_columns=num_padding * mla.v_head_dim,
    )
    out_bias = ParamSpec(
        sources=(Source(name=f"{prefix}.o_proj.bias", shape=(hidden_size,)),), axes=("model",)
    )
    q_norm = norm_spec(f"{prefix}.q_a_layernorm.weight", mla.q_lora_rank or 0, axis="latent")
    split = mla.qk_nope_head_dim
    return LatentAttentionParams(
        down=down("weight"),
        down_bias=down("bias") if config.qkv_bias else None,
        q_norm=q_norm if has_q_latent else None,
        q=ParamSpec(sources=(q_source,), axes=("qkv_rows", "latent")),
        latent_norm=norm_spec(f"{prefix}.kv_a_layernorm.weight", mla.kv_lora_rank, axis="latent"),
        key=of_heads(lambda rows: rows[:split].T, (mla.kv_lora_rank, split)),
        value=of_heads(lambda rows: rows[split:], (mla.v_head_dim, mla.kv_lora_rank)),
        out=ParamSpec(sources=(out_source,), axes=("model", "attention_out")),
        out_bias=out_bias if config.attention_out_bias else None,
    )


def _project_heads(
    x: Float[Array, "T H K"], weight: Float[Array, "H N K"]
) -> Float32[Array, "T H N"]:
    """Project every head by a weight of its own, accumulating in f32."""
    out = lax.dot_general(
        x,
        weight,
        (((2,), (2,)), ((1,), (0,))),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return out.swapaxes(0, 1)
