"""Grouped matmul: equal to a loop over groups, row by row, at a cost of the groups in use."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.grouped_matmul import grouped_matmul, multiply_by_blocks, multiply_on_tpu

SIZES = {
    "few rows": [3, 0, 1, 8, 0, 9],
    "one group": [0, 0, 0, 40, 0, 0],
    "last group": [0, 0, 0, 0, 0, 5],
    "many rows": [100, 0, 33, 64, 1, 31],
    "none": [0] * 6,
}


def draw(sizes: list[int], *, num_padding: int, dtype: str = "float32") -> tuple[np.ndarray, ...]:
    """Rows of x with NaN past the last group, weights [G, 24, 40], group sizes."""
    rng = np.random.default_rng(0)
    num_rows = sum(sizes)
    x = np.full((num_rows + num_padding, 40), np.nan, np.float32)
    x[:num_rows] = rng.standard_normal((num_rows, 40))
    weights = rng.standard_normal((len(sizes), 24, 40)).astype(np.float32)
    return jnp.asarray(x, dtype), jnp.asarray(weights, dtype), jnp.asarray(sizes, jnp.int32)


def oracle(x: np.ndarray, weights: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    out = np.zeros((x.shape[0], weights.shape[1]))
    start = 0
    for weight, size in zip(np.asarray(weights, np.float64), sizes, strict=True):
        out[start : start + size] = np.asarray(x[start : start + size], np.float64) @ weight.T
        start += size
    return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_equals_a_loop_over_groups_and_is_zero_past_them(sizes: list[int], dtype: str) -> None:
    inputs = draw(sizes, num_padding=11, dtype=dtype)
    out = np.asarray(jax.jit(grouped_matmul)(*inputs))
    np.testing.assert_allclose(out, oracle(*inputs), atol=1e-4)
    assert not out[sum(sizes) :].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_row_bits_do_not_depend_on_the_other_rows(dtype: str) -> None:
    """Few and many rows take blocks of 8 and 32."""
    x, weights, sizes = draw([100, 0, 133, 64, 1, 31], num_padding=0, dtype=dtype)
    multiply = jax.jit(grouped_matmul)
    whole = np.asarray(multiply(x, weights, sizes))
    for first, count in ((0, 1), (99, 1), (100, 9), (233, 40), (297, 32)):
        part = np.arange(first, first + count)
        groups = np.searchsorted(np.cumsum(sizes), part, side="right")
        part_sizes = jnp.asarray(np.bincount(groups, minlength=6), jnp.int32)
        rows = jnp.pad(x[first : first + count], ((0, 7), (0, 0)))
        out = np.asarray(multiply(rows, weights, part_sizes))
        np.testing.assert_array_equal(out[:count], whole[first : first + count])


def test_on_cpu_work_follows_the_groups_in_use() -> None:
    """Both loops have trip counts that are data; the body multiplies one block by one weight."""
    inputs = draw([3, 0, 1, 8, 0, 9], num_padding=11)
    text = jax.jit(grouped_matmul).lower(*inputs).as_text()
    dots = re.findall(r"dot_general.*-> tensor<(\d+)x(\d+)xf32>", text)
    assert dots == [("8", "24")]
    assert text.count("stablehlo.while") == 2


@pytest.mark.parametrize("sizes", [SIZES["few rows"], SIZES["many rows"]])
def test_the_tpu_kernel_computes_the_same(sizes: list[int]) -> None:
    x, weights, group_sizes = draw(sizes, num_padding=0, dtype="bfloat16")
    multiply = functools.partial(multiply_on_tpu, interpret=True)
    out = np.asarray(multiply(jnp.pad(x, ((0, 11), (0, 0))), weights, group_sizes))
    expected = multiply_by_blocks(x, weights, group_sizes)
    np.testing.assert_allclose(out[: sum(sizes)], expected, atol=1e-4)


def test_lowers_for_tpu_as_the_kernel() -> None:
    inputs = draw([3, 0, 1, 8, 0, 9], num_padding=11, dtype="bfloat16")
    exported = jax.export.export(jax.jit(grouped_matmul), platforms=["tpu"])(*inputs)
    assert "tpu_custom_call" in exported.mlir_module()


def test_operands_that_do_not_fit_are_refused() -> None:
    x, weights, sizes = draw([3, 0, 1, 8, 0, 9], num_padding=0)
    with pytest.raises(ValueError, match="one dtype"):
        grouped_matmul(x.astype(jnp.bfloat16), weights, sizes)
    with pytest.raises(ValueError, match="were expected"):
        grouped_matmul(x[:, 1:], weights, sizes)
    with pytest.raises(ValueError, match=r"i32 \[6\]"):
        grouped_matmul(x, weights, sizes[1:])
