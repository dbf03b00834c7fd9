import contextlib
import dataclasses
import os
import subprocess
import sys
import time
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kernels.cpu import int8_matmul, matmul

SHAPES = [(576, 576), (960, 576), (576, 1536), (32, 2), (33, 10), (1, 64), (100, 90)]


def draw(num_tokens, num_inputs, num_outputs, dtype="bfloat16"):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((num_tokens, num_inputs)), dtype)
    weight = jnp.asarray(
        rng.standard_normal((num_outputs, num_inputs)) / num_inputs**0.5, jnp.bfloat16
    )
    return x, np.asarray(weight)


def exact(x, weight):
    """The product in float64, of x at bf16 precision."""
    return np.asarray(x.astype(jnp.bfloat16), np.float64) @ weight.astype(np.float64).T


@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_equals_the_exact_product(num_outputs, num_inputs, dtype, instruction_set):
    x, weight = draw(13, num_inputs, num_outputs, dtype)
    packed = matmul.pack(weight)
    expected = exact(x, weight)
    out = matmul.linear(x, packed, out_dtype=jnp.float32)
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-5)
    # A bf16 output is the f32 sum rounded once.
    rounded = matmul.linear(x, packed, out_dtype=jnp.bfloat16)
    np.testing.assert_array_equal(rounded, out.astype(jnp.bfloat16))


@pytest.mark.parametrize("pack", [matmul.pack, matmul.pack_gate_up, int8_matmul.pack])
def test_a_packed_weight_is_used_where_it_lies(pack):
    groups = pack(np.ones((2048, 1024), ml_dtypes.bfloat16)).groups
    assert jax.device_put(groups).unsafe_buffer_pointer() == groups.ctypes.data


@pytest.mark.parametrize("pack", [matmul.pack, matmul.pack_gate_up])
def test_packing_takes_little_memory_beside_weight_and_result(pack):
    weight = np.ones((8192, 1024), ml_dtypes.bfloat16)
    tracemalloc.start()  # does not see the result, which is mapped
    try:
        packed = pack(weight)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert packed.groups.nbytes == weight.nbytes
    assert peak_bytes < weight.nbytes / 4


