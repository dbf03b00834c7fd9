"""How a model is laid out over a mesh: one table from logical axes to mesh axes.

Model code is written for one shard and reads its head counts from the shapes it is given; it names
the mesh axis only for its collectives. Invariant: strategy is this table, never a branch in a
layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from replicas.config import EngineConfig, ModelConfig
from replicas.models.param_spec import ParamSpec

if TYPE_CHECKING:
    from replicas.models.inputs import ModelInputs

TENSOR_AXIS = "tensor"

# Logical axis of a parameter or cache dimension -> mesh axis, or None where it is whole everywhere.
RULES: dict[str, str | None] = {
    "vocab": TENSOR_AXIS,
    "model": None,
    "qkv_rows": TENSOR_AXIS,
    "attention_out": TENSOR_AXIS,
    "gate_up_rows": TENSOR_AXIS,
    "ffn": TENSOR_AXIS,
    "expert": TENSOR_AXIS,
    "expert_ffn": None,
    "router": None,
    "heads": TENSOR_AXIS,
    "latent": None,
    "page": None,
    "own_page": TENSOR_AXIS,
    "kv_rows": TENSOR_AXIS,
    "head_dim": None,
}
# The first axes; tokens and elements of a head are whole, and a row's one scale has none of these.
KV_PAGES_AXES = ("page", "kv_rows")
LATENT_PAGES_AXES = ("own_page", "latent")


def make_mesh(config: EngineConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Build the mesh of one replica from the first `tensor_parallel` of the jax devices.

    Raises:
        ValueError: there are fewer devices than that.
    """
    available = jax.devices() if devices is None else devices
    if len(available) < config.tensor_parallel:
        raise ValueError(
            f"tensor_parallel is {config.tensor_parallel} but only {len(available)} devices are "
            "attached: lower it, or use a larger slice"
        )
    return Mesh(np.array(available[: config.tensor_parallel]), (TENSOR_AXIS,))


@dataclass(frozen=True, slots=True)
class ShardedHeads:
    """Attention heads over all shards: as many on each, and each query beside its KV head.

    Attributes:
        num_heads: query heads, those that only pad included; padding comes last.
        num_kv_heads: KV heads in the cache, copies and padding included.
        repeats: copies of each KV head.
    """

    num_heads: int
    num_kv_heads: int
    repeats: int


def shard_heads(num_heads: int, num_kv_heads: int, num_shards: int) -> ShardedHeads:
    """Divide heads evenly: KV heads are copied for queries on other shards, then both are padded.

    Heads are kept in blocks of b queries and their KV head, where b divides H / K: all H / K of
    them, or fewer if that needs no more KV heads. Padding heads are zeros and add nothing: 3 KV
    heads of 2 queries are, on 2 or 4 shards, 4 of 2, and on 8, 8 of 1.
    """
    group_size = num_heads // num_kv_heads

    def with_blocks_of(size: int) -> ShardedHeads:
        num_blocks = round_up(num_heads // size, num_shards)
        return ShardedHeads(num_blocks * size, num_blocks, group_size // size)

    sizes = [size for size in range(group_size, 0, -1) if group_size % size == 0]
    return min(
        (with_blocks_of(size) for size in sizes),
        key=lambda heads: (heads.num_kv_heads, heads.num_heads),
    )


def num_sharded_kv_heads(config: ModelConfig, num_shards: int) -> int:
    """Return the KV heads in the cache over all shards."""
    return shard_heads(config.num_heads, config.num_kv_heads, num_shards).num_kv_heads


def num_page_groups(config: ModelConfig, num_shards: int) -> int:
    """Return into how many groups pages are divided, each on a device of its own.

    Of latents, which have no heads: as many as devices. Otherwise every device holds a part of
    every page.
    """
    return num_shards if config.mla is not None else 1


def round_up(size: int, num_shards: int) -> int:
    """Return the next multiple of `num_shards`: what a padded dimension measures."""
    return -(-size // num_shards) * num_shards


def partition_spec(axes: Sequence[str]) -> PartitionSpec:
    """Translate logical axes into mesh axes.

    Raises:
        ValueError: two dimensions of one array map to the same mesh axis.
    """
    mesh_axes = [RULES[axis] for axis in axes]
    used = [axis for axis in mesh_axes if axis is not None]
    if len(used) != len(set(used)):
        raise ValueError(f"logical axes {tuple(axes)} map twice to one mesh axis: {mesh_axes}")
    return PartitionSpec(*mesh_axes)


def param_partition_specs(param_specs: Any) -> Any:
    """Return the PartitionSpec of every parameter; one that is given already stays."""
    return jax.tree.map(
        lambda spec: partition_spec(spec.axes) if isinstance(spec, ParamSpec) else spec,
        param_specs,
        is_leaf=lambda node: isinstance(node, ParamSpec | PartitionSpec),
    )


def param_shardings(param_specs: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Return the sharding of every parameter."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        param_partition_specs(param_specs),
        is_leaf=lambda node: isinstance(node, PartitionSpec),
    )


def kv_pages_sharding(mesh: Mesh, config: ModelConfig | None = None) -> NamedSharding:
    """Return the sharding of one layer's pages [N, 2K, page, ...]: whole KV heads per device.

    Pages of latents, which have no heads, lie whole on one device each.
    """
    return NamedSharding(mesh, _pages_spec(config))


def _pages_spec(config: ModelConfig | None) -> PartitionSpec:
    has_latents = config is not None and config.mla is not None
    return partition_spec(LATENT_PAGES_AXES if has_latents else KV_PAGES_AXES)


def shard_forward(forward: Callable[..., Any], mesh: Mesh, param_specs: Any) -> Callable[..., Any]:
    """Return `forward` with the same signature, run on every device of `mesh` on its shard.

    `param_specs` has a ParamSpec, or a PartitionSpec, for every array of the parameters. Hidden
    states come back whole. On a mesh of one device it is `forward` itself.
    """
    if mesh.size == 1:
        return forward

    def sharded(
        params: Any,
        kv_pages: tuple[jax.Array, ...],
        inputs: ModelInputs,
        config: ModelConfig,
        *,
        attention: Callable[..., Any],
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        pages = _pages_spec(config)
        return jax.shard_map(
            lambda p, kv, x: forward(p, kv, x, config, attention=attention, axis_name=TENSOR_AXIS),
            mesh=mesh,
            in_specs=(param_partition_specs(param_specs), pages, PartitionSpec()),
            out_specs=(PartitionSpec(), pages),
            # Native kernels are opaque calls: how their results vary over the mesh is not known.
            check_vma=False,
        )(params, kv_pages, inputs)

    return sharded


def shard_logits(
    compute_logits: Callable[..., Any], mesh: Mesh, param_specs: Any
) -> Callable[..., Any]:
    """Return `compute_logits` run on each device's part of the vocabulary; logits are whole."""
    if mesh.size == 1:
        return compute_logits

    def sharded(
        params: Any, hidden: jax.Array, num_rows: jax.Array, config: ModelConfig
    ) -> jax.Array:
        return jax.shard_map(
            lambda p, h, n: compute_logits(p, h, n, config, axis_name=TENSOR_AXIS),
            mesh=mesh,
            in_specs=(param_partition_specs(param_specs), PartitionSpec(), PartitionSpec()),
            out_specs=PartitionSpec(),
            check_vma=False,
        )(params, hidden, num_rows)

    return sharded
