"""Int8 matmul in plain jnp: rows are rotated and quantised as they come, weights were before.

Owns the recipe: what the native kernel must compute, bit by bit, and what serves where there is
none. A row is multiplied by a Hadamard matrix, which spreads an outlier over many inputs, and
scaled so that its largest magnitude becomes 127; so are the weights of an output, once. The sum of
products is an exact i32, so a row's bits depend on nothing but the row.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

MAX_INPUTS = 1 << 16
"""Inputs up to which an i32 holds any sum: 255 * 127 * 2^16 < 2^31."""

_MAX = 127
_CACHED_FLOATS = 1 << 17
_LEAST = np.float32(1e-30)
"""A row of smaller magnitudes is a row of zeros: 127 divided by them would overflow."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Int8Matrix:
    """A quantised weight [N, K] in plain order, or one for each of E experts.

    Attributes:
        values: int8 [N, K] or [E, N, K], in [-127, 127].
        scales: f32 [N] or [E, N]; values * scales is the weight, rotated and divided by `rotation`.
        rotation: size of the Hadamard matrix, a power of two that divides K; 1 for none.
    """

    values: jax.Array | np.ndarray
    scales: jax.Array | np.ndarray
    rotation: int = dataclasses.field(metadata={"static": True})


def largest_rotation(num_inputs: int) -> int:
    """Return the largest power of two that divides K, for which there is a Hadamard matrix."""
    return num_inputs & -num_inputs


def quantize_weight(weight: jax.Array | np.ndarray, *, rotation: int | None = None) -> Int8Matrix:
    """Rotate and quantise a weight [N, K] of any float dtype on the host.

    Args:
        weight: finite; K at most 2^16.
        rotation: see `Int8Matrix`; None for the largest.

    Raises:
        ValueError: the weight is no matrix, K is too large, or the rotation does not fit it.
    """
    if weight.ndim != 2 or 0 in weight.shape:
        raise ValueError(f"a weight must be [N, K], got shape {weight.shape}")
    num_inputs = weight.shape[1]
    if num_inputs > MAX_INPUTS:
        raise ValueError(f"K must be at most {MAX_INPUTS}, got {num_inputs}")
    largest_size = largest_rotation(num_inputs)
    rotation = largest_size if rotation is None else rotation
    if not 1 <= rotation <= largest_size or rotation & (rotation - 1):
        raise ValueError(
            f"rotation must be a power of two that divides K = {num_inputs}, got {rotation}"
        )
    weight = np.asarray(weight)
    values = np.empty(weight.shape, np.int8)
    scales = np.empty(weight.shape[0], np.float32)
    # Few rows at a time stay in a core's cache over the stages of the rotation.
    step = max(1, _CACHED_FLOATS // num_inputs)
    for begin in range(0, weight.shape[0], step):
        rows = np.array(weight[begin : begin + step], np.float32)
        _rotate_in_place(rows, rotation)
        # The transform is applied to x and here, each time without its factor b^-1/2.
        rows *= np.float32(1 / rotation)
        largest = np.maximum(rows.max(axis=1), -rows.min(axis=1))
        scale = np.where(largest < _LEAST, np.float32(1), largest / _MAX)
        scales[begin : begin + step] = scale
        rows /= scale[:, None]
        values[begin : begin + step] = np.rint(rows, out=rows)
    return Int8Matrix(values, scales, rotation)


def quantize_rows(x: jax.Array, *, rotation: int) -> tuple[jax.Array, jax.Array]:
    """Rotate and quantise rows [T, K]; return int8 [T, K] and f32 scales [T]."""
    x = _rotate(x.astype(jnp.float32), rotation)
    largest = jnp.max(jnp.abs(x), axis=1)
    is_zero = largest < _LEAST
    # A row with a NaN or an infinity becomes a row of NaN.
    scale = jnp.where(jnp.isfinite(largest), largest * np.float32(1 / _MAX), jnp.nan)
    inverse = jnp.where(is_zero | ~jnp.isfinite(largest), 0.0, _MAX / largest)
    values = jnp.where(jnp.isfinite(x), jnp.round(x * inverse[:, None]), 0.0)
    return values.astype(jnp.int8), jnp.where(is_zero, 0.0, scale)


def int8_linear(x: jax.Array, weight: Int8Matrix) -> jax.Array:
    """Return x @ weight.T as f32 [T, N]; x is bf16 or f32 [T, K]."""
    rows, row_scales = quantize_rows(x, rotation=weight.rotation)
    sums = lax.dot_general(
        rows, weight.values, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32
    )
    return sums.astype(jnp.float32) * row_scales[:, None] * weight.scales[None, :]


def _rotate(x: jax.Array, rotation: int) -> jax.Array:
    """Multiply x, seen as [T, b, K / b], by the Hadamard matrix along b, without its factor."""
    num_rows, num_inputs = x.shape
    run = num_inputs // rotation
    while run < num_inputs:
        pairs = x.reshape(num_rows, -1, 2, run)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        x = jnp.stack([first + second, first - second], axis=2).reshape(num_rows, num_inputs)
        run *= 2
    return x


def _rotate_in_place(x: np.ndarray, rotation: int) -> None:
    num_rows, num_inputs = x.shape
    run = num_inputs // rotation
    while run < num_inputs:
        pairs = x.reshape(num_rows, -1, 2, run)
        difference = pairs[:, :, 0] - pairs[:, :, 1]
        pairs[:, :, 0] += pairs[:, :, 1]
        pairs[:, :, 1] = difference
        run *= 2
