"""Matmul of rows sorted by group, each group by a weight of its own: the experts of an MoE layer.

Cost grows with the groups that have rows, not with all groups: XLA's own `ragged_dot` multiplies
every row by every group's weight on CPU (66 ms where this takes 1 to 6, 64 rows and 32 groups of
512 x 512). Float weights, or int8 ones by the recipe of `int8_reference`. Invariant: the bits of a
row depend on that row and its group's weight alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

from kernels.int8_reference import Int8Matrix, quantize_rows
from kernels.tpu.expert_matmul import multiply_experts

if TYPE_CHECKING:
    from jax.typing import DTypeLike

_FEW_ROWS, _MANY_ROWS = 8, 32  # of a block on CPU; XLA's dots are row-invariant from 8 rows on
_TPU_ROWS = 128
_TPU_TILE_BYTES = 4 << 20  # of a weight tile in VMEM, of which there are two


def grouped_matmul(x: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Return x[r] @ weights[g].T for every row r of group g, accumulated in f32.

    The kernel follows the platform that the program is lowered for.

    Args:
        x: [R, K], rows in order of their groups; those past the last group may hold anything.
        weights: [G, N, K], dtype of x.
        group_sizes: i32 [G], rows of each group; their sum is at most R.

    Returns:
        f32 [R, N]; zero past the last group.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    if x.ndim != 2 or weights.ndim != 3 or x.shape[1] != weights.shape[2]:
        raise ValueError(
            f"x [R, K] and weights [G, N, K] were expected: {x.shape}, {weights.shape}"
        )
    if x.dtype != weights.dtype:
        raise ValueError(f"x and weights must have one dtype, got {x.dtype} and {weights.dtype}")
    if group_sizes.shape != weights.shape[:1] or group_sizes.dtype != jnp.int32:
        raise ValueError(
            f"group_sizes must be i32 [{weights.shape[0]}], got {group_sizes.dtype} "
            f"{group_sizes.shape}"
        )
    out = lax.platform_dependent(
        x, weights, group_sizes, cpu=multiply_by_blocks, tpu=multiply_on_tpu, default=_ragged_dot
    )
    in_use = jnp.arange(x.shape[0])[:, None] < jnp.sum(group_sizes)
    return jnp.where(in_use, out, 0.0)


def grouped_int8_matmul(x: jax.Array, weight: Int8Matrix, group_sizes: jax.Array) -> jax.Array:
    """Return x[r] @ weight[g].T for every row r of group g; rows are quantised as they come.

    Args:
        x: bf16 or f32 [R, K], rows in order of their groups; those past the last group may hold
            anything.
        weight: of values [G, N, K] and scales [G, N].
        group_sizes: i32 [G], rows of each group; their sum is at most R.

    Returns:
        f32 [R, N]; zero past the last group. The bits of `int8_reference.int8_linear` for each row.
    """
    rows, row_scales = quantize_rows(x, rotation=weight.rotation)
    out = lax.platform_dependent(
        rows,
        row_scales,
        jnp.asarray(weight.values),
        jnp.asarray(weight.scales),
        group_sizes,
        cpu=functools.partial(_scale_sums, multiply_by_blocks),
        tpu=multiply_experts,
        default=functools.partial(_scale_sums, _ragged_dot),
    )
    in_use = jnp.arange(x.shape[0])[:, None] < jnp.sum(group_sizes)
    return jnp.where(in_use, out, 0.0)


def _scale_sums(
    multiply: Callable[..., jax.Array],
    rows: jax.Array,
    row_scales: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    group_sizes: jax.Array,
) -> jax.Array:
    sums = multiply(rows, values, group_sizes).astype(jnp.float32)
    groups = jnp.repeat(jnp.arange(values.shape[0]), group_sizes, total_repeat_length=rows.shape[0])
    return sums * row_scales[:, None] * scales[groups]


def multiply_by_blocks(x: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """The CPU's way: over the groups that have rows, over blocks of a fixed number of rows.

    A group's weight is copied once. The last block of a group runs into the rows of the next one,
    whose own blocks come later and write them again.
    """
    num_rows, num_groups = x.shape[0], weights.shape[0]
    block_rows = _FEW_ROWS if num_rows <= _FEW_ROWS * num_groups else _MANY_ROWS
    starts = jnp.cumsum(group_sizes) - group_sizes
    active = jnp.argsort(group_sizes == 0, stable=True)
    padded = jnp.pad(x, ((0, block_rows), (0, 0)))

    def multiply_group(index: jax.Array, out: jax.Array) -> jax.Array:
        group = active[index]
        weight = lax.dynamic_index_in_dim(weights, group, keepdims=False)

        def multiply_block(block: jax.Array, out: jax.Array) -> jax.Array:
            start = starts[group] + block * block_rows
            rows = lax.dynamic_slice_in_dim(padded, start, block_rows)
            return lax.dynamic_update_slice_in_dim(out, _dot(rows, weight), start, axis=0)

        return lax.fori_loop(0, -(-group_sizes[group] // block_rows), multiply_block, out)

    out = jnp.zeros((num_rows + block_rows, weights.shape[1]), _sum_dtype(x))
    return lax.fori_loop(0, jnp.sum(group_sizes > 0), multiply_group, out)[:num_rows]


def multiply_on_tpu(
    x: jax.Array, weights: jax.Array, group_sizes: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """The TPU's way: jax's megablox kernel, which visits (tile of rows, group) pairs in use.

    A tile spans all of K, so that a weight tile stays in VMEM over the row tiles of its group and
    the order of sums is one for all shapes. Rows past the last group come out uninitialised.
    """
    if x.dtype != jnp.bfloat16:
        return _ragged_dot(x, weights, group_sizes)
    num_rows, num_inputs = x.shape
    tile_rows = min(_TPU_ROWS, -(-num_rows // 16) * 16)
    columns = _TPU_TILE_BYTES // (num_inputs * x.dtype.itemsize) // 128 * 128
    columns = min(max(columns, 128), -(-weights.shape[1] // 128) * 128)
    padded = jnp.pad(x, ((0, -num_rows % tile_rows), (0, 0)))
    out = gmm(
        padded,
        weights,
        group_sizes,
        jnp.float32,
        (tile_rows, num_inputs, columns),
        transpose_rhs=True,
        interpret=interpret,
    )
    return out[:num_rows]


def _ragged_dot(x: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    dimensions = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    return lax.ragged_dot_general(
        x,
        weights,
        group_sizes,
        dimensions,
        precision=_precision(x),
        preferred_element_type=_sum_dtype(x),
    )


def _dot(rows: jax.Array, weight: jax.Array) -> jax.Array:
    return lax.dot_general(
        rows,
        weight,
        (((1,), (1,)), ((), ())),
        precision=_precision(rows),
        preferred_element_type=_sum_dtype(rows),
    )


def _sum_dtype(x: jax.Array) -> DTypeLike:
    return jnp.int32 if x.dtype == jnp.int8 else jnp.float32


def _precision(x: jax.Array) -> lax.Precision | None:
    # f32 means f32: without a precision a TPU multiplies f32 operands in one bf16 pass.
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
