"""Changes to logits before a token is drawn: penalties, biases, banned and allowed tokens, min-p.

What they need of a sequence lies on the device, one row per slot. The host writes a row when the
sequence takes the slot, from prompt and output so far; from then on each step notes what it draws
in the rows that depend on it. So a row is right after a preemption, a migration and a prefix hit,
and what a slot held before is overwritten. Rows of requests without such parameters are never read.

In vLLM's order: allowed tokens, bans and biases, repetition, frequency and presence penalty, then
(by temperature) min-p; top-k and top-p follow in the sampler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from kernels.token_masks import unpack_bits
from replicas.engine.packed_fields import PackedFields
from replicas.engine.sampler import ChangeFn, SamplingArrays, sample
from replicas.engine.sequence import Sequence
from replicas.wire import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float32, Int32

ADJUSTED = 1
"""Flag of a row whose logits are adjusted before the draw."""
TRACKED = 2
"""Flag of a row whose drawn token must be noted in its slot's row."""
LOGPROBS = 4
"""Flag of a row whose drawn token's log-probability is wanted."""
GUIDED = 8
"""Flag of a row that the step does not draw: its logits are held for a draw of its own."""

_MAX_EOS_TOKEN_IDS = 64
_MAX_BIASES = MAX_LOGIT_BIAS + MAX_BAD_WORDS + MAX_STOP_TOKEN_IDS + _MAX_EOS_TOKEN_IDS
_FOR_EVER = np.iinfo(np.int32).max
# In `counts` beside the number of times that the output holds a token.
_IN_PROMPT = 1 << 30


class OutputRows(NamedTuple):
    """Of each output row.

    Attributes:
        slots: slot of its sequence.
        flags: of `ADJUSTED`, `TRACKED`, `LOGPROBS` and `GUIDED`, those that hold; 0 where nothing
            is drawn.
    """

    slots: Int32[Array, " R"]
    flags: Int32[Array, " R"]

    def have(self, flag: int) -> Bool[Array, " R"]:
        """Rows with a flag."""
        return (self.flags & flag) > 0


def row_flags(sampling: SamplingParams) -> int:
    """Flags of a request's rows."""
    flags = ADJUSTED if sampling.adjusts_logits else 0
    flags |= TRACKED if sampling.depends_on_output else 0
    return flags | (LOGPROBS if sampling.logprobs is not None else 0)


