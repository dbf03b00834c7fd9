"""Latent attention: one cached row per token is the key of every head, its latent the value."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kernels.mla_reference import ragged_paged_latent_attention
from tests.kernels.ragged_cases import MIXED, Case, draw

_NUM_VALUE_DIMS = 24
_CASE = Case(**MIXED, num_heads=5, num_kv_heads=1, head_dim=32)


def run(case: Case) -> tuple[np.ndarray, np.ndarray, tuple[jax.Array, ...]]:
    """Output, pages and inputs; rows of keys are the latents, rows of values are dropped."""
    q, k, _, pages, *indices = draw(case)
    attend = functools.partial(
        ragged_paged_latent_attention, sm_scale=0.2, num_value_dims=_NUM_VALUE_DIMS
    )
    inputs = (q, k[:, 0], pages[:, :1], *indices)
    out, pages = jax.jit(attend)(*inputs)
    return np.asarray(out), np.asarray(pages), inputs


def test_equals_dense_attention_over_the_latents_and_reads_no_spare_memory() -> None:
    out, pages, (q, _, _, kv_lens, page_indices, cu_q_lens, _) = run(_CASE)
    expected = np.zeros(out.shape)
    for s, (q_len, kv_len) in enumerate(zip(_CASE.q_lens, _CASE.kv_lens, strict=True)):
        assert kv_lens[s] == kv_len
        rows = pages[page_indices[s]].reshape(-1, _CASE.head_dim).astype(np.float64)
        for i in range(q_len):
            seen = rows[: kv_len - q_len + i + 1]
            scores = np.asarray(q[cu_q_lens[s] + i], np.float64) @ seen.T * 0.2
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            expected[cu_q_lens[s] + i] = weights @ seen[:, :_NUM_VALUE_DIMS]
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-5)
    assert not out[sum(_CASE.q_lens) :].any()


def test_row_bits_do_not_depend_on_batch_or_chunking() -> None:
    shape = {"num_heads": 5, "num_kv_heads": 1, "head_dim": 32}
    whole, _, _ = run(Case(q_lens=(150,), kv_lens=(150,), seed_of=(7,), **shape))
    for begin, end in [(0, 16), (16, 17), (149, 150), (100, 131)]:
        case = Case(
            q_lens=(3, end - begin, 1),
            kv_lens=(50, end, 90),
            seed_of=(1, 7, 2),
            pad_tokens=200 - 4 - (end - begin),
            **shape,
        )
        out, _, _ = run(case)
        np.testing.assert_array_equal(out[3 : 3 + end - begin], whole[begin:end])


def test_lowers_for_tpu() -> None:
    q, k, _, pages, *indices = draw(_CASE)
    attend = functools.partial(ragged_paged_latent_attention, sm_scale=0.2, num_value_dims=24)
    inputs = (q, k[:, 0], pages[:, :1], *indices)
    exported = jax.export.export(jax.jit(attend), platforms=["tpu"])(*inputs)
    assert exported.out_avals[0].dtype == jnp.float32
