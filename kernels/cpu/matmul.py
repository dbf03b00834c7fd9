"""Matmul of few rows by bf16 weights that were packed once, at load.

Owns the packed layout and the traced wrappers of the C++ kernel. An output is one f32 sum over K
in order: its bits are the same for any number of rows, 1 included, where XLA's dot needs 8.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from kernels.cpu import library

_GROUP = 32  # outputs whose weights lie together; as kGroup in src/matmul.h
_FLOATS = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))


def pack(weight: np.ndarray) -> np.ndarray:
    """Pack a weight [N, K] into bf16 [ceil(N / 32), K / 2, 32, 2], zeros past N.

    Raises:
        ValueError: the weight is no matrix, or K is odd.
    """
    num_outputs, num_inputs = _check_weight(weight)
    padded = np.zeros((-(-num_outputs // _GROUP) * _GROUP, num_inputs), ml_dtypes.bfloat16)
    padded[:num_outputs] = weight
    groups = padded.reshape(-1, _GROUP, num_inputs // 2, 2)
    return np.ascontiguousarray(groups.swapaxes(1, 2))


def pack_gate_up(weight: np.ndarray) -> np.ndarray:
    """Pack [2F, K], gates before ups, for `linear_silu`: a group is 16 gates and their 16 ups.

    Raises:
        ValueError: the weight is no matrix, 2F is odd, or K is odd.
    """
    num_outputs, num_inputs = _check_weight(weight)
    if num_outputs % 2:
        raise ValueError(f"gate and up must have as many outputs, got {num_outputs} in all")
    half = _GROUP // 2
    width = num_outputs // 2
    padded = np.zeros((2, -(-width // half) * half, num_inputs), ml_dtypes.bfloat16)
    padded[:, :width] = np.asarray(weight).reshape(2, width, num_inputs)
    pairs = padded.reshape(2, -1, half, num_inputs).swapaxes(0, 1)
    return pack(pairs.reshape(-1, num_inputs))


def linear(
    x: jax.Array, packed: jax.Array, num_outputs: int, *, out_dtype: jnp.dtype | None = None
) -> jax.Array:
    """Return x @ weight.T, [T, N].

    Args:
        x: bf16 or f32 [T, K]; f32 is rounded to bf16 first.
        packed: `pack(weight)`.
        num_outputs: N, which the packed shape gives only rounded up.
        out_dtype: bf16 or f32; None for x's.

    Raises:
        ValueError: a shape does not fit.
        TypeError: a dtype is not supported.
        kernels.cpu.library.NativeUnavailable: the kernels cannot be built here.
    """
    if not 0 < num_outputs <= packed.shape[0] * _GROUP < num_outputs + _GROUP:
        raise ValueError(f"num_outputs {num_outputs} does not fit packed weights {packed.shape}")
    return _call(x, packed, num_outputs, out_dtype=out_dtype, is_silu=False)


def linear_silu(
    x: jax.Array, packed: jax.Array, num_outputs: int, *, out_dtype: jnp.dtype | None = None
) -> jax.Array:
    """Return silu(x @ gate.T) * (x @ up.T), [T, F], for `packed = pack_gate_up(...)`.

    SiLU and the product are f32. Arguments and errors as for `linear`; `num_outputs` is F.
    """
    half = _GROUP // 2
    if not 0 < num_outputs <= packed.shape[0] * half < num_outputs + half:
        raise ValueError(f"num_outputs {num_outputs} does not fit packed weights {packed.shape}")
    return _call(x, packed, num_outputs, out_dtype=out_dtype, is_silu=True)


def _call(
    x: jax.Array,
    packed: jax.Array,
    num_outputs: int,
    *,
    out_dtype: jnp.dtype | None,
    is_silu: bool,
) -> jax.Array:
    dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    for name, value in (("x", x.dtype), ("the output", dtype)):
        if value not in _FLOATS:
            raise TypeError(f"{name} must be bfloat16 or float32, got {value}")
    if packed.dtype != jnp.bfloat16:
        raise TypeError(f"packed weights must be bfloat16, got {packed.dtype}")
    if (
        x.ndim != 2
        or packed.ndim != 4
        or packed.shape != (packed.shape[0], x.shape[1] // 2, _GROUP, 2)
    ):
        raise ValueError(
            f"for x [T, K], packed weights [N / {_GROUP}, K / 2, {_GROUP}, 2] were expected, got "
            f"{x.shape} and {packed.shape}"
        )
    if x.shape[1] % 2:
        raise ValueError(f"K must be even, got {x.shape[1]}")
    library.load()
    result = jax.ShapeDtypeStruct((x.shape[0], num_outputs), dtype)
    return jax.ffi.ffi_call("systole_linear", result)(x, packed, is_silu=is_silu)


def _check_weight(weight: np.ndarray) -> tuple[int, int]:
    if weight.ndim != 2 or 0 in weight.shape:
        raise ValueError(f"a weight must be [N, K], got shape {weight.shape}")
    if weight.shape[1] % 2:
        raise ValueError(f"K must be even, got {weight.shape[1]}")
    return weight.shape[0], weight.shape[1]
