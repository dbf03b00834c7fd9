"""Chooses the next token of every row on the device: temperature, top-k, top-p, then a draw.

The draw of a row depends on its logits, parameters, seed and position only, never on its
neighbours: every branch below is taken per row, and a `lax.cond` only skips work that no row needs.
Invariant: the support is exact. Tokens tied with the last one that top-k or top-p keeps are kept
too.

Sorting a vocabulary costs more than a small model's step on CPU, so nothing does: a row with a
top-k is decided from its few best candidates; any other draws from the whole vocabulary, in a group
of 8 rows, and top-p only says whether to draw again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from replicas.engine.row_groups import GROUP_ROWS, for_each_group
from replicas.models.layers import row_sum

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float32, Int32, UInt32

_NUM_CANDIDATES = 128
# Candidates are found among the maxima of blocks of this many tokens.
_CANDIDATE_BLOCK = 32
# Width of the inner level of the two-level inverse CDF.
_CDF_BLOCK = 256


class SamplingArrays(NamedTuple):
    """Sampling parameters of each row.

    Attributes:
        temperature: >= 0; 0 is greedy.
        top_k: >= 0; 0, or the vocabulary's size and above, keeps everything.
        top_p: in (0, 1]; 1 keeps everything.
        seeds: words of a threefry key.
        positions: position of the token to draw; folded into the key.
    """

    temperature: Float32[Array, " S"]
    top_k: Int32[Array, " S"]
    top_p: Float32[Array, " S"]
    seeds: UInt32[Array, "S 2"]
    positions: Int32[Array, " S"]


class ChangeFn(Protocol):
    """Changes the logits of a group of rows."""

    def __call__(
        self,
        logits: Float32[Array, "G V"],
        arrays: SamplingArrays,
        rows: Int32[Array, " G"],
        /,
    ) -> Float32[Array, "G V"]:
        """Other logits in place of these; `rows` says whose, one past the last for nobody's."""
        ...


def sample(
    logits: Float32[Array, "S V"],
    arrays: SamplingArrays,
    is_wanted: Bool[Array, " S"],
    *,
    is_changed: Bool[Array, " S"],
    change: ChangeFn,
) -> Int32[Array, " S"]:
    """Return the next token of each row that is wanted, an arbitrary one of the others.

    Greedy rows take the most likely token, the lowest id among equals. The others are drawn in
    groups of their own, by one copy of that code: every array in it costs XLA's CPU client time,
    also where it does not run. Nothing runs that no wanted row needs.

    Args:
        logits: of every row.
        arrays: parameters of every row.
        is_wanted: rows whose token is read.
        is_changed: rows that are drawn from other logits.
        change: what those are.
    """
    with jax.named_scope("sample"):
        is_apart = is_wanted & (is_changed | (arrays.temperature > 0))
        greedy = lax.cond(
            jnp.any(is_wanted & ~is_apart),
            lambda: _first_argmax(logits),
            lambda: jnp.zeros_like(arrays.top_k),
        )

        def draw(rows: Array, own_logits: Array, own: SamplingArrays) -> Array:
            own_changed = is_changed.at[rows].get(mode="fill", fill_value=False)
            own_logits = lax.cond(
                jnp.any(own_changed),
                lambda: jnp.where(own_changed[:, None], change(own_logits, own, rows), own_logits),
                lambda: own_logits,
            )
            is_own = is_apart.at[rows].get(mode="fill", fill_value=False)
            return _sample_group(own_logits, own, is_own)

        def visit(rows: Array, tokens: Array) -> Array:
            own = SamplingArrays(*(a.at[rows].get(mode="clip") for a in arrays))
            drawn = draw(rows, logits.at[rows].get(mode="clip"), own)
            return tokens.at[rows].set(drawn, mode="drop")

        def draw_apart() -> Array:
            if logits.shape[0] == GROUP_ROWS:  # a group as it is: nothing to gather
                drawn = draw(jnp.arange(GROUP_ROWS), logits, arrays)
                return jnp.where(is_apart, drawn, greedy)
            return for_each_group(is_apart, visit, greedy)

        return lax.cond(jnp.any(is_apart), draw_apart, lambda: greedy)


