"""Matmul of few rows by int8 weights that were quantised and packed once, at load.

Owns the packed layout and the traced wrappers of the C++ kernel; what it computes is that of
`kernels.int8_reference`, bit by bit. Rows are rotated and quantised inside the call. Time follows
the rows in use, which are data, and not the padded shape.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from kernels.cpu import library
from kernels.int8_reference import MAX_INPUTS, largest_rotation, quantize_weight

if TYPE_CHECKING:
    from jax.typing import DTypeLike

_GROUP = 32  # outputs whose weights lie together; as kInt8Group in src/int8_matmul.h
_WORD = 4  # inputs whose weights lie together
_OFFSET = 128  # stored bytes are unsigned: the weight plus this
_FLOATS = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Int8Weight:
    """Weights [N, K] of one or several layers, in the order in which `linear` reads them.

    Attributes:
        groups: u8 [L, ceil(N / 32), ceil(K / 4), 32, 4], each weight plus 128.
        scales: f32 [L, ceil(N / 32), 32], zeros past N.
        num_outputs: N.
        num_inputs: K.
        rotation: size of the Hadamard matrix that inputs are multiplied by.
    """

    groups: jax.Array | np.ndarray
    scales: jax.Array | np.ndarray
    num_outputs: int = dataclasses.field(metadata={"static": True})
    num_inputs: int = dataclasses.field(metadata={"static": True})
    rotation: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Int8GateUp:
    """The gate and up weights [F, K] of gated MLPs, in the order `linear_silu` reads them.

    Attributes:
        groups: u8 [L, ceil(F / 16), ceil(K / 4), 32, 4]; the 32 are 16 gates and their 16 ups.
        scales: f32 [L, ceil(F / 16), 32], zeros past F.
        num_outputs: F.
        num_inputs: K.
        rotation: size of the Hadamard matrix that inputs are multiplied by.
    """

    groups: jax.Array | np.ndarray
    scales: jax.Array | np.ndarray
    num_outputs: int = dataclasses.field(metadata={"static": True})
    num_inputs: int = dataclasses.field(metadata={"static": True})
    rotation: int = dataclasses.field(metadata={"static": True})


def pack(weight: jax.Array | np.ndarray, *, rotation: int | None = None) -> Int8Weight:
    """Quantise and pack a weight [N, K] on the host, as one layer.

    Args:
        weight: any float dtype.
        rotation: size of the Hadamard matrix, a power of two that divides K; 1 for none, None for
            the largest.

    Raises:
        ValueError: the weight is no matrix, K exceeds 2^16, or the rotation does not fit it.
    """
    num_outputs, num_inputs = _check_weight(weight)
    rotation = _check_rotation(rotation, num_inputs)
    values, scales = quantize_weight(weight, rotation=rotation)
    size = -(-num_outputs // _GROUP) * _GROUP
    groups, packed_scales = _arrange(values[None], scales[None], size)
    return Int8Weight(groups, packed_scales, num_outputs, num_inputs, rotation)


def pack_gate_up(weight: jax.Array | np.ndarray, *, rotation: int | None = None) -> Int8GateUp:
    """Quantise and pack a weight [2F, K] of F gates before F ups, as one layer.

    Raises:
        ValueError: as for `pack`, or its outputs are odd in number.
    """
    num_outputs, num_inputs = _check_weight(weight)
    if num_outputs % 2:
        raise ValueError(f"gate and up must have as many outputs, got {num_outputs} in all")
    rotation = _check_rotation(rotation, num_inputs)
    values, scales = quantize_weight(weight, rotation=rotation)
    half, width = _GROUP // 2, num_outputs // 2
    size = -(-width // half) * half
    groups, packed_scales = _arrange(
        values.reshape(2, width, num_inputs), scales.reshape(2, width), size
    )
    return Int8GateUp(groups, packed_scales, width, num_inputs, rotation)


def linear(
    x: jax.Array,
    weight: Int8Weight,
    num_rows: jax.Array | None = None,
    *,
    layer: int = 0,
    out_dtype: DTypeLike | None = None,
) -> jax.Array:
    """Return x @ weight.T, [T, N].

    Args:
        x: bf16 or f32 [T, K].
        weight: as packed by `pack`.
        num_rows: i32 [1] in [0, T], the first rows of x that are in use; None for all. The others
            are not read, and come out as zeros.
        layer: which of the weight's layers.
        out_dtype: bf16 or f32; None for x's.

    Raises:
        ValueError: a shape does not fit.
        TypeError: a dtype is not supported.
        kernels.cpu.library.NativeUnavailable: the kernels cannot be built here.
        jax.errors.JaxRuntimeError: at run time, `num_rows` outside [0, T].
    """
    return _call(x, weight, num_rows, layer=layer, out_dtype=out_dtype, is_silu=False)


def linear_silu(
    x: jax.Array,
    weight: Int8GateUp,
    num_rows: jax.Array | None = None,
    *,
    layer: int = 0,
    out_dtype: DTypeLike | None = None,
) -> jax.Array:
    """Return silu(x @ gate.T) * (x @ up.T), [T, F]; SiLU and the product are f32.

    Arguments and errors as for `linear`.
    """
    return _call(x, weight, num_rows, layer=layer, out_dtype=out_dtype, is_silu=True)


def _arrange(values: np.ndarray, scales: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Order int8 [B, n, K] and f32 [B, n], padded to `size` outputs, as groups of 32 / B from each.

    Returns:
        u8 [1, B * size / 32, ceil(K / 4), 32, 4] and f32 [1, B * size / 32, 32].
    """
    num_parts, num_outputs, num_inputs = values.shape
    num_words = -(-num_inputs // _WORD)
    part = _GROUP // num_parts
    padded = np.full((num_parts, size, num_words * _WORD), _OFFSET, np.uint8)
    # Modulo 256, flipping the sign bit adds 128.
    padded[:, :num_outputs, :num_inputs] = values.view(np.uint8) ^ np.uint8(_OFFSET)
    padded = padded.reshape(num_parts, -1, part, num_words, _WORD)
    groups = np.ascontiguousarray(padded.transpose(1, 3, 0, 2, 4))
    padded_scales = np.zeros((num_parts, size), np.float32)
    padded_scales[:, :num_outputs] = scales
    packed_scales = padded_scales.reshape(num_parts, -1, part).swapaxes(0, 1)
    return (
        groups.reshape(1, -1, num_words, _GROUP, _WORD),
        np.ascontiguousarray(packed_scales).reshape(1, -1, _GROUP),
    )


def _call(
    x: jax.Array,
    weight: Int8Weight | Int8GateUp,
    num_rows: jax.Array | None,
    *,
    layer: int,
    out_dtype: DTypeLike | None,
    is_silu: bool,
) -> jax.Array:
    dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    for name, value in (("x", x.dtype), ("the output", dtype)):
        if value not in _FLOATS:
            raise TypeError(f"{name} must be bfloat16 or float32, got {value}")
    if x.ndim != 2 or x.shape[1] != weight.num_inputs:
        raise ValueError(
            f"packed weights of K = {weight.num_inputs} inputs need x [T, K], got {x.shape}"
        )
    if not 0 <= layer < weight.groups.shape[0]:
        raise ValueError(f"layer must lie in [0, {weight.groups.shape[0]}), got {layer}")
    if num_rows is None:
        num_rows = jnp.full(1, x.shape[0], jnp.int32)
    if num_rows.dtype != jnp.int32:
        raise TypeError(f"num_rows must be int32, got {num_rows.dtype}")
    if num_rows.shape != (1,):
        raise ValueError(f"num_rows must be [1], got shape {num_rows.shape}")
    library.load()
    result = jax.ShapeDtypeStruct((x.shape[0], weight.num_outputs), dtype)
    return jax.ffi.ffi_call("systole_int8_linear", result)(
        x,
        weight.groups,
        weight.scales,
        num_rows,
        layer=np.int64(layer),
        rotation=np.int64(weight.rotation),
        is_silu=is_silu,
    )


def _check_weight(weight: jax.Array | np.ndarray) -> tuple[int, int]:
    if weight.ndim != 2 or 0 in weight.shape:
        raise ValueError(f"a weight must be [N, K], got shape {weight.shape}")
    if weight.shape[1] > MAX_INPUTS:
        raise ValueError(f"K must be at most {MAX_INPUTS}, got {weight.shape[1]}")
    return weight.shape[0], weight.shape[1]


def _check_rotation(rotation: int | None, num_inputs: int) -> int:
    largest = largest_rotation(num_inputs)
    if rotation is None:
        return largest
    if not 1 <= rotation <= largest or rotation & (rotation - 1):
        raise ValueError(
            f"rotation must be a power of two that divides K = {num_inputs}, got {rotation}"
        )
    return rotation
