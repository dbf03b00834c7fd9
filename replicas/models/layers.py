"""Building blocks that the families share: projection, norm, embedding, gated MLP.

Pure functions on arrays of one shard. Invariant: the bits of a row depend on that row alone.
Weights are [N, K] (out, in) and rows are never fewer than 8, which is what makes XLA's CPU dots
independent of the number of rows; or they are packed for the native kernel, which always is.
Padding rows hold finite junk: `num_rows`, i32 [1], says how many rows are in use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from kernels import int8_reference
from kernels.cpu import int8_matmul, matmul
from kernels.cpu.int8_matmul import Int8GateUp, Int8Weight
from kernels.cpu.matmul import PackedGateUp, PackedWeight
from kernels.grouped_matmul import grouped_int8_matmul, grouped_matmul
from kernels.int8_reference import Int8Matrix
from replicas.config import Activation

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Int32


def linear(
    x: Float[Array, "T K"],
    weight: Float[Array, "N K"] | PackedWeight | Int8Weight | Int8Matrix,
    num_rows: Int32[Array, " 1"],
) -> Float32[Array, "T N"]:
    """Project rows by a weight stored [out, in], accumulating in f32.

    Every matmul of every family comes through here, `gated_linear` or `linear_of_experts`: a packed
    weight brings its own kernel, which computes the rows in use only. XLA computes them all.
    """
    if isinstance(weight, PackedWeight):
        return matmul.linear(x, weight, num_rows, out_dtype=jnp.float32)
    if isinstance(weight, Int8Weight):
        return int8_matmul.linear(x, weight, num_rows, out_dtype=jnp.float32)
    if isinstance(weight, Int8Matrix):
        return int8_reference.int8_linear(x, weight)
    return _dot(x, weight)


def linear_of_experts(
    x: Float[Array, "R K"],
    weight: Float[Array, "E N K"] | Int8Weight | Int8Matrix,
    group_sizes: Int32[Array, " E"],
) -> Float32[Array, "R N"]:
    """Project rows that are sorted by expert, each by its expert's weight, accumulating in f32.

    The first `group_sizes[0]` rows are of expert 0 and so on; rows past the last come out as zeros.
    """
    if isinstance(weight, Int8Weight):
        return int8_matmul.linear_of_experts(x, weight, group_sizes)
    if isinstance(weight, Int8Matrix):
        return grouped_int8_matmul(x, weight, group_sizes)
    return grouped_matmul(x, weight, group_sizes)


def _dot(x: Float[Array, "T K"], weight: Float[Array, "N K"]) -> Float32[Array, "T N"]:
    # f32 means f32: without a precision a TPU multiplies f32 operands in one bf16 pass.
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def rms_norm(
    x: Float[Array, "T M"], weight: Float32[Array, " M"], *, eps: float
) -> Float32[Array, "T M"]:
    """Scale each row to unit root mean square, in f32 (Zhang & Sennrich 2019)."""
    x = x.astype(jnp.float32)
    mean_square = row_sum(jnp.square(x))[:, None] / x.shape[1]
    return x * lax.rsqrt(mean_square + eps) * weight[None, :]


def layer_norm(
    x: Float32[Array, "T M"],
    weight: Float32[Array, " M"],
    bias: Float32[Array, " M"],
    *,
    eps: float,
) -> Float32[Array, "T M"]:
    """Shift and scale each row to zero mean and unit variance, in f32 (Ba et al. 2016)."""
    x = x.astype(jnp.float32)
    centred = x - row_sum(x)[:, None] / x.shape[1]
    return rms_norm(centred, weight, eps=eps) + bias[None, :]


def head_norm(
    x: Float32[Array, "T H D"], weight: Float32[Array, " D"], *, eps: float
) -> Float32[Array, "T H D"]:
    """Apply `rms_norm` to every head by itself."""
    return rms_norm(x.reshape(-1, x.shape[2]), weight, eps=eps).reshape(x.shape)


def row_sum(x: Float32[Array, "T K"]) -> Float32[Array, " T"]:
    """Sum each row, as a product with ones.

    On CPU, XLA sums rows in one order below 4,096 elements and in another from there on, so the
    bits of `jnp.sum` depend on the number of rows; those of a dot do not.
    """
    ones = jnp.ones((8, x.shape[1]), jnp.float32)
    # The barrier keeps what computes x out of the dot: jaxlib 0.12 fuses exp(x - max(x)) into it on
    # CPU and returns NaN. It can go when test_row_sums_of_exponentials passes without it.
    return _dot(lax.optimization_barrier(x), ones)[:, 0]


def embed(
    embedding: Float[Array, "V M"], token_ids: Int32[Array, " T"], *, axis_name: str | None = None
) -> Float32[Array, "T M"]:
    """Look the rows of `token_ids` up; with `axis_name` the vocabulary is sharded over it."""
    if axis_name is None:
        return embedding[token_ids].astype(jnp.float32)
    num_rows = embedding.shape[0]
    local_ids = token_ids - lax.axis_index(axis_name) * num_rows
    is_local = (local_ids >= 0) & (local_ids < num_rows)
    rows = embedding[jnp.where(is_local, local_ids, 0)].astype(jnp.float32)
    # One shard holds the row, the others add zero: the sum is exact.
    return lax.psum(jnp.where(is_local[:, None], rows, 0.0), axis_name)


def sum_over(x: Array, axis_name: str | None) -> Array:
    """Add partial results over a mesh axis; the identity on a single shard."""
    return x if axis_name is None else lax.psum(x, axis_name)


def add_bias(x: Float32[Array, "T N"], bias: Float[Array, " N"] | None) -> Float32[Array, "T N"]:
    """Add an optional bias in f32."""
    return x if bias is None else x + bias.astype(jnp.float32)[None, :]


def gated_linear(
    x: Float[Array, "T K"],
    gate_up: Float[Array, "2F K"]
    | PackedWeight
    | PackedGateUp
    | Int8Weight
    | Int8GateUp
    | Int8Matrix,
    bias: Float[Array, " 2F"] | None,
    num_rows: Int32[Array, " 1"],
    *,
    activation: Activation = "silu",
) -> Float32[Array, "T F"]:
    """Return activation(gate) * up of a fused projection (Shazeer 2020).

    By one kernel where it was packed so, which only weights for "silu" are.
    """
    if isinstance(gate_up, PackedGateUp):
        assert activation == "silu"
        return matmul.linear_silu(x, gate_up, num_rows, out_dtype=jnp.float32)
    if isinstance(gate_up, Int8GateUp):
        assert activation == "silu"
        return int8_matmul.linear_silu(x, gate_up, num_rows, out_dtype=jnp.float32)
    gate, up = jnp.split(add_bias(linear(x, gate_up, num_rows), bias), 2, axis=-1)
    return activate(gate, activation) * up


def activate(x: Float32[Array, "T F"], activation: Activation) -> Float32[Array, "T F"]:
    """Apply the MLP's nonlinearity."""
    match activation:
        case "silu":
            return jax.nn.silu(x)
        case "gelu":
            return jax.nn.gelu(x, approximate=False)
        case "gelu_tanh":
            return jax.nn.gelu(x, approximate=True)
        case "relu":
            return jax.nn.relu(x)


def soft_cap(x: Float32[Array, "T N"], cap: float | None) -> Float32[Array, "T N"]:
    """Squash into (-cap, cap); the identity without a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)
