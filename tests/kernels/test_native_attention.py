import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.cpu.attention import ragged_paged_attention
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
def test_equals_the_reference_and_reads_no_spare_memory(case, instruction_set):
    inputs = draw(case)
    out, pages = run(ragged_paged_attention, case, inputs)
    expected, _ = run(reference.ragged_paged_attention, case, inputs)
    np.testing.assert_allclose(out, expected, rtol=0, atol=TOLERANCE[case.dtype])
    np.testing.assert_array_equal(pages, expected_pages(case, inputs))
    assert not out[sum(case.q_lens) :].any()


@st.composite
def batches(draw_from):
    num_seqs = draw_from(st.integers(1, 5))
    kv_lens = tuple(draw_from(st.integers(1, 120)) for _ in range(num_seqs))
    q_lens = tuple(draw_from(st.sampled_from([0, 1, n, (n + 1) // 2])) for n in kv_lens)
    # Few shapes, so that few programs are compiled: lengths are data.
    return Case(
        q_lens=q_lens,
        kv_lens=kv_lens,
        pad_tokens=600 - sum(q_lens),
        pad_seqs=5 - num_seqs,
        window=draw_from(st.sampled_from([None, 20])),
        seed=draw_from(st.integers(0, 1000)),
    )


@settings(max_examples=40, deadline=None)
@given(batches())
def test_equals_dense_attention_for_any_lengths(case):
    inputs = draw(case)
    out, pages = run(ragged_paged_attention, case, inputs)
    np.testing.assert_allclose(out, oracle(case, inputs), rtol=0, atol=2e-5)
    np.testing.assert_array_equal(pages, expected_pages(case, inputs))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("heads", [(9, 3), (8, 1), (3, 3)], ids=str)
def test_row_bits_do_not_depend_on_batch_chunking_or_page_size(
    dtype, window, heads, instruction_set
):
    common = {
        "dtype": dtype,
        "kv_dtype": dtype,
        "window": window,
        "num_heads": heads[0],
        "num_kv_heads": heads[1],
    }
    length = 300
    whole, _ = run(
        ragged_paged_attention, Case(q_lens=(length,), kv_lens=(length,), seed_of=(7,), **common)
    )
    chunks = [(0, 16), (16, 17), (17, 300), (299, 300), (296, 299), (100, 131), (31, 33), (64, 65)]
    for index, (begin, end) in enumerate(chunks):
        case = Case(
            q_lens=(3, end - begin, 1),
            kv_lens=(50, end, 290),
            seed_of=(1, 7, 2),
            seed=index,
            page_size=(8, 16, 64)[index % 3],
            **common,
        )
        out, _ = run(ragged_paged_attention, case)
        np.testing.assert_array_equal(out[3 : 3 + end - begin], whole[begin:end])


def test_many_rows_in_parallel_give_the_bits_of_one():
    lengths = tuple(range(60, 92))
    case = Case(q_lens=(1,) * 32, kv_lens=lengths, seed_of=tuple(range(32)))
    together, _ = run(ragged_paged_attention, case)
    for s in (0, 13, 31):
        alone, _ = run(
            ragged_paged_attention, Case(q_lens=(1,), kv_lens=(lengths[s],), seed_of=(s,))
        )
        np.testing.assert_array_equal(together[s], alone[0])


def test_large_scores_do_not_overflow():
    case = Case(q_lens=(1, 30), kv_lens=(200, 64))
    inputs = draw(case)
    inputs = inputs._replace(q=inputs.q * 1000)
    out, _ = run(ragged_paged_attention, case, inputs)
    # Scores near 1e4 keep 3 decimals in f32; an overflow would show as NaN or inf.
    np.testing.assert_allclose(out, oracle(case, inputs), rtol=0, atol=2e-2)


def test_a_nan_query_spoils_its_own_rows_only(instruction_set):
    case = Case(q_lens=(1, 20), kv_lens=(40, 50))
    inputs = draw(case)
    clean, _ = run(ragged_paged_attention, case, inputs)
    inputs = inputs._replace(q=inputs.q.at[5, 4].set(jnp.nan))
    out, _ = run(ragged_paged_attention, case, inputs)
    expected = clean.copy()
    expected[5, 4] = np.nan
    np.testing.assert_array_equal(out, expected)


def test_donated_pages_are_updated_in_place_without_a_copy():
    case = Case(q_lens=(1, 20), kv_lens=(33, 20))
    inputs = draw(case)

    def two_layers(q, k, v, pages, other_pages, *indices):
        attend = functools.partial(ragged_paged_attention, **case.kwargs)
        out, pages = attend(q, k, v, pages, *indices)
        out, other_pages = attend(out, k, v, other_pages, *indices)
        return out, pages, other_pages

    # Sums, since jax does not own (nor donate) the memory of an array made from numpy.
    pages = [inputs.kv_pages + 0, inputs.kv_pages + 1]
    compiled = (
        jax.jit(two_layers, donate_argnums=(3, 4)).lower(*inputs[:3], *pages, *inputs[4:]).compile()
    )
    hlo = compiled.as_text()
    assert "copy(" not in hlo
    assert hlo.count("output_to_operand_aliasing") == 2
    addresses = [x.unsafe_buffer_pointer() for x in pages]
    _, *updated = compiled(*inputs[:3], *pages, *inputs[4:])
    assert [x.unsafe_buffer_pointer() for x in updated] == addresses


def test_a_layer_of_a_stacked_cache_is_updated_in_place_and_the_others_stay():
    case = Case(q_lens=(1, 20), kv_lens=(33, 20))
    inputs = draw(case)
    num_layers = 3

    def layers_in_turn(q, k, v, pages, *indices):
        outs = []
        for layer in (2, 0):
            out, pages = ragged_paged_attention(
                q, k, v, pages, *indices, layer=layer, **case.kwargs
            )
            outs.append(out)
        return outs, pages

    pages = jnp.stack([inputs.kv_pages] * num_layers)
    arguments = (*inputs[:3], pages, *inputs[4:])
    compiled = jax.jit(layers_in_turn, donate_argnums=3).lower(*arguments).compile()
    assert "copy(" not in compiled.as_text()
    address = pages.unsafe_buffer_pointer()
    outs, updated = compiled(*arguments)
    assert updated.unsafe_buffer_pointer() == address
    expected, expected_pages = run(ragged_paged_attention, case, inputs)
    for out in outs:
        np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(updated[0], expected_pages)
    np.testing.assert_array_equal(updated[1], inputs.kv_pages)
    np.testing.assert_array_equal(updated[2], expected_pages)


def test_a_layer_outside_the_cache_is_refused_when_traced():
    inputs = draw(Case(q_lens=(2,), kv_lens=(9,)))
    with pytest.raises(ValueError, match="kv_pages must have 5 dimensions"):
        ragged_paged_attention(*inputs, sm_scale=1.0, layer=0)
    stacked = inputs._replace(kv_pages=inputs.kv_pages[None])
    with pytest.raises(ValueError, match=r"layer must lie in \[0, 1\), got 1"):
        ragged_paged_attention(*stacked, sm_scale=1.0, layer=1)
    with pytest.raises(ValueError, match="kv_pages must have 4 dimensions"):
        ragged_paged_attention(*stacked, sm_scale=1.0)


def test_pages_that_are_not_donated_survive():
    case = Case(q_lens=(1,), kv_lens=(33,))
    inputs = draw(case)
    before = np.array(inputs.kv_pages)
    run(ragged_paged_attention, case, inputs)
    np.testing.assert_array_equal(np.asarray(inputs.kv_pages), before)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("q", (5, 9), "q must have 3 dimensions"),
        ("q", (5, 8, 64), "multiple of 3 kv heads"),
        ("k", (4, 3, 64), "k and v must be"),
        ("kv_pages", (4, 6, 12, 64), "power of two >= 8, got 12"),
        ("kv_pages", (4, 3, 16, 64), "kv_pages must be"),
        ("page_indices", (4, 7), "for kv_lens"),
        ("num_seqs", (2,), "for kv_lens"),
    ],
)
def test_a_wrong_shape_is_refused_when_traced(name, shape, message):
    inputs = draw(Case(q_lens=(2,), kv_lens=(9,)))
    wrong = inputs._replace(**{name: jnp.zeros(shape, getattr(inputs, name).dtype)})
    with pytest.raises(ValueError, match=message):
        ragged_paged_attention(*wrong, sm_scale=1.0)


def test_a_head_dim_that_is_no_multiple_of_8_is_refused():
    shapes = [(4, 2, 20), (4, 2, 20), (4, 2, 20), (3, 4, 16, 20)]
    indices = draw(Case(q_lens=(2,), kv_lens=(9,)))[4:]
    with pytest.raises(ValueError, match="head_dim must be a multiple of 8, got 20"):
        ragged_paged_attention(*(jnp.zeros(s) for s in shapes), *indices, sm_scale=1.0)


def test_a_window_of_no_key_is_refused():
    inputs = draw(Case(q_lens=(2,), kv_lens=(9,)))
    with pytest.raises(ValueError, match="sliding_window must be at least 1, got 0"):
        ragged_paged_attention(*inputs, sm_scale=1.0, sliding_window=0)


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("q", "float16", "q must be bfloat16 or float32, got float16"),
        ("v", "bfloat16", "v must have q's dtype float32, got bfloat16"),
        ("kv_pages", "int8", "kv_pages must be bfloat16 or float32, or quantised, got int8"),
        ("kv_lens", "int16", "kv_lens must be int32, got int16"),
    ],
)
def test_a_wrong_dtype_is_refused_when_traced(name, dtype, message):
    inputs = draw(Case(q_lens=(2,), kv_lens=(9,)))
    wrong = inputs._replace(**{name: getattr(inputs, name).astype(dtype)})
    with pytest.raises(TypeError, match=message):
        ragged_paged_attention(*wrong, sm_scale=1.0)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("page_indices", 99, r"page_indices must lie in \[0, "),
        ("page_indices", -1, r"page_indices must lie in \[0, "),
        ("kv_lens", 1, "kv_lens must count the new tokens: 1 < 2"),
        ("kv_lens", 10_000, "kv_lens 10000 exceeds"),
        ("cu_q_lens", 77, r"cu_q_lens\[0\] must be 0, got 77"),
        ("num_seqs", 9, "num_seqs must lie in"),
    ],
)
def test_values_outside_the_buffers_are_an_error_not_a_wild_write(name, value, message):
    case = Case(q_lens=(2,), kv_lens=(9,))
    inputs = draw(case)
    wrong = inputs._replace(**{name: jnp.full_like(getattr(inputs, name), value)})
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        run(ragged_paged_attention, case, wrong)
