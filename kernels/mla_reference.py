"""Attention over a paged cache of latents (MLA, DeepSeek-V2, arXiv:2405.04434) in plain jnp.

All heads of a token share one cached row: its latent, then its rotated key part. With the key and
value up-projections absorbed into the query and output projections, the row is the key, and its
latent alone is the value. What a Pallas kernel for it must compute, and the path that serves.
"""

from __future__ import annotations

import jax

from kernels import reference
from kernels.quantized_pages import QuantizedPages


def ragged_paged_latent_attention(
    q: jax.Array,
    latents: jax.Array,
    pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    sm_scale: float,
    num_value_dims: int,
) -> tuple[jax.Array, jax.Array]:
    """Write the new rows to their pages, then attend over the pages.

    Query i of sequence s stands at position p = kv_lens[s] - q_len + i and sees rows [0, p].
    Scores, softmax and sums are f32. A row's bits depend on its own sequence only.

    Args:
        q: [T, H, C], for each head its query in latent space, then its rotated part.
        latents: [T, C], the new rows: latent, normalised, then the rotated key that heads share.
        pages: [N, 1, page, C]. Donate them: the update is then in place.
        kv_lens: i32 [S], tokens in the cache after this step.
        page_indices: i32 [S, P].
        cu_q_lens: i32 [S + 1], rows of sequence s are [cu_q_lens[s], cu_q_lens[s + 1]).
        num_seqs: i32 [1], sequences in use.
        sm_scale: factor of the scores.
        num_value_dims: R, the size of the latent.

    Returns:
        Weighted latents [T, H, R] in q's dtype, zero past the last sequence's rows, and the pages.
    """
    indices = (kv_lens, page_indices, cu_q_lens, num_seqs)
    written = reference.write_rows(latents[:, None], pages, *indices)
    assert not isinstance(written, QuantizedPages)
    pages = written
    out = reference.attend_pages(
        q,
        pages,
        *indices,
        split=lambda rows: (rows, rows[..., :num_value_dims]),
        sm_scale=sm_scale,
    )
    return out, pages
