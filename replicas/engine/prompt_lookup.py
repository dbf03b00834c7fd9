"""Guesses of the next tokens: how the text went on where its latest tokens occurred before.

Pure traced functions. (Saxena, "Prompt lookup decoding", 2023.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Int32


_DRAFTS_PER_MATCH = 2
"""Drafts for each token that agrees. A match of two tokens is often chance, and its drafts then
cost rows for nothing: at 8,000 tokens of context on CPU, 7 more than double attention's time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLookup:
    """How guesses are found; static.

    Attributes:
        min_ngram: fewest latest tokens that must have occurred before, >= 1.
        max_ngram: most that are compared, >= min_ngram.
        num_drafts: guesses per text, >= 1.
    """

    min_ngram: int
    max_ngram: int
    num_drafts: int


def find_drafts(
    token_ids: Int32[Array, "S L"], lengths: Int32[Array, " S"], lookup: PromptLookup
) -> tuple[Int32[Array, "S D"], Int32[Array, " S"]]:
    """Continue each text as it went on after an earlier occurrence of its latest tokens.

    The occurrence that agrees for most tokens back counts, up to `max_ngram`; of several the latest
    one. Where the guess reaches the text's end it goes on periodically.

    Args:
        token_ids: tokens of each text, arbitrary from its length on.
        lengths: in [0, L].
        lookup: static.

    Returns:
        The guesses, and how many of them are worth verifying: more, the longer the match; 0 for
        want of one. O(S L max_ngram).
    """
    num_positions = token_ids.shape[1]
    positions = jnp.arange(num_positions, dtype=jnp.int32)[None, :]
    last = lengths[:, None] - 1
    is_equal = positions < last  # an occurrence ends before the text does
    num_equal = jnp.zeros_like(token_ids)
    for back in range(lookup.max_ngram):
        # Column i holds the token `back` places before position i.
        earlier = jnp.pad(token_ids, ((0, 0), (back, 0)))[:, :num_positions]
        latest = jnp.take_along_axis(token_ids, jnp.maximum(last - back, 0), axis=1)
        is_equal &= (earlier == latest) & (positions >= back)
        num_equal += is_equal
    best = jnp.max(num_equal * num_positions + positions, axis=1, keepdims=True)
    end = best % num_positions
    num_equal = best[:, 0] // num_positions
    num_found = jnp.where(num_equal >= lookup.min_ngram, _DRAFTS_PER_MATCH * num_equal, 0)
    period = jnp.maximum(last - end, 1)
    places = end + 1 + jnp.arange(lookup.num_drafts, dtype=jnp.int32)[None, :] % period
    drafts = jnp.take_along_axis(token_ids, jnp.minimum(places, num_positions - 1), axis=1)
    return drafts, jnp.minimum(num_found, lookup.num_drafts)
