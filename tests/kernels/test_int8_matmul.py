import dataclasses

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import int8_reference
from kernels.cpu import int8_matmul
from kernels.grouped_matmul import grouped_int8_matmul
from kernels.tpu import expert_matmul

SHAPES = [(576, 576), (960, 576), (576, 1536), (33, 10), (1, 64), (100, 90), (7, 3)]


on_every_instruction_set = pytest.mark.parametrize(
    "instruction_set", ["avx512_vnni", "avx512", "avx2", "generic"], indirect=True
)


def draw(num_tokens, num_inputs, num_outputs, dtype="bfloat16"):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((num_tokens, num_inputs)), dtype)
    weight = rng.standard_normal((num_outputs, num_inputs)) / num_inputs**0.5
    return x, weight.astype(np.float32)


def exact(x, weight):
    return np.asarray(x, np.float64) @ weight.astype(np.float64).T


def reference(x, weight, rotation=None):
    return int8_reference.int8_linear(x, int8_reference.quantize_weight(weight, rotation=rotation))


@on_every_instruction_set
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_equals_the_reference_bit_by_bit(num_outputs, num_inputs, dtype, instruction_set):
    x, weight = draw(13, num_inputs, num_outputs, dtype)
    packed = int8_matmul.pack(weight)
    out = int8_matmul.linear(x, packed, out_dtype=jnp.float32)
    np.testing.assert_array_equal(out, reference(x, weight))
    # A bf16 output is the f32 product rounded once.
    rounded = int8_matmul.linear(x, packed, out_dtype=jnp.bfloat16)
    np.testing.assert_array_equal(rounded, out.astype(jnp.bfloat16))


@pytest.mark.parametrize("num_inputs", [1, 6, 48, 576, 1536])
def test_the_reference_is_close_to_the_exact_product(num_inputs):
    x, weight = draw(16, num_inputs, 64, "float32")
    out = np.asarray(reference(x, weight), np.float64)
    expected = exact(x, weight)
    assert np.linalg.norm(out - expected) < 0.015 * np.linalg.norm(expected)


def test_a_rotation_spreads_an_outlier_so_that_it_takes_no_bits_from_the_others():
    x, weight = draw(16, 576, 64, "float32")
    x = x.at[:, 100].mul(100.0)
    weight[:, 100] /= 100.0
    expected = exact(x, weight)

    def error(rotation):
        return np.linalg.norm(np.asarray(reference(x, weight, rotation)) - expected)

    assert error(64) < error(1) / 4


@on_every_instruction_set
@pytest.mark.parametrize("num_outputs", [64, 1536, 20])
def test_fused_silu_equals_the_formula(num_outputs, instruction_set):
    x, weight = draw(9, 96, 2 * num_outputs)
    x = x * 8  # gates from far below to far above zero
    gate, up = np.split(np.asarray(reference(x, weight), np.float64), 2, axis=1)
    packed = int8_matmul.pack_gate_up(weight)
    out = int8_matmul.linear_silu(x, packed, out_dtype=jnp.float32)
    np.testing.assert_allclose(out, gate / (1 + np.exp(-gate)) * up, rtol=1e-5, atol=1e-5)


