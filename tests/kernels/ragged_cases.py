"""Ragged batches over scattered pages, with NaN wherever nothing may be read, and an oracle."""

import functools
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Inputs(NamedTuple):
    """Arguments of ragged_paged_attention, in order."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    kv_pages: jax.Array
    kv_lens: jax.Array
    page_indices: jax.Array
    cu_q_lens: jax.Array
    num_seqs: jax.Array


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch to be drawn. `seed_of[s]` fixes the content of sequence s, wherever it appears."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    page_size: int = 16
    dtype: str = "float32"
    kv_dtype: str = "float32"
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    pad_tokens: int = 3
    pad_seqs: int = 2
    seed: int = 0
    seed_of: tuple[int, ...] = field(default=())

    @property
    def kwargs(self) -> dict[str, float | int | None]:
        return {"sm_scale": self.head_dim**-0.5, "sliding_window": self.window}

    @property
    def sinks(self) -> tuple[float, ...] | None:
        """One for each head, from far below the scores to far above them."""
        return tuple(np.linspace(-9, 9, self.num_heads)) if self.has_sinks else None


def draw(case: Case) -> Inputs:
    """Draw the batch: pages in random order, NaN in the null page, in pages that nobody owns, past
    each sequence's cached tokens, and before its window."""
    rng = np.random.default_rng(case.seed)
    num_tokens = sum(case.q_lens) + case.pad_tokens
    num_rows = len(case.q_lens) + case.pad_seqs
    owned = [-(-length // case.page_size) for length in case.kv_lens]
    num_pages = 1 + sum(owned) + 3
    free = list(rng.permutation(np.arange(1, num_pages)))
    shape = (num_pages, 2 * case.num_kv_heads, case.page_size, case.head_dim)
    pages = np.full(shape, np.nan, np.float32)
    q = np.full((num_tokens, case.num_heads, case.head_dim), np.nan, np.float32)
    k = np.full((num_tokens, case.num_kv_heads, case.head_dim), np.nan, np.float32)
    v = k.copy()
    page_indices = np.zeros((num_rows, max(owned, default=0) + 1), np.int32)
    kv_lens = np.zeros(num_rows, np.int32)
    kv_lens[: len(case.kv_lens)] = case.kv_lens
    cu_q_lens = np.full(num_rows + 1, sum(case.q_lens), np.int32)
    cu_q_lens[: len(case.q_lens) + 1] = np.cumsum([0, *case.q_lens])
    for s, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        # One stream for queries and one for keys: a longer sequence begins like a shorter one.
        streams = np.random.default_rng(case.seed_of[s] if case.seed_of else (case.seed, s)).spawn(
            2
        )
        all_q = streams[0].standard_normal((kv_len, case.num_heads, case.head_dim))
        all_kv = streams[1].standard_normal((kv_len, 2, case.num_kv_heads, case.head_dim))
        page_indices[s, : owned[s]] = [free.pop() for _ in range(owned[s])]
        cached = kv_len - q_len
        oldest = 0 if case.window is None else max(0, cached - case.window + 1)
        for t in range(oldest, cached):
            page = pages[page_indices[s, t // case.page_size]]
            page[0::2, t % case.page_size] = all_kv[t, 0]
            page[1::2, t % case.page_size] = all_kv[t, 1]
        rows = slice(cu_q_lens[s], cu_q_lens[s + 1])
        q[rows], k[rows], v[rows] = all_q[cached:], all_kv[cached:, 0], all_kv[cached:, 1]
    return Inputs(
        *(jnp.asarray(x, case.dtype) for x in (q, k, v)),
        jnp.asarray(pages, case.kv_dtype),
        jnp.asarray(kv_lens),
        jnp.asarray(page_indices),
        jnp.asarray(cu_q_lens),
        jnp.asarray([len(case.q_lens)], jnp.int32),
    )


def oracle(case: Case, inputs: Inputs) -> np.ndarray:
    """Dense attention of each sequence in float64, over keys gathered from the updated pages."""
    return oracle_of_pages(case, inputs._replace(kv_pages=expected_pages(case, inputs)))


def oracle_of_pages(case: Case, inputs: Inputs) -> np.ndarray:
    """The same where the new keys and values are in their pages already."""
    pages = np.asarray(inputs.kv_pages, np.float64)
    q = np.asarray(inputs.q, np.float64)
    cu = np.asarray(inputs.cu_q_lens)
    out = np.zeros(q.shape)
    group = case.num_heads // case.num_kv_heads
    for s, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        flat = pages[np.asarray(inputs.page_indices[s])]  # [P, 2K, page, D]
        flat = flat.swapaxes(0, 1).reshape(2 * case.num_kv_heads, -1, case.head_dim)
        for i in range(q_len):
            end = kv_len - q_len + i + 1
            begin = 0 if case.window is None else max(0, end - case.window)
            for h in range(case.num_heads):
                keys, values = flat[h // group * 2 : h // group * 2 + 2, begin:end]
                scores = keys @ q[cu[s] + i, h] * case.head_dim**-0.5
                if case.soft_cap is not None:
                    scores = case.soft_cap * np.tanh(scores / case.soft_cap)
                top = scores.max()
                weights = np.exp(scores - top)
                sink = 0.0 if case.sinks is None else np.exp(case.sinks[h] - top)
                out[cu[s] + i, h] = weights @ values / (weights.sum() + sink)
    return out


def expected_pages(case: Case, inputs: Inputs) -> np.ndarray:
    """The pages with the new keys and values in their slots and nothing else changed."""
    pages = np.array(inputs.kv_pages.astype(jnp.float32))
    k = np.asarray(inputs.k.astype(case.kv_dtype).astype(jnp.float32))
    v = np.asarray(inputs.v.astype(case.kv_dtype).astype(jnp.float32))
    for s, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        for i in range(q_len):
            row, t = int(inputs.cu_q_lens[s]) + i, kv_len - q_len + i
            page = pages[int(inputs.page_indices[s, t // case.page_size])]
            page[0::2, t % case.page_size] = k[row]
            page[1::2, t % case.page_size] = v[row]
    return pages


@functools.cache
def _compiled(implementation, window, sm_scale, sinks):
    options = {} if sinks is None else {"sinks": jnp.asarray(sinks, jnp.float32)}
    return jax.jit(
        functools.partial(implementation, sm_scale=sm_scale, sliding_window=window, **options)
    )


def run(implementation, case: Case, inputs: Inputs | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Run jitted; returns output and pages as f32 (exact for bf16)."""
    function = _compiled(implementation, case.window, case.head_dim**-0.5, case.sinks)
    out, pages = function(*(draw(case) if inputs is None else inputs))
    return np.asarray(out.astype(jnp.float32)), np.asarray(pages.astype(jnp.float32))


TOLERANCE = {"float32": 2e-5, "bfloat16": 1.6e-2}  # bf16: the output's own rounding

MIXED = {"q_lens": (1, 1, 40, 7, 1, 33), "kv_lens": (5, 100, 60, 7, 257, 161)}

CASES = {
    "group_3": Case(**MIXED),
    "group_3_bf16": Case(**MIXED, dtype="bfloat16", kv_dtype="bfloat16"),
    "group_2_page_8": Case(**MIXED, num_heads=4, num_kv_heads=2, head_dim=16, page_size=8),
    "mqa_8_page_32": Case(**MIXED, num_heads=8, num_kv_heads=1, page_size=32, kv_dtype="bfloat16"),
    "mha_3_page_64": Case(**MIXED, num_heads=3, num_kv_heads=3, page_size=64, dtype="bfloat16"),
    "group_4_page_128": Case(
        **MIXED, num_heads=32, num_kv_heads=8, page_size=128, dtype="bfloat16", kv_dtype="bfloat16"
    ),
    "head_dim_128": Case(**MIXED, num_heads=8, num_kv_heads=2, head_dim=128),
    "head_dim_80": Case(**MIXED, num_heads=5, num_kv_heads=5, head_dim=80, kv_dtype="bfloat16"),
    "head_dim_8": Case(**MIXED, num_heads=14, num_kv_heads=2, head_dim=8, dtype="bfloat16"),
    "window_16": Case(**MIXED, window=16),
    "window_7_bf16": Case(**MIXED, window=7, dtype="bfloat16", kv_dtype="bfloat16"),
    "window_1": Case(**MIXED, window=1, page_size=8),
    "window_100_page_128": Case(**MIXED, window=100, page_size=128),
    "no_padding": Case(**MIXED, pad_tokens=0, pad_seqs=0),
    "one_token": Case(q_lens=(1,), kv_lens=(1,), pad_tokens=7, pad_seqs=0),
    "empty_sequence": Case(q_lens=(2, 0, 3), kv_lens=(20, 9, 3)),
    "no_sequence": Case(q_lens=(), kv_lens=(), pad_tokens=8, pad_seqs=4),
    "long_prompt": Case(q_lens=(1, 300), kv_lens=(70, 520), dtype="bfloat16", kv_dtype="bfloat16"),
}

SINK_CASES = {
    "sinks": Case(**MIXED, has_sinks=True),
    "sinks_window_7_bf16": Case(
        **MIXED, has_sinks=True, window=7, dtype="bfloat16", kv_dtype="bfloat16"
    ),
    "sinks_empty_sequence": Case(q_lens=(2, 0, 3), kv_lens=(20, 9, 3), has_sinks=True),
}
"""What kernels for models with attention sinks must compute as well."""
