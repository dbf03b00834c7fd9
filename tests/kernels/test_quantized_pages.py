"""Pages of 8-bit integers: what a row becomes, and attention over such pages on the CPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import reference
from kernels.cpu import attention as native
from kernels.quantized_pages import QuantizedPages, quantize_rows
from tests.kernels.ragged_cases import (
    CASES,
    SINK_CASES,
    TOLERANCE,
    Case,
    Inputs,
    draw,
    expected_pages,
    oracle_of_pages,
)

_NAMES = ("group_3_bf16", "head_dim_80", "head_dim_8", "window_7_bf16", "group_4_page_128")
_CHOSEN = {name: CASES[name] for name in _NAMES} | {"sinks": SINK_CASES["sinks"]}


def quantized(case: Case) -> Inputs:
    """The batch over quantised pages: where the floats are NaN, scales are."""
    inputs = draw(case)
    values, scales = quantize_rows(jnp.nan_to_num(inputs.kv_pages))
    scales = jnp.where(jnp.isnan(inputs.kv_pages[..., 0]), jnp.nan, scales)
    return inputs._replace(kv_pages=QuantizedPages(values=values, scales=scales))


def attend(implementation, case: Case, inputs: Inputs | None = None):
    sinks = None if case.sinks is None else jnp.asarray(case.sinks, jnp.float32)
    function = jax.jit(functools.partial(implementation, **case.kwargs, sinks=sinks))
    out, pages = function(*(quantized(case) if inputs is None else inputs))
    return np.asarray(out.astype(jnp.float32)), pages


def stood_for(pages: QuantizedPages) -> np.ndarray:
    return np.asarray(pages.values, np.float32) * np.asarray(pages.scales)[..., None]


def test_a_row_keeps_its_largest_element_and_half_a_step_of_the_others():
    rows = np.random.default_rng(0).standard_normal((50, 3, 64)) * [[0.1], [1.0], [10.0]]
    rows = rows.astype(np.float32)
    values, scales = quantize_rows(jnp.asarray(rows))
    largest = np.abs(rows).max(axis=-1)
    assert (np.abs(np.asarray(values)).max(axis=-1) >= 126).all()  # a scale is rounded upwards
    error = np.abs(np.asarray(values) * np.asarray(scales)[..., None] - rows)
    assert (error <= 0.5 * np.asarray(scales)[..., None] * (1 + 1e-5)).all()
    assert (np.asarray(scales) <= largest / 127 * (1 + 2**-7)).all()
    np.testing.assert_array_equal(scales, scales.astype(jnp.bfloat16).astype(jnp.float32))


def test_a_row_of_zeros_stays_zeros_and_a_nan_shows():
    rows = jnp.zeros((2, 8)).at[1, 3].set(jnp.nan)
    values, scales = quantize_rows(rows)
    assert not np.asarray(values)[0].any()
    assert scales[0] == 0
    assert np.isnan(scales[1])


@pytest.mark.parametrize("case", _CHOSEN.values(), ids=_CHOSEN)
def test_equals_dense_attention_over_what_the_pages_stand_for(case, instruction_set):
    out, pages = attend(native.ragged_paged_attention, case)
    expected_out, expected = attend(reference.ragged_paged_attention, case)
    np.testing.assert_array_equal(pages.values, expected.values)  # the same bits as in jnp
    np.testing.assert_array_equal(pages.scales, expected.scales)
    dense = dataclasses.replace(case, kv_dtype="float32")
    floats = quantized(case)._replace(kv_pages=jnp.asarray(stood_for(pages)))
    tolerance = TOLERANCE[case.dtype]
    np.testing.assert_allclose(out, oracle_of_pages(dense, floats), rtol=0, atol=tolerance)
    np.testing.assert_allclose(expected_out, out, rtol=0, atol=tolerance)
    assert not out[sum(case.q_lens) :].any()


def test_new_rows_are_stored_at_their_precision_and_others_stay():
    case = CASES["group_3_bf16"]
    before = quantized(case)
    _, pages = attend(native.ragged_paged_attention, case, before)
    old, new = before.kv_pages, expected_pages(case, draw(case))
    is_new = np.isnan(np.asarray(old.scales)) & ~np.isnan(new[..., 0])
    assert is_new.sum() == 2 * case.num_kv_heads * sum(case.q_lens)
    error = np.abs(stood_for(pages) - new)[is_new]
    assert 0 < error.max() <= 0.51 * np.asarray(pages.scales)[is_new].max()
    for x, y in ((pages.values, old.values), (pages.scales, old.scales)):
        np.testing.assert_array_equal(np.asarray(x)[~is_new], np.asarray(y)[~is_new])


@pytest.mark.parametrize(
    "implementation",
    [native.ragged_paged_attention, reference.ragged_paged_attention],
    ids=["native", "reference"],
)
def test_row_bits_do_not_depend_on_batch_chunking_or_page_size(implementation):
    common = {"dtype": "bfloat16", "kv_dtype": "bfloat16"}
    whole, _ = attend(implementation, Case(q_lens=(150,), kv_lens=(150,), seed_of=(7,), **common))
    for page_size, (begin, end) in ((16, (0, 16)), (64, (149, 150)), (8, (100, 131))):
        case = Case(
            q_lens=(3, end - begin, 1),
            kv_lens=(50, end, 90),
            seed_of=(1, 7, 2),
            page_size=page_size,
            **common,
        )
        out, _ = attend(implementation, case)
        np.testing.assert_array_equal(out[3 : 3 + end - begin], whole[begin:end])


def test_a_layer_of_a_stacked_cache_is_updated_in_place_and_the_others_stay():
    case = Case(q_lens=(1, 20), kv_lens=(33, 20))
    inputs = quantized(case)
    stacked = jax.tree.map(lambda x: jnp.stack([x] * 2), inputs.kv_pages)
    arguments = (*inputs[:3], stacked, *inputs[4:])
    function = functools.partial(native.ragged_paged_attention, layer=1, **case.kwargs)
    compiled = jax.jit(function, donate_argnums=3).lower(*arguments).compile()
    assert "copy(" not in compiled.as_text()
    addresses = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(stacked)]
    out, updated = compiled(*arguments)
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(updated)] == addresses
    expected_out, expected = attend(native.ragged_paged_attention, case, inputs)
    np.testing.assert_array_equal(out, expected_out)
    for x, of_layer, untouched in zip(
        *(jax.tree.leaves(tree) for tree in (updated, expected, inputs.kv_pages)), strict=True
    ):
        np.testing.assert_array_equal(x[1], of_layer)
        np.testing.assert_array_equal(x[0], untouched)


def test_scales_that_do_not_fit_the_pages_are_refused_when_traced():
    inputs = quantized(Case(q_lens=(2,), kv_lens=(9,)))
    pages = inputs.kv_pages
    for wrong, error in (
        (QuantizedPages(values=pages.values, scales=pages.scales[:, :3]), ValueError),
        (QuantizedPages(values=pages.values, scales=pages.scales.astype(jnp.bfloat16)), TypeError),
    ):
        with pytest.raises(error, match="scales"):
            native.ragged_paged_attention(*inputs._replace(kv_pages=wrong), sm_scale=1.0)
