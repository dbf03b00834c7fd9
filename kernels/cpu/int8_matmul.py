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

from kernels import host_memory
from kernels.cpu import library
from kernels.cpu.operands import check_operands
from kernels.cpu.output_groups import GROUP, group_outputs
from kernels.int8_reference import quantize_weight

if TYPE_CHECKING:
    from jax.typing import DTypeLike

_OFFSET = 128  # stored bytes are unsigned: the weight plus this


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Int8Weight:
    """A weight [N, K] in the order in which `linear` reads it.

    Attributes:
        groups: u8 [ceil(N / 32), ceil(K / 4), 32, 4] or [L, ...]: the weight plus 128. Of experts:
            [E, ...].
        scales: f32 [ceil(N / 32), 32] or [L, ...], zeros past N.
        num_outputs: N.
        num_inputs: K.
        rotation: size of the Hadamard matrix that inputs are multiplied by.
        layer: which of L layers this is; None for a weight by itself, or for a whole stack.
    """

    groups: jax.Array | np.ndarray
    scales: jax.Array | np.ndarray
    num_outputs: int = dataclasses.field(metadata={"static": True})
    num_inputs: int = dataclasses.field(metadata={"static": True})
    rotation: int = dataclasses.field(metadata={"static": True})
    layer: int | None = dataclasses.field(default=None, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Int8GateUp:
    """The gate and up weights [F, K] of a gated MLP, in the order `linear_silu` reads them.

    Attributes:
        groups: u8 [ceil(F / 16), ceil(K / 4), 32, 4] or [L, ...]; the 32 are 16 gates, 16 ups.
        scales: f32 [ceil(F / 16), 32] or [L, ...], zeros past F.
        num_outputs: F.
        num_inputs: K.
        rotation: size of the Hadamard matrix that inputs are multiplied by.
        layer: as in `Int8Weight`.
    """

    groups: jax.Array | np.ndarray
    scales: jax.Array | np.ndarray
    num_outputs: int = dataclasses.field(metadata={"static": True})
    num_inputs: int = dataclasses.field(metadata={"static": True})
    rotation: int = dataclasses.field(metadata={"static": True})
    layer: int | None = dataclasses.field(default=None, metadata={"static": True})


def pack(weight: jax.Array | np.ndarray, *, rotation: int | None = None) -> Int8Weight:
    """Quantise and pack a weight [N, K] on the host.

    Args:
        weight: any float dtype.
        rotation: size of the Hadamard matrix, a power of two that divides K; 1 for none, None for
            the largest.

    Raises:
        ValueError: the weight is no matrix, K exceeds 2^16, or the rotation does not fit it.
    """
    matrix = quantize_weight(weight, rotation=rotation)
    num_outputs, num_inputs = matrix.values.shape
    values, scales = np.asarray(matrix.values), np.asarray(matrix.scales)
    groups, packed_scales = _arrange(values[None], scales[None])
    return Int8Weight(groups, packed_scales, num_outputs, num_inputs, matrix.rotation)


def pack_experts(weights: jax.Array | np.ndarray, *, rotation: int | None = None) -> Int8Weight:
    """Quantise and pack the weights [E, N, K] of experts on the host, for `linear_of_experts`.

    Raises:
        ValueError: as for `pack`.
    """
    first = pack(weights[0], rotation=rotation)
    groups = host_memory.empty((weights.shape[0], *first.groups.shape), np.uint8)
    scales = np.empty((weights.shape[0], *first.scales.shape), np.float32)
    for index, weight in enumerate(np.asarray(weights)):
        expert = pack(weight, rotation=rotation)
        groups[index], scales[index] = expert.groups, expert.scales
    return dataclasses.replace(first, groups=groups, scales=scales)


def pack_gate_up(weight: jax.Array | np.ndarray, *, rotation: int | None = None) -> Int8GateUp:
    """Quantise and pack a weight [2F, K] of F gates before F ups, on the host.

    Raises:
        ValueError: as for `pack`, or its outputs are odd in number.
    """
    matrix = quantize_weight(weight, rotation=rotation)
    num_outputs, num_inputs = matrix.values.shape
    if num_outputs % 2:
        raise ValueError(f"gate and up must have as many outputs, got {num_outputs} in all")
    width = num_outputs // 2
    groups, scales = _arrange(
        np.asarray(matrix.values).reshape(2, width, num_inputs),
        np.asarray(matrix.scales).reshape(2, width),
    )
    return Int8GateUp(groups, scales, width, num_inputs, matrix.rotation)


def linear(
    x: jax.Array,
    weight: Int8Weight,
    num_rows: jax.Array | None = None,
    *,
    out_dtype: DTypeLike | None = None,
) -> jax.Array:
    """Return x @ weight.T, [T, N].

    Args:
        x: bf16 or f32 [T, K].
        weight: as packed by `pack`.
        num_rows: i32 [1] in [0, T], the first rows of x that are in use; None for all. The others
            are not read, and come out as zeros.
        out_dtype: bf16 or f32; None for x's.

    Raises:
        ValueError: a shape does not fit.
        TypeError: a dtype is not supported.
        kernels.cpu.library.NativeUnavailable: the kernels cannot be built here.
        jax.errors.JaxRuntimeError: at run time, `num_rows` outside [0, T].
    """
    return _call(x, weight, num_rows, out_dtype=out_dtype, is_silu=False)


def linear_silu(
    x: jax.Array,
    weight: Int8GateUp,
    num_rows: jax.Array | None = None,
    *,
    out_dtype: DTypeLike | None = None,
) -> jax.Array:
    """Return silu(x @ gate.T) * (x @ up.T), [T, F]; SiLU and the product are f32.

    Arguments and errors as for `linear`.
    """
    return _call(x, weight, num_rows, out_dtype=out_dtype, is_silu=True)


def linear_of_experts(x: jax.Array, weight: Int8Weight, group_sizes: jax.Array) -> jax.Array:
    """Return x[r] @ weight[e].T for every row r of expert e, f32 [R, N].

    Args:
        x: bf16 or f32 [R, K], rows in order of their experts. Rows past the last expert's are not
            read, and come out as zeros.
        weight: as packed by `pack_experts`.
        group_sizes: i32 [E], rows of each expert.

    Raises:
        ValueError: a shape does not fit.
        TypeError: a dtype is not supported.
        kernels.cpu.library.NativeUnavailable: the kernels cannot be built here.
        jax.errors.JaxRuntimeError: at run time, sizes that are negative or exceed R in sum.
    """
    num_experts = weight.groups.shape[0]
    if group_sizes.shape != (num_experts,) or group_sizes.dtype != jnp.int32:
        raise ValueError(
            f"group_sizes must be i32 [{num_experts}], got {group_sizes.dtype} {group_sizes.shape}"
        )
    check_operands(  # of one expert; experts lie as layers do
        x, weight.groups, None, num_inputs=weight.num_inputs, layer=0, out_dtype=jnp.float32
    )
    library.load()
    result = jax.ShapeDtypeStruct((x.shape[0], weight.num_outputs), jnp.float32)
    return jax.ffi.ffi_call("systole_int8_experts", result)(
        x, weight.groups, weight.scales, group_sizes, rotation=np.int64(weight.rotation)
    )


def _arrange(values: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Order int8 [B, n, K], which it overwrites, and f32 [B, n] as groups of 32 / B from each.

    Returns:
        u8 [ceil(B * n / 32), ceil(K / 4), 32, 4] and f32 [ceil(B * n / 32), 32].
    """
    stored = values.view(np.uint8)
    stored ^= np.uint8(_OFFSET)  # modulo 256, flipping the sign bit adds 128
    groups = group_outputs(stored, dtype=stored.dtype, fill=_OFFSET)
    packed_scales = group_outputs(scales[..., None], dtype=scales.dtype, fill=0)
    return groups, packed_scales.reshape(-1, GROUP)


def _call(
    x: jax.Array,
    weight: Int8Weight | Int8GateUp,
    num_rows: jax.Array | None,
    *,
    out_dtype: DTypeLike | None,
    is_silu: bool,
) -> jax.Array:
    num_rows, dtype = check_operands(
        x,
        weight.groups,
        num_rows,
        num_inputs=weight.num_inputs,
        layer=weight.layer,
        out_dtype=out_dtype,
    )
    library.load()
    result = jax.ShapeDtypeStruct((x.shape[0], weight.num_outputs), dtype)
    return jax.ffi.ffi_call("systole_int8_linear", result)(
        x,
        weight.groups,
        weight.scales,
        num_rows,
        layer=np.int64(weight.layer or 0),
        rotation=np.int64(weight.rotation),
        is_silu=is_silu,
    )