def slot_row_fields(vocab_size: int) -> PackedFields:
    """Layout of a slot's row.

    A bias counts for the draws of positions before its end. A bad word stands at the end of its
    row, -1 before it. The output's latest tokens stand at their position modulo the width.
    """
    return PackedFields(
        {
            "counts": (vocab_size,),
            "recent": (MAX_BAD_WORD_TOKENS,),
            "first_output": (1,),
            "penalties": (3,),
            "min_p": (1,),
            "bias_ids": (_MAX_BIASES,),
            "biases": (_MAX_BIASES,),
            "bias_ends": (_MAX_BIASES,),
            "bad_words": (MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS),
            "allowed": (-(-vocab_size // 32),),
        }
    )


def make_slot_row(sequence: Sequence, vocab_size: int) -> npt.NDArray[np.int32]:
    """The row of a sequence whose tokens are all known; O(vocabulary)."""
    sampling, first_output = sequence.request.sampling, sequence.first_output
    fields = slot_row_fields(vocab_size)
    row = np.zeros(fields.size, np.int32)
    view = fields.views(row)
    token_ids = np.frombuffer(sequence.token_ids, np.int32).copy()
    prompt, output = token_ids[:first_output], token_ids[first_output:]
    view["counts"][:] = np.bincount(output, minlength=vocab_size)
    view["counts"][np.unique(prompt)] += _IN_PROMPT
    view["first_output"][0] = first_output
    for position in range(max(first_output, len(token_ids) - MAX_BAD_WORD_TOKENS), len(token_ids)):
        view["recent"][position % MAX_BAD_WORD_TOKENS] = token_ids[position]
    view["penalties"].view(np.float32)[:] = (
        sampling.repetition_penalty,
        sampling.frequency_penalty,
        sampling.presence_penalty,
    )
    view["min_p"].view(np.float32)[0] = sampling.min_p
    biases = _biases(sequence)
    view["bias_ids"][:] = vocab_size  # no such token
    for index, (token_id, bias, end) in enumerate(biases):
        view["bias_ids"][index] = token_id
        view["biases"].view(np.float32)[index] = bias
        view["bias_ends"][index] = end
    view["bad_words"][:] = -1
    words = [word for word in sampling.bad_words if len(word) > 1]
    for index, word in enumerate(words):
        view["bad_words"][index, MAX_BAD_WORD_TOKENS - len(word) :] = word
    view["allowed"][:] = _bits(sampling.allowed_token_ids, vocab_size)
    return row


def _biases(sequence: Sequence) -> list[tuple[int, float, int]]:
    """(token id, bias, end) of everything that is added to single logits."""
    sampling = sequence.request.sampling
    biases = [(token_id, bias, _FOR_EVER) for token_id, bias in sampling.logit_bias]
    banned = {word[0] for word in sampling.bad_words if len(word) == 1}
    biases += [(token_id, -np.inf, _FOR_EVER) for token_id in sorted(banned)]
    if sampling.min_tokens > 0:
        end = sequence.first_output + sampling.min_tokens
        stops = sorted(sequence.stop_token_ids)
        biases += [(token_id, -np.inf, end) for token_id in stops]
    return biases


def _bits(token_ids: tuple[int, ...], vocab_size: int) -> npt.NDArray[np.int32]:
    """A bit for each id, 32 to a word, the lowest first; all of them where none is given."""
    num_words = -(-vocab_size // 32)
    if not token_ids:
        return np.full(num_words, -1, np.int32)
    is_allowed = np.zeros(num_words * 32, np.uint8)
    is_allowed[list(token_ids)] = 1
    return np.packbits(is_allowed, bitorder="little").view("<i4")


def draw(
    logits: Float32[Array, "R V"],
    arrays: SamplingArrays,
    outputs: OutputRows,
    slot_rows: Int32[Array, "slots W"],
) -> Int32[Array, " R"]:
    """Draw the token of every row that has a slot and is not guided; others get an arbitrary one.

    The logits of rows that ask for it are adjusted first.
    """
    return sample(
        logits,
        arrays,
        (outputs.slots < slot_rows.shape[0]) & ~outputs.have(GUIDED),
        is_changed=outputs.have(ADJUSTED),
        change=adjust_as_asked(outputs, slot_rows),
    )


def adjust_as_asked(outputs: OutputRows, slot_rows: Int32[Array, "slots W"]) -> ChangeFn:
    """Return what adjusts a group of these output rows as their slots ask for it; traced."""

    def change(logits: Array, arrays: SamplingArrays, rows: Array) -> Array:
        slots = outputs.slots.at[rows].get(mode="clip")
        fields = slot_row_fields(logits.shape[1])
        return adjust(logits, arrays, fields.split(slot_rows.at[slots].get(mode="clip")))

    return change


def note_drawn(
    slot_rows: Int32[Array, "slots W"],
    tokens: Int32[Array, " S"],
    positions: Int32[Array, " S"],
    outputs: OutputRows,
    *,
    vocab_size: int,
) -> Int32[Array, "slots W"]:
    """Note one drawn token per sequence in the rows that depend on it."""
    fields = slot_row_fields(vocab_size)
    # A slot that does not exist: what is written there is dropped.
    slots = jnp.where(outputs.have(TRACKED), outputs.slots, slot_rows.shape[0])
    counted = slot_rows.at[slots, fields.start("counts") + tokens].add(1, mode="drop")
    places = fields.start("recent") + positions % MAX_BAD_WORD_TOKENS
    return counted.at[slots, places].set(tokens, mode="drop")


def adjust(
    logits: Float32[Array, "G V"], arrays: SamplingArrays, row: dict[str, Array]
) -> Float32[Array, "G V"]:
    """Return the logits of what is drawn from; what must not be drawn is minus infinity."""
    vocab_size = logits.shape[1]
    members = jnp.arange(logits.shape[0])[:, None]
    logits = jnp.where(unpack_bits(row["allowed"], vocab_size), logits, -jnp.inf)

    biases = lax.bitcast_convert_type(row["biases"], jnp.float32)
    is_due = arrays.positions[:, None] < row["bias_ends"]
    logits = logits.at[members, row["bias_ids"]].add(jnp.where(is_due, biases, 0.0), mode="drop")
    banned = _banned_by_words(arrays.positions, row)
    logits = logits.at[members, jnp.where(banned < 0, vocab_size, banned)].set(
        -jnp.inf, mode="drop"
    )

    penalties = lax.bitcast_convert_type(row["penalties"], jnp.float32)
    repetition, frequency, presence = (penalties[:, i, None] for i in range(3))
    num_seen = row["counts"] & (_IN_PROMPT - 1)
    scaled = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(row["counts"] > 0, scaled, logits)
    logits -= frequency * num_seen.astype(jnp.float32)
    logits -= jnp.where(num_seen > 0, presence, 0.0)

    min_p = lax.bitcast_convert_type(row["min_p"], jnp.float32)
    largest = jnp.max(logits, axis=1, keepdims=True)
    least = largest + arrays.temperature[:, None] * jnp.log(jnp.maximum(min_p, 1e-37))
    is_cut = (logits < least) & (min_p > 0)
    return jnp.where(is_cut, -jnp.inf, logits)


def _banned_by_words(positions: Int32[Array, " G"], row: dict[str, Array]) -> Int32[Array, "G N"]:
    """The last token of each bad word whose other tokens end the output; -1 for the others."""
    words = row["bad_words"]
    before = positions[:, None] - jnp.arange(MAX_BAD_WORD_TOKENS - 1, 0, -1)[None, :]
    latest = jnp.take_along_axis(row["recent"], before % MAX_BAD_WORD_TOKENS, axis=1)
    latest = jnp.where(before >= row["first_output"], latest, -2)
    prefixes = words[:, :, :-1]
    is_there = (prefixes == -1) | (prefixes == latest[:, None, :])
    return jnp.where(jnp.all(is_there, axis=2), words[:, :, -1], -1)