@on_every_instruction_set
@pytest.mark.parametrize("is_silu", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_only_the_rows_in_use_are_computed_and_their_bits_do_not_depend_on_the_count(
    is_silu, dtype, instruction_set
):
    x, weight = draw(40, 96, 192)
    pack = int8_matmul.pack_gate_up if is_silu else int8_matmul.pack
    function = int8_matmul.linear_silu if is_silu else int8_matmul.linear
    packed = pack(weight)
    whole = np.asarray(function(x, packed, out_dtype=dtype))
    counted = jax.jit(lambda x, n: function(x, packed, n, out_dtype=dtype))
    for count in (0, 1, 7, 12, 13, 25, 39, 40):
        out = counted(x.at[count:].set(jnp.nan), np.array([count], np.int32))
        np.testing.assert_array_equal(out[:count], whole[:count])
        np.testing.assert_array_equal(out[count:], np.zeros_like(whole[count:]))
    for begin, end in [(5, 6), (3, 10), (20, 33)]:
        part = function(x[begin:end], packed, out_dtype=dtype)
        np.testing.assert_array_equal(part, whole[begin:end])


def draw_experts(sizes, num_padding, dtype="bfloat16"):
    """Rows in order of their experts, NaN past the last; weights [E, 70, 96]; sizes."""
    x, weights = draw(sum(sizes) + num_padding, 96, 70 * len(sizes), dtype)
    x = x.at[sum(sizes) :].set(jnp.nan)
    return x, weights.reshape(len(sizes), 70, 96), jnp.asarray(sizes, jnp.int32)


def quantize_experts(weights):
    matrix = int8_reference.quantize_weight(weights.reshape(-1, weights.shape[2]))
    values = np.asarray(matrix.values).reshape(weights.shape)
    scales = np.asarray(matrix.scales).reshape(weights.shape[:2])
    return dataclasses.replace(matrix, values=values, scales=scales)


@on_every_instruction_set
@pytest.mark.parametrize("sizes", [[3, 0, 1, 25, 0, 2], [0, 0, 9, 0], [0, 0], [40]])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_each_row_is_multiplied_by_its_expert_and_rows_of_none_are_zeros(
    sizes, dtype, instruction_set
):
    x, weights, group_sizes = draw_experts(sizes, 5, dtype)
    multiply = jax.jit(int8_matmul.linear_of_experts)
    out = np.asarray(multiply(x, int8_matmul.pack_experts(weights), group_sizes))
    ends = np.cumsum(sizes)
    for end, size, weight in zip(ends, sizes, weights, strict=True):
        expected = reference(x, weight)[end - size : end]
        np.testing.assert_array_equal(out[end - size : end], expected)
    assert not out[ends[-1] :].any()


@pytest.mark.parametrize("sizes", [[3, 0, 1, 25, 0, 2], [0, 40, 0, 100], [0, 0]])
def test_every_way_to_multiply_by_experts_gives_the_same_bits(sizes):
    x, weights, group_sizes = draw_experts(sizes, 5)
    matrix = quantize_experts(weights)
    expected = int8_matmul.linear_of_experts(x, int8_matmul.pack_experts(weights), group_sizes)
    by_blocks = jax.jit(grouped_int8_matmul)(x, matrix, group_sizes)
    np.testing.assert_array_equal(by_blocks, expected)
    rows, row_scales = int8_reference.quantize_rows(x, rotation=matrix.rotation)
    on_tpu = expert_matmul.multiply_experts(
        rows, row_scales, jnp.asarray(matrix.values), matrix.scales, group_sizes, interpret=True
    )
    np.testing.assert_array_equal(on_tpu[: sum(sizes)], expected[: sum(sizes)])


def test_int8_experts_lower_for_tpu_as_the_kernel():
    x, weights, group_sizes = draw_experts([3, 0, 1], 5)
    multiply = jax.jit(grouped_int8_matmul)
    exported = jax.export.export(multiply, platforms=["tpu"])(
        x, quantize_experts(weights), group_sizes
    )
    assert "tpu_custom_call" in exported.mlir_module()


@pytest.mark.parametrize("sizes", [[30, 7], [-1, 3]])
def test_sizes_of_more_rows_than_there_are_fail_at_run_time(sizes):
    x, weights, _ = draw_experts([20, 16], 0)
    multiply = jax.jit(int8_matmul.linear_of_experts)
    with pytest.raises(jax.errors.JaxRuntimeError, match="num_rows must lie in"):
        multiply(x, int8_matmul.pack_experts(weights), jnp.asarray(sizes, jnp.int32))


def test_each_layer_of_a_stack_is_its_own_weight():
    x, first = draw(5, 96, 70)
    second = np.flip(first).copy()
    stack = jax.tree.map(
        lambda *parts: np.stack(parts), int8_matmul.pack(first), int8_matmul.pack(second)
    )
    for layer, weight in enumerate((first, second)):
        part = dataclasses.replace(stack, layer=layer)
        out = int8_matmul.linear(x, part, out_dtype=jnp.float32)
        np.testing.assert_array_equal(out, reference(x, weight))


@on_every_instruction_set
def test_the_largest_sums_are_exact(instruction_set):
    """Every product 127 * 127 or its negative: no instruction saturates, no i32 overflows."""
    num_inputs = int8_reference.MAX_INPUTS
    x = jnp.ones((3, num_inputs), jnp.float32).at[1].set(-1.0)
    weight = np.stack([np.ones(num_inputs), -np.ones(num_inputs)]).astype(np.float32)
    out = int8_matmul.linear(x, int8_matmul.pack(weight, rotation=1))
    np.testing.assert_array_equal(out, reference(x, weight, rotation=1))
    np.testing.assert_allclose(out, exact(x, weight), rtol=1e-6)


@on_every_instruction_set
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_spoils_itself_only(value, instruction_set):
    x, weight = draw(8, 64, 64)
    packed = int8_matmul.pack(weight)
    clean = np.array(int8_matmul.linear(x, packed), np.float32)
    out = np.asarray(int8_matmul.linear(x.at[3, 7].set(value), packed), np.float32)
    clean[3] = np.nan
    np.testing.assert_array_equal(out, clean)
    np.testing.assert_array_equal(reference(x.at[3, 7].set(value), weight)[3], clean[3])


@on_every_instruction_set
@pytest.mark.parametrize("scale", [0.0, 1e-38, 1e-33])
def test_rows_of_next_to_nothing_give_zeros(scale, instruction_set):
    x, weight = draw(4, 64, 64, "float32")
    out = np.asarray(int8_matmul.linear(x * scale, int8_matmul.pack(weight)))
    np.testing.assert_array_equal(out, np.zeros_like(out))
    zero_weight = int8_matmul.linear(x, int8_matmul.pack(weight * scale))
    np.testing.assert_allclose(zero_weight, np.zeros_like(out), atol=1e-29)


@pytest.mark.parametrize("count", [-1, 9])
def test_a_count_outside_the_rows_is_an_error_not_a_wild_write(count):
    x, weight = draw(8, 64, 96)
    packed = int8_matmul.pack(weight)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"num_rows must lie in \[0, 8\], got"):
        int8_matmul.linear(x, packed, np.array([count], np.int32)).block_until_ready()