def _sample_group(
    logits: Float32[Array, "G V"], arrays: SamplingArrays, is_wanted: Bool[Array, " G"]
) -> Int32[Array, " G"]:
    """As `sample`, for a group of `GROUP_ROWS` rows, most of which are random."""
    is_random = is_wanted & (arrays.temperature > 0)
    greedy = lax.cond(
        jnp.any(is_wanted & ~is_random),
        lambda: _first_argmax(logits),
        lambda: jnp.zeros_like(arrays.top_k),
    )
    return lax.cond(
        jnp.any(is_random),
        lambda: jnp.where(is_random, _sample_random(logits, arrays, is_random), greedy),
        lambda: greedy,
    )


def _sample_random(
    logits: Float32[Array, "G V"], arrays: SamplingArrays, is_random: Bool[Array, " G"]
) -> Int32[Array, " G"]:
    """Draw every row; rows that are not random get an arbitrary token."""
    uniforms = _uniforms(arrays)
    is_narrow = _has_top_k(arrays, logits.shape[1]) & (arrays.top_k <= _NUM_CANDIDATES)
    tokens, is_decided = lax.cond(
        jnp.any(is_random & is_narrow),
        lambda: _sample_candidates(logits, arrays, uniforms),
        lambda: (jnp.zeros_like(arrays.top_k), jnp.zeros_like(is_random)),
    )
    is_needy = is_random & ~is_decided
    return lax.cond(
        jnp.any(is_needy),
        lambda: jnp.where(
            is_needy, _draw_from_vocabulary(logits, arrays, uniforms, is_needy), tokens
        ),
        lambda: tokens,
    )


