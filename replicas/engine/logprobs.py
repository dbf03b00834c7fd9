"""Log-probabilities of tokens and of the likeliest instead of them; device code, and its reading.

By the model's own logits in f32, before temperature and every other parameter, as OpenAI and vLLM
give them. Computed for the rows that ask only; where no row asks nothing runs but a test of that.
Invariant: a row's bits depend on its logits alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from replicas.engine.row_groups import GROUP_ROWS, for_each_group
from replicas.engine.sampler import sum_blocks, top_candidates
from replicas.models.layers import row_sum
from replicas.wire import MAX_LOGPROBS, TokenLogprobs

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Float32, Int32

_PROMPT_GROUP_ROWS = 64
"""Prompt rows whose logits are computed together: the head's weights are read once for them."""

_MIN_BLOCK_SUM_ELEMENTS = 4096
"""From so many elements on XLA's CPU reductions keep one order, see `row_sum`."""


def logprob_words(vocab_size: int) -> int:
    """Words W of a token's entry: its f32, then i32 ids and f32 values of the likeliest."""
    return 1 + 2 * min(MAX_LOGPROBS, vocab_size)


def compute_logprobs(
    *,
    logits: Float32[Array, "R V"],
    drawn: Int32[Array, " R"],
    output_rows: Int32[Array, " R"],
    is_wanted: Bool[Array, " R"],
    hidden: Float[Array, "T M"],
    targets: Int32[Array, " T"],
    head: Callable[[Array, Array], Array],
) -> Int32[Array, "T W"]:
    """Log-probabilities of the token behind each token row, where wanted; else arbitrary.

    Args:
        logits: of the output rows.
        drawn: token of each output row.
        output_rows: its token row.
        is_wanted: of each output row.
        hidden: of the token rows.
        targets: 1 + the prompt token behind each token row whose logprob is wanted; else 0.
        head: (hidden [G, M], rows in use [1]) -> logits [G, V].
    """
    num_rows, vocab_size = targets.shape[0], logits.shape[1]
    is_target = targets > 0
    table = jnp.zeros((num_rows, logprob_words(vocab_size)), jnp.int32)
    group_rows = max(GROUP_ROWS, min(_PROMPT_GROUP_ROWS, num_rows))
    all_rows = jnp.full((1,), group_rows, jnp.int32)

    def visit_prompt(rows: Array, table: Array) -> Array:
        prompt_logits = head(hidden.at[rows].get(mode="clip"), all_rows)
        token_ids = jnp.maximum(targets.at[rows].get(mode="clip") - 1, 0)
        return table.at[rows].set(token_entries(prompt_logits, token_ids), mode="drop")

    def visit_outputs(rows: Array, table: Array) -> Array:
        entries = token_entries(logits.at[rows].get(mode="clip"), drawn.at[rows].get(mode="clip"))
        places = output_rows.at[rows].get(mode="fill", fill_value=num_rows)
        return table.at[places].set(entries, mode="drop")

    def compute() -> Array:
        # In a branch of its own: XLA moves what the head does to its weights out of the loop.
        filled = lax.cond(
            jnp.any(is_target),
            lambda: for_each_group(is_target, visit_prompt, table, group_rows=group_rows),
            lambda: table,
        )
        return for_each_group(is_wanted, visit_outputs, filled)

    return lax.cond(jnp.any(is_target) | jnp.any(is_wanted), compute, lambda: table)


def token_entries(
    logits: Float32[Array, "G V"], token_ids: Int32[Array, " G"]
) -> Int32[Array, "G W"]:
    """Log-softmax of one token and of the likeliest of each row, as words."""
    num_top = min(MAX_LOGPROBS, logits.shape[1])
    values, ids = top_candidates(logits)
    largest = values[:, :1]
    # The sum is at least 1: it holds the largest itself.
    log_sum = jnp.log(_sum_vocabulary(jnp.exp(logits - largest)))[:, None]
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=1) - largest - log_sum
    top = values[:, :num_top] - largest - log_sum
    words = [lax.bitcast_convert_type(x, jnp.int32) for x in (chosen, top)]
    return jnp.concatenate([words[0], ids[:, :num_top], words[1]], axis=1)


def _sum_vocabulary(weights: Float32[Array, "G V"]) -> Float32[Array, " G"]:
    """Sum each row in an order that does not depend on the number of rows.

    A dot with ones keeps its order, but takes 0.30 ms for 8 rows of 49,152 on XLA's CPU. Blocks
    summed first take 0.08 ms, where there are elements enough for one order of sums at any number
    of rows.
    """
    if weights.shape[1] < _MIN_BLOCK_SUM_ELEMENTS:
        return row_sum(weights)
    return row_sum(sum_blocks(weights))


def pack_logprobs(table: npt.NDArray[np.int32], *, start: int, num_top: int) -> TokenLogprobs:
    """Pack entries [n, W] of consecutive tokens; of each the first `num_top` alternatives."""
    most = (table.shape[1] - 1) // 2
    num_top = min(num_top, most)
    columns = np.concatenate([table[:, : 1 + num_top], table[:, 1 + most : 1 + most + num_top]], 1)
    return TokenLogprobs(start=start, num_top=num_top, data=columns.astype("<i4").tobytes())