def test_the_packed_weights_are_not_copied_by_a_program():
    x, weight = draw(8, 64, 96)
    packed = int8_matmul.pack(weight)
    compiled = jax.jit(lambda x, w: int8_matmul.linear(x, w)).lower(x, packed).compile()
    assert "copy(" not in compiled.as_text()


def test_misfits_are_refused():
    x, weight = draw(8, 64, 96)
    packed = int8_matmul.pack(weight)
    with pytest.raises(ValueError, match=r"of K = 64 inputs need x \[T, K\], got \(8, 32\)"):
        int8_matmul.linear(x[:, :32], packed)
    with pytest.raises(TypeError, match="x must be bfloat16 or float32, got int32"):
        int8_matmul.linear(x.astype(jnp.int32), packed)
    with pytest.raises(TypeError, match="the output must be bfloat16 or float32, got float16"):
        int8_matmul.linear(x, packed, out_dtype=jnp.float16)
    with pytest.raises(TypeError, match="num_rows must be int32, got float32"):
        int8_matmul.linear(x, packed, jnp.ones(1))
    with pytest.raises(ValueError, match=r"num_rows must be \[1\], got shape \(2,\)"):
        int8_matmul.linear(x, packed, jnp.ones(2, jnp.int32))
    with pytest.raises(ValueError, match=r"layer 1 of packed weights of shape \(3, 16, 32, 4\)"):
        int8_matmul.linear(x, dataclasses.replace(packed, layer=1))
    with pytest.raises(ValueError, match=r"a weight must be \[N, K\], got shape \(4,\)"):
        int8_matmul.pack(np.zeros(4, np.float32))
    with pytest.raises(ValueError, match="K must be at most 65536, got 65537"):
        int8_matmul.pack(np.zeros((1, 65537), np.float32))
    with pytest.raises(ValueError, match="gate and up must have as many outputs, got 5 in all"):
        int8_matmul.pack_gate_up(np.zeros((5, 4), np.float32))
    for rotation in (0, 3, 128):
        with pytest.raises(ValueError, match="power of two that divides K = 64, got"):
            int8_matmul.pack(weight, rotation=rotation)
