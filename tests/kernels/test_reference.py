import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.reference import ragged_paged_attention
from tests.kernels.ragged_cases import (
    CASES,
    SINK_CASES,
    TOLERANCE,
    Case,
    draw,
    expected_pages,
    oracle,
    run,
)


@pytest.mark.parametrize("case", (CASES | SINK_CASES).values(), ids=(CASES | SINK_CASES).keys())
def test_equals_dense_attention_and_reads_no_spare_memory(case):
    inputs = draw(case)
    out, pages = run(ragged_paged_attention, case, inputs)
    # A NaN anywhere in the spare memory would show here.
    np.testing.assert_allclose(out, oracle(case, inputs), rtol=0, atol=TOLERANCE[case.dtype])
    np.testing.assert_array_equal(pages, expected_pages(case, inputs))
    assert not out[sum(case.q_lens) :].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_row_bits_do_not_depend_on_batch_or_chunking(dtype):
    common = {"dtype": dtype, "kv_dtype": dtype}
    whole, _ = run(
        ragged_paged_attention, Case(q_lens=(150,), kv_lens=(150,), seed_of=(7,), **common)
    )
    for begin, end in [(0, 16), (16, 17), (17, 150), (149, 150), (100, 131)]:
        case = Case(
            q_lens=(3, end - begin, 1),
            kv_lens=(50, end, 90),
            seed_of=(1, 7, 2),
            pad_tokens=200 - 4 - (end - begin),
            **common,
        )
        out, _ = run(ragged_paged_attention, case)
        np.testing.assert_array_equal(out[3 : 3 + end - begin], whole[begin:end])


def test_memory_stays_at_one_tile():
    case = Case(q_lens=(1,) * 32, kv_lens=(512,) * 32)
    function = jax.jit(
        functools.partial(ragged_paged_attention, **case.kwargs), donate_argnums=(3,)
    )
    memory = function.lower(*draw(case)).compile().memory_analysis()
    # The gathered keys and values of all sequences alone would take 25 MB.
    assert memory.temp_size_in_bytes < 2_000_000


def test_donated_pages_are_updated_in_place():
    case = Case(q_lens=(1, 20), kv_lens=(33, 20))
    inputs = draw(case)
    function = jax.jit(
        functools.partial(ragged_paged_attention, **case.kwargs), donate_argnums=(3,)
    )
    # A sum, since jax does not own (nor donate) the memory of an array made from numpy.
    inputs = inputs._replace(kv_pages=inputs.kv_pages + 0)
    address = inputs.kv_pages.unsafe_buffer_pointer()
    _, pages = function(*inputs)
    assert pages.unsafe_buffer_pointer() == address


def test_lowers_for_tpu():
    inputs = draw(Case(q_lens=(1, 20), kv_lens=(33, 20)))
    function = jax.jit(functools.partial(ragged_paged_attention, sm_scale=0.125))
    exported = jax.export.export(function, platforms=["tpu"])(*inputs)
    assert exported.out_avals[0].dtype == jnp.float32