def seed_words(seed: int) -> tuple[int, int]:
    """Split a seed of 64 bits into the words of a key, the high one first."""
    return (seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF


def _uniforms(
    arrays: SamplingArrays, attempt: UInt32[Array, ""] | None = None
) -> Float32[Array, "S 2"]:
    """Draw two numbers in [0, 1) per row from fold_in(seed, position), others for each attempt."""

    def row(seed: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        if attempt is not None:
            key = jax.random.fold_in(key, attempt)
        return jax.random.uniform(key, (2,))

    return jax.vmap(row)(arrays.seeds, arrays.positions)


def _sample_candidates(
    logits: Float32[Array, "S V"],
    arrays: SamplingArrays,
    uniforms: Float32[Array, "S 2"],
) -> tuple[Int32[Array, " S"], Bool[Array, " S"]]:
    """Draw from the best candidates; also say which rows these candidates decide.

    Those are the rows whose top-k is among them. An equal logit might wait behind the last
    candidate, so the last kept one must exceed it.
    """
    values, token_ids = top_candidates(logits)
    num_candidates = values.shape[1]
    last = (
        values[:, -1] if num_candidates < logits.shape[1] else jnp.full_like(values[:, 0], -jnp.inf)
    )
    weights = jnp.exp((values - values[:, :1]) / _divisor(arrays.temperature)[:, None])

    has_top_k, has_top_p = _has_top_k(arrays, logits.shape[1]), arrays.top_p < 1
    kth = jnp.clip(arrays.top_k - 1, 0, num_candidates - 1)
    kth_value = jnp.take_along_axis(values, kth[:, None], axis=1)[:, 0]
    is_decided = has_top_k & (arrays.top_k <= num_candidates) & (kth_value > last)
    weights = jnp.where(values < kth_value[:, None], 0.0, weights)

    mass = jnp.cumsum(weights, axis=1)
    # The nucleus ends at the first token whose cumulative mass reaches top_p.
    end = jnp.sum(mass < (arrays.top_p * row_sum(weights))[:, None], axis=1)
    end_value = jnp.take_along_axis(values, jnp.minimum(end, num_candidates - 1)[:, None], axis=1)
    weights = jnp.where(has_top_p[:, None] & (values < end_value), 0.0, weights)

    chosen = _draw(weights, uniforms[:, 0])
    return jnp.take_along_axis(token_ids, chosen[:, None], axis=1)[:, 0], is_decided


def _draw_from_vocabulary(
    logits: Float32[Array, "G V"],
    arrays: SamplingArrays,
    uniforms: Float32[Array, "G 2"],
    is_needy: Bool[Array, " G"],
) -> Int32[Array, " G"]:
    """Draw from all tokens; while the drawn one is cut off, draw again from those above it.

    Rows that are not needy get an arbitrary token, and none is drawn again for their sake.

    Whether top-k or top-p cuts a token off follows from what is above it, so no threshold is
    needed. A rejected token is cut off with everything below it, and a draw among the rest has the
    right distribution. Rejected mass shrinks by a random fraction each time: a few rounds suffice.
    """
    vocab_size = logits.shape[1]
    has_top_k, has_top_p = _has_top_k(arrays, vocab_size), arrays.top_p < 1
    weights = _vocabulary_weights(logits, arrays.temperature)
    # Only where both are given does top-p need to know what top-k keeps in all.
    has_both = has_top_k & has_top_p
    weights = lax.cond(
        jnp.any(has_both),
        lambda: jnp.where(has_both[:, None], _keep_top_k(logits, weights, arrays.top_k), weights),
        lambda: weights,
    )
    num_kept = jnp.where(has_top_k & ~has_top_p, arrays.top_k, vocab_size)
    block_sums = sum_blocks(weights)
    mass_kept = jnp.where(has_top_p, arrays.top_p * jnp.sum(block_sums, axis=1), jnp.inf)

    def draw(block_sums: Array, floor: Array, uniforms: Array) -> Array:
        """Draw a token with a logit above `floor`: a block of the vocabulary, then one of it."""
        block = _draw(block_sums, uniforms[:, 0])
        token_ids = (block * _CDF_BLOCK)[:, None] + jnp.arange(_CDF_BLOCK)[None, :]
        is_open = token_ids < vocab_size
        token_ids = jnp.minimum(token_ids, vocab_size - 1)
        is_open &= ~(jnp.take_along_axis(logits, token_ids, axis=1) <= floor[:, None])
        in_block = jnp.where(is_open, jnp.take_along_axis(weights, token_ids, axis=1), 0.0)
        return jnp.minimum(block * _CDF_BLOCK + _draw(in_block, uniforms[:, 1]), vocab_size - 1)

    def cut_off(
        tokens: Array, block_sums: Array, floor: Array, is_open: Array
    ) -> tuple[Array, Array, Array]:
        """Which open rows must draw again, and from what."""
        values = jnp.take_along_axis(logits, tokens[:, None], axis=1)
        is_above = logits > values
        sums_above = sum_blocks(jnp.where(is_above, weights, 0.0))
        mass_above = jnp.sum(sums_above, axis=1)
        # A tiny top_p is 0 in 32 bits, or its share of the mass is: nothing cuts the top token off.
        is_cut = (mass_above >= mass_kept) & (mass_above > 0)
        is_cut |= lax.cond(
            jnp.any(num_kept < vocab_size),
            lambda: jnp.sum(is_above, axis=1) >= num_kept,
            lambda: jnp.zeros_like(is_cut),
        )
        is_open &= is_cut
        block_sums = jnp.where(is_open[:, None], sums_above, block_sums)
        return block_sums, jnp.where(is_open, values[:, 0], floor), is_open

    def attempt(state: tuple[Array, ...]) -> tuple[Array, ...]:
        number, tokens, block_sums, floor, is_open = state
        own_uniforms = jnp.where(number == 0, uniforms, _uniforms(arrays, number))
        tokens = jnp.where(is_open, draw(block_sums, floor, own_uniforms), tokens)
        is_open &= has_top_k | has_top_p
        block_sums, floor, is_open = lax.cond(
            jnp.any(is_open),
            lambda: cut_off(tokens, block_sums, floor, is_open),
            lambda: (block_sums, floor, is_open),
        )
        return number + 1, tokens, block_sums, floor, is_open

    floor = jnp.full_like(arrays.temperature, -jnp.inf)
    state = (jnp.uint32(0), jnp.zeros_like(arrays.top_k), block_sums, floor, is_needy)
    return lax.while_loop(lambda state: jnp.any(state[-1]), attempt, state)[1]


def _keep_top_k(
    logits: Float32[Array, "G V"], weights: Float32[Array, "G V"], top_k: Int32[Array, " G"]
) -> Float32[Array, "G V"]:
    """Return the weights with those below the k-th largest logit set to zero."""
    order = _order_preserving_bits(logits)
    smallest = _largest_threshold(
        lambda threshold: jnp.sum(order >= threshold[:, None], axis=1) >= top_k, order
    )
    return jnp.where(order >= smallest[:, None], weights, 0.0)


def sum_blocks(weights: Float32[Array, "G V"]) -> Float32[Array, "G B"]:
    """Sum blocks of `_CDF_BLOCK` tokens: the outer level of the inverse CDF."""
    padded = jnp.pad(weights, ((0, 0), (0, -weights.shape[1] % _CDF_BLOCK)))
    return jnp.sum(padded.reshape(weights.shape[0], -1, _CDF_BLOCK), axis=2)


def _draw(weights: Float32[Array, "S C"], uniform: Float32[Array, " S"]) -> Int32[Array, " S"]:
    """Invert the CDF of unnormalised weights at `uniform`; never returns a weight of zero."""
    cumulative = jnp.cumsum(weights, axis=1)
    is_hit = (cumulative > (uniform * cumulative[:, -1])[:, None]) & (weights > 0)
    places = lax.broadcasted_iota(jnp.int32, weights.shape, 1)
    first = jnp.min(jnp.where(is_hit, places, weights.shape[1]), axis=1)
    # Rounding can leave the last token without its hit.
    last = jnp.max(jnp.where(weights > 0, places, 0), axis=1)
    return jnp.minimum(first, last)


def _first_argmax(x: Array) -> Int32[Array, " S"]:
    """Return the lowest index of each row's maximum.

    Two plain reductions: XLA's argmax, which reduces pairs, takes ten times as long on CPU.
    """
    indices = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    is_max = x == jnp.max(x, axis=1, keepdims=True)
    # A row of NaN has no maximum; any valid index will do.
    return jnp.min(jnp.where(is_max, indices, x.shape[1] - 1), axis=1)


def top_candidates(
    logits: Float32[Array, "S V"],
) -> tuple[Float32[Array, "S C"], Int32[Array, "S C"]]:
    """Return each row's largest logits in descending order, and their ids.

    The C largest tokens lie in the C blocks with the largest maxima, so only those are searched.
    Which of several equal last candidates is returned is unspecified.
    """
    num_rows, vocab_size = logits.shape
    num_candidates, width = _NUM_CANDIDATES, _CANDIDATE_BLOCK
    if vocab_size <= 2 * num_candidates * width:
        return _top_k(logits, min(num_candidates, vocab_size))
    padded = jnp.pad(logits, ((0, 0), (0, -vocab_size % width)), constant_values=-jnp.inf)
    blocks = padded.reshape(num_rows, -1, width)
    _, best_blocks = _top_k(jnp.max(blocks, axis=2), num_candidates)
    searched = jnp.take_along_axis(blocks, best_blocks[:, :, None], axis=1)
    values, places = _top_k(searched.reshape(num_rows, -1), num_candidates)
    block = jnp.take_along_axis(best_blocks, places // width, axis=1)
    return values, block * width + places % width


def _top_k(x: Float32[Array, "S N"], k: int) -> tuple[Float32[Array, "S k"], Int32[Array, "S k"]]:
    """Return `lax.top_k`, kept whole.

    XLA merges a slice of the result into it, no longer sees a top-k, and sorts the full row (jaxlib
    0.12, CPU: 30 ms instead of 3). The barrier goes when a slice of a top-k stays one.
    """
    return lax.optimization_barrier(lax.top_k(x, k))


def _vocabulary_weights(
    logits: Float32[Array, "S V"], temperature: Float32[Array, " S"]
) -> Float32[Array, "S V"]:
    """Return exp((logit - max) / temperature): probabilities up to a factor."""
    shifted = logits - jnp.max(logits, axis=1, keepdims=True)
    return jnp.exp(shifted / _divisor(temperature)[:, None])


def _largest_threshold(
    is_enough: Callable[[Array], Array], order: UInt32[Array, "G V"]
) -> UInt32[Array, " G"]:
    """Return the largest u32 threshold of each row for which `is_enough`, bit by bit from the top.

    `is_enough` must be monotone: true for 0, and false from some threshold on.
    """

    def decide_bit(step: Array, threshold: Array) -> Array:
        candidate = threshold | (jnp.uint32(1 << 31) >> step.astype(jnp.uint32))
        return jnp.where(is_enough(candidate), candidate, threshold)

    return lax.fori_loop(0, 32, decide_bit, jnp.zeros_like(order[:, 0]))


def _order_preserving_bits(x: Float32[Array, "G V"]) -> UInt32[Array, "G V"]:
    """Map floats to integers of the same order: flip the sign bit, or all bits of negatives."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _has_top_k(arrays: SamplingArrays, vocab_size: int) -> Bool[Array, " S"]:
    return (arrays.top_k > 0) & (arrays.top_k < vocab_size)


def _divisor(temperature: Float32[Array, " S"]) -> Float32[Array, " S"]:
    """Return the temperature where it divides, 1 for greedy rows, whose result is not used."""
    return jnp.where(temperature > 0, temperature, 1.0)
