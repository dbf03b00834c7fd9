"""Matmul of few rows by bf16 weights that were packed once, at load.

Owns the packed layout and the traced wrappers of the C++ kernel. An output is one f32 sum over K
in order: its bits are the same for any number of rows, 1 included, where XLA's dot needs 8. Time
follows the rows in use, which are data, and not the padded shape.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from kernels.cpu import library
from kernels.cpu.operands import check_operands
from kernels.cpu.output_groups import group_outputs

if TYPE_CHECKING:
    from jax.typing import DTypeLike

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [N, K] in the order in which `linear` reads it.

    Attributes:
        groups: bf16 [ceil(N / 32), K / 2, 32, 2], zeros past N; or of L layers, [L, ...].
        num_outputs: N.
        layer: which of L layers this is; None for a weight by itself, or for a whole stack.
    """

    groups: jax.Array | np.ndarray
    num_outputs: int = dataclasses.field(metadata={"static": True})
    layer: int | None = dataclasses.field(default=None, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class PackedGateUp:
    """The gate and up weights [F, K] of a gated MLP, in the order `linear_silu` reads them.

    Attributes:
        groups: bf16 [ceil(F / 16), K / 2, 32, 2], or [L, ...]; the 32 are 16 gates and their ups.
        num_outputs: F.
        layer: as in `PackedWeight`.
    """

    groups: jax.Array | np.ndarray
    num_outputs: int = dataclasses.field(metadata={"static": True})
    layer: int | None = dataclasses.field(default=None, metadata={"static": True})


def pack(weight: jax.Array | np.ndarray) -> PackedWeight:
    """Pack a weight [N, K], rounded to bf16 where it is not, on the host.

    Raises:
        ValueError: the weight is no matrix, or K is odd.
    """
    num_outputs, _ = _check_weight(weight)
    groups = group_outputs(np.asarray(weight)[None], dtype=_BFLOAT16, fill=0)
    return PackedWeight(groups, num_outputs)


def pack_gate_up(weight: jax.Array | np.ndarray) -> PackedGateUp:
    """Pack a weight [2F, K] of F gates before F ups.

    Raises:
        ValueError: the weight is no matrix, its outputs are odd in number, or K is odd.
    """
    num_outputs, num_inputs = _check_weight(weight)
    if num_outputs % 2:
        raise ValueError(f"gate and up must have as many outputs, got {num_outputs} in all")
    width = num_outputs // 2
    parts = np.asarray(weight).reshape(2, width, num_inputs)
    return PackedGateUp(group_outputs(parts, dtype=_BFLOAT16, fill=0), width)


def linear(
    x: jax.Array,
    weight: PackedWeight,
    num_rows: jax.Array | None = None,
    *,
    out_dtype: DTypeLike | None = None,
) -> jax.Array:
    """Return x @ weight.T, [T, N].

    Args:
        x: bf16 or f32 [T, K]; f32 is rounded to bf16 first.
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
    weight: PackedGateUp,
    num_rows: jax.Array | None = None,
    *,
    out_dtype: DTypeLike | None = None,
) -> jax.Array:
    """Return silu(x @ gate.T) * (x @ up.T), [T, F]; SiLU and the product are f32.

    Arguments and errors as for `linear`.
    """
    return _call(x, weight, num_rows, out_dtype=out_dtype, is_silu=True)


def _call(
    x: jax.Array,
    weight: PackedWeight | PackedGateUp,
    num_rows: jax.Array | None,
    *,
    out_dtype: DTypeLike | None,
    is_silu: bool,
) -> jax.Array:
    groups = weight.groups
    if groups.dtype != jnp.bfloat16:
        raise TypeError(f"packed weights must be bfloat16, got {groups.dtype}")
    num_rows, dtype = check_operands(
        x,
        groups,
        num_rows,
        num_inputs=2 * groups.shape[-3],
        layer=weight.layer,
        out_dtype=out_dtype,
    )
    library.load()
    result = jax.ShapeDtypeStruct((x.shape[0], weight.num_outputs), dtype)
    call = jax.ffi.ffi_call("systole_linear", result)
    return call(x, groups, num_rows, is_silu=is_silu, layer=weight.layer or 0)


def _check_weight(weight: jax.Array | np.ndarray) -> tuple[int, int]:
    if weight.ndim != 2 or 0 in weight.shape:
        raise ValueError(f"a weight must be [N, K], got shape {weight.shape}")
    if weight.shape[1] % 2:
        raise ValueError(f"K must be even, got {weight.shape[1]}")
    return weight.shape[0], weight.shape[1]
