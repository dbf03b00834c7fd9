"""Rows sorted by expert times int8 expert weights, on a TPU: exact sums, scaled as they are made.

jax's megablox kernel takes floats only. This one visits the same pairs of row tile and expert in
use (its `make_group_metadata`), so cost follows the experts that have rows.

| operand | shape | block |
|---|---|---|
| rows | int8 [R, K] | [tile_rows, K] |
| row scales | f32 [R, 1] | [tile_rows, 1] |
| weights | int8 [E, N, K] | [columns, K] of one expert |
| weight scales | f32 [E, 1, N] | [1, columns] of one expert |
| output | f32 [R, N] | [tile_rows, columns] |

The grid is (tiles of columns, pairs in use). A pair's block of weights stays in VMEM over the row
tiles of its expert. A row tile that two experts share is visited by both, one after the other: each
stores its own rows. E.g. sizes (3, 0, 40) and tiles of 32 rows are three pairs: rows 0-31 by expert
0, which stores 3; rows 0-31 by expert 2, which stores 29; rows 32-63 by expert 2, which stores 11.
VMEM: two weight blocks of at most 4 MiB, two of rows (128 K bytes) and of outputs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.megablox.gmm import make_group_metadata

_LANES = 128
_ROW_MULTIPLE = 32  # rows of an int8 tile
_MAX_TILE_ROWS = 128
_WEIGHT_BLOCK_BYTES = 4 << 20


def multiply_experts(
    rows: jax.Array,
    row_scales: jax.Array,
    weights: jax.Array,
    weight_scales: jax.Array,
    group_sizes: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Return the product of each row with the weight of its expert, scaled by both.

    Args:
        rows: int8 [R, K], in order of their experts; K at most 2^16, so that an i32 holds a sum.
        row_scales: f32 [R].
        weights: int8 [E, N, K].
        weight_scales: f32 [E, N].
        group_sizes: i32 [E], rows of each expert; their sum is at most R.
        interpret: run the kernel in plain JAX.

    Returns:
        f32 [R, N]; undefined past the last expert's rows.
    """
    num_rows, num_inputs = rows.shape
    num_experts, num_outputs, _ = weights.shape
    tile_rows = min(_MAX_TILE_ROWS, _round_up(num_rows, _ROW_MULTIPLE))
    columns = _WEIGHT_BLOCK_BYTES // num_inputs // _LANES * _LANES
    columns = min(max(columns, _LANES), _round_up(num_outputs, _LANES))
    padding = -num_rows % tile_rows
    rows = jnp.pad(rows, ((0, padding), (0, 0)))
    row_scales = jnp.pad(row_scales, (0, padding))
    (starts, experts, row_tiles), num_pairs = make_group_metadata(
        group_sizes=group_sizes,
        m=rows.shape[0],
        tm=tile_rows,
        start_group=jnp.int32(0),
        num_nonzero_groups=num_experts,
        visit_empty_groups=False,
    )

    def multiply(
        starts: Any,
        experts: Any,
        row_tiles: Any,
        rows: Any,
        row_scales: Any,
        weights: Any,
        weight_scales: Any,
        out: Any,
    ) -> None:
        pair = pl.program_id(1)
        sums = lax.dot_general(
            rows[...], weights[...], (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32
        )
        scaled = sums.astype(jnp.float32) * row_scales[...] * weight_scales[...]
        row = lax.broadcasted_iota(jnp.int32, scaled.shape, 0) + row_tiles[pair] * tile_rows
        expert = experts[pair]
        is_own = (row >= starts[expert]) & (row < starts[expert + 1])
        out[...] = jnp.where(is_own, scaled, out[...])

    by_row = pl.BlockSpec((tile_rows, num_inputs), lambda n, p, s, e, t: (t[p], 0))
    by_row_scale = pl.BlockSpec((tile_rows, 1), lambda n, p, s, e, t: (t[p], 0))
    by_expert = pl.BlockSpec((None, columns, num_inputs), lambda n, p, s, e, t: (e[p], n, 0))
    by_expert_scale = pl.BlockSpec((None, 1, columns), lambda n, p, s, e, t: (e[p], 0, n))
    return pl.pallas_call(
        multiply,
        out_shape=jax.ShapeDtypeStruct((rows.shape[0], num_outputs), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(num_outputs, columns), num_pairs),
            in_specs=[by_row, by_row_scale, by_expert, by_expert_scale],
            out_specs=pl.BlockSpec((tile_rows, columns), lambda n, p, s, e, t: (t[p], n)),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
    )(starts, experts, row_tiles, rows, row_scales[:, None], weights, weight_scales[:, None])[
        :num_rows
    ]


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
