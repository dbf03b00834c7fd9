"""What the packed matmuls, bf16 and int8, ask of their operands when a program is traced."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jax.typing import DTypeLike

_FLOATS = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))
_LAYER_NDIM = 4
"""Dimensions of one layer's packed weights; a stack of layers has one more."""


def check_operands(
    x: jax.Array,
    groups: jax.Array | np.ndarray,
    num_rows: jax.Array | None,
    *,
    num_inputs: int,
    layer: int | None,
    out_dtype: DTypeLike | None,
) -> tuple[jax.Array, jnp.dtype]:
    """Check the operands of a packed matmul and fill in what may be left out.

    Args:
        x: bf16 or f32 [T, K].
        groups: packed weights of one layer, or [L, ...] with `layer`.
        num_rows: i32 [1], rows in use; None for all.
        num_inputs: K of the weights.
        layer: which of L layers; None for weights by themselves.
        out_dtype: bf16 or f32; None for x's.

    Returns:
        The number of rows in use, i32 [1], and the output's dtype.

    Raises:
        ValueError: a shape or the layer does not fit.
        TypeError: a dtype is not supported.
    """
    dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    for name, value in (("x", x.dtype), ("the output", dtype)):
        if value not in _FLOATS:
            raise TypeError(f"{name} must be bfloat16 or float32, got {value}")
    num_layers = groups.shape[0] if groups.ndim == _LAYER_NDIM + 1 else None
    if layer not in ([None] if num_layers is None else range(num_layers)):
        raise ValueError(f"layer {layer} of packed weights of shape {groups.shape}")
    if x.ndim != 2 or x.shape[1] != num_inputs:
        raise ValueError(f"packed weights of K = {num_inputs} inputs need x [T, K], got {x.shape}")
    if num_rows is None:
        num_rows = jnp.full(1, x.shape[0], jnp.int32)
    if num_rows.dtype != jnp.int32:
        raise TypeError(f"num_rows must be int32, got {num_rows.dtype}")
    if num_rows.shape != (1,):
        raise ValueError(f"num_rows must be [1], got shape {num_rows.shape}")
    return num_rows, dtype