@pytest.mark.parametrize("num_outputs", [64, 1536, 20])
def test_fused_silu_equals_the_formula(num_outputs, instruction_set):
    x, weight = draw(9, 96, 2 * num_outputs)
    x = x * 8  # gates from far below to far above zero
    gate, up = np.split(exact(x, weight), 2, axis=1)
    out = matmul.linear_silu(x, matmul.pack_gate_up(weight), out_dtype=jnp.float32)
    np.testing.assert_allclose(out, gate / (1 + np.exp(-gate)) * up, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("is_silu", [False, True])
def test_row_bits_do_not_depend_on_the_number_of_rows(is_silu, instruction_set):
    x, weight = draw(64, 576, 192)
    pack = matmul.pack_gate_up if is_silu else matmul.pack
    function = matmul.linear_silu if is_silu else matmul.linear
    packed = pack(weight)
    whole = np.asarray(function(x, packed, out_dtype=jnp.float32))
    for begin, end in [(0, 1), (5, 6), (63, 64), (3, 10), (0, 8), (20, 33), (1, 64)]:
        part = function(x[begin:end], packed, out_dtype=jnp.float32)
        np.testing.assert_array_equal(part, whole[begin:end])


@pytest.mark.parametrize("is_silu", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_only_the_rows_in_use_are_computed_and_their_bits_do_not_depend_on_the_count(
    is_silu, dtype, instruction_set
):
    x, weight = draw(40, 96, 192)
    pack = matmul.pack_gate_up if is_silu else matmul.pack
    function = matmul.linear_silu if is_silu else matmul.linear
    packed = pack(weight)
    whole = np.asarray(function(x, packed, out_dtype=dtype))
    counted = jax.jit(lambda x, n: function(x, packed, n, out_dtype=dtype))
    for count in (0, 1, 7, 12, 13, 25, 39, 40):
        # The spare rows are not read, nor is what their memory held kept.
        out = counted(x.at[count:].set(jnp.nan), np.array([count], np.int32))
        np.testing.assert_array_equal(out[:count], whole[:count])
        np.testing.assert_array_equal(out[count:], np.zeros_like(whole[count:]))


def test_the_zeros_of_many_spare_rows_reach_the_end():
    x, weight = draw(64, 2, 1000)
    out = matmul.linear(x, matmul.pack(weight), np.array([1], np.int32), out_dtype=jnp.float32)
    assert np.asarray(out)[0].any()
    assert not np.asarray(out)[1:].any()


@pytest.mark.parametrize("count", [-1, 9])
def test_a_count_outside_the_rows_is_an_error_not_a_wild_write(count):
    x, weight = draw(8, 64, 96)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"num_rows must lie in \[0, 8\], got"):
        matmul.linear(x, matmul.pack(weight), np.array([count], np.int32)).block_until_ready()


def test_a_nan_row_spoils_itself_only():
    x, weight = draw(8, 64, 64)
    packed = matmul.pack(weight)
    clean = np.array(matmul.linear(x, packed))
    out = np.asarray(matmul.linear(x.at[3, 7].set(jnp.nan), packed))
    clean[3] = np.nan
    np.testing.assert_array_equal(out.astype(np.float32), clean.astype(np.float32))


def test_no_rows_give_no_rows():
    x, weight = draw(0, 64, 64)
    assert matmul.linear(x, matmul.pack(weight)).shape == (0, 64)


def test_the_packed_weights_are_not_copied_by_a_program():
    x, weight = draw(8, 64, 96)
    packed = matmul.pack(weight)
    compiled = jax.jit(lambda x, w: matmul.linear(x, w)).lower(x, packed).compile()
    assert "copy(" not in compiled.as_text()


def test_a_layer_of_a_stack_has_the_bits_of_its_own_weight_and_nothing_is_copied():
    x, _ = draw(8, 64, 96)
    weights = np.random.default_rng(1).standard_normal((3, 96, 64)).astype(ml_dtypes.bfloat16)
    alone = [matmul.pack(weight) for weight in weights]
    stack = matmul.PackedWeight(np.stack([weight.groups for weight in alone]), 96)

    def all_layers(x, stack):
        return [matmul.linear(x, dataclasses.replace(stack, layer=layer)) for layer in range(3)]

    compiled = jax.jit(all_layers).lower(x, stack).compile()
    assert "copy(" not in compiled.as_text()
    assert "slice(" not in compiled.as_text()
    for out, weight in zip(compiled(x, stack), alone, strict=True):
        np.testing.assert_array_equal(out, matmul.linear(x, weight))
    with pytest.raises(ValueError, match=r"layer 3 of packed weights of shape \(3, "):
        matmul.linear(x, dataclasses.replace(stack, layer=3))
    with pytest.raises(ValueError, match=r"layer None of packed weights of shape \(3, "):
        matmul.linear(x, stack)


def test_misfits_are_refused():
    x, weight = draw(8, 64, 96)
    packed = matmul.pack(weight)
    with pytest.raises(ValueError, match=r"of K = 64 inputs need x \[T, K\], got \(8, 32\)"):
        matmul.linear(x[:, :32], packed)
    with pytest.raises(ValueError, match=r"of K = 64 inputs need x \[T, K\], got \(8, 65\)"):
        matmul.linear(jnp.zeros((8, 65)), packed)
    with pytest.raises(TypeError, match="x must be bfloat16 or float32, got int32"):
        matmul.linear(x.astype(jnp.int32), packed)
    with pytest.raises(TypeError, match="packed weights must be bfloat16, got float32"):
        matmul.linear(x, matmul.PackedWeight(packed.groups.astype(np.float32), 96))
    with pytest.raises(TypeError, match="the output must be bfloat16 or float32, got float16"):
        matmul.linear(x, packed, out_dtype=jnp.float16)
    with pytest.raises(TypeError, match="num_rows must be int32, got float32"):
        matmul.linear(x, packed, jnp.ones(1))
    with pytest.raises(ValueError, match=r"num_rows must be \[1\], got shape \(2,\)"):
        matmul.linear(x, packed, jnp.ones(2, jnp.int32))
    with pytest.raises(ValueError, match="K must be even, got 3"):
        matmul.pack(np.zeros((4, 3), np.float32))
    with pytest.raises(ValueError, match=r"a weight must be \[N, K\], got shape \(4,\)"):
        matmul.pack(np.zeros(4, np.float32))
    with pytest.raises(ValueError, match="gate and up must have as many outputs, got 5 in all"):
        matmul.pack_gate_up(np.zeros((5, 4), np.float32))


def bound_threads(seconds):
    """Threads that may run on fewer cores than this one, once the moves under way are over."""
    everywhere = os.sched_getaffinity(0)
    deadline = time.monotonic() + seconds
    while True:
        bound = set()
        for name in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                if os.sched_getaffinity(int(name)) != everywhere:
                    bound.add(int(name))
        if not bound or time.monotonic() > deadline:
            return bound
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a thread choose its cores")
def test_a_helper_that_was_moved_off_its_callers_core_may_run_anywhere_again():
    x, weight = draw(16, 576, 1536)
    packed = matmul.pack(weight)
    product = jax.jit(lambda x: matmul.linear(x, packed, out_dtype=jnp.float32))
    product(x).block_until_ready()
    before = bound_threads(seconds=1)
    # Another busy thread per core: helpers are woken on their caller's core, and move.
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count())
    ]
    try:
        expected = np.asarray(product(x))
        for _ in range(300):
            np.testing.assert_array_equal(product(x), expected)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert bound_threads(seconds=5) <= before
