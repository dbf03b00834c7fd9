"""How a model is laid out over a mesh: one table from logical axes to mesh axes.

Model code is written for one shard and reads its head counts from the shapes it is given; it names
the mesh axis only for its collectives. Invariant: strategy is this table, never a branch in a
layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    "page": None,
    "kv_rows": TENSOR_AXIS,
    "token": None,
    "head_dim": None,
}
KV_PAGES_AXES = ("page", "kv_rows", "token", "head_dim")


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


def num_sharded_kv_heads(config: ModelConfig, num_shards: int) -> int:
    """Return the KV heads in the cache over all shards: replicated when fewer than the shards.

    Raises:
        ValueError: a dimension does not divide over the shards; names it.
    """
    for name in ("num_heads", "intermediate_size", "vocab_size"):
        if getattr(config, name) % num_shards:
            raise ValueError(
                f"tensor_parallel = {num_shards} does not divide {name} = {getattr(config, name)}"
            )
    num_heads = config.num_kv_heads
    if num_heads % num_shards and num_shards % num_heads:
        raise ValueError(
            f"tensor_parallel = {num_shards} and num_kv_heads = {num_heads}: one must divide "
            "the other"
        )
    return max(num_heads, num_shards)


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


def kv_pages_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of one layer's pages [N, 2K, page, D]: whole KV heads per device."""
    return NamedSharding(mesh, partition_spec(KV_PAGES_AXES))


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
        pages = partition_spec(KV_PAGES_AXES)
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
