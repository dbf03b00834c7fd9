"""Draws the next tokens of rows that follow a grammar, in a small program of its own.

Which tokens a grammar allows depends on the one before, which the host does not know yet when it
launches a step. So the step computes such a row's logits and holds them on the device, by slot; it
draws nothing. Once the host knows the token before, the step is still running: the host works out
the mask meanwhile and launches this program behind it, in front of the next step, which then finds
the token where it finds every newest token. The device waits for nobody.

Invariant: whatever a request's other parameters say, a token that the mask allows is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax
from jaxtyping import Array, Float32, Int32

from replicas.engine.adjustments import (
    ADJUSTED,
    GUIDED,
    LOGPROBS,
    OutputRows,
    adjust,
    note_drawn,
    row_flags,
    slot_row_fields,
)
from replicas.engine.engine import SequenceLogprobs, StepOutput
from replicas.engine.logprobs import logprob_words, pack_logprobs, token_entries
from replicas.engine.packed_fields import PackedFields
from replicas.engine.row_groups import for_each_group
from replicas.engine.sampler import SamplingArrays, sample, seed_words
from replicas.engine.scheduler import ScheduledSequence, StepPlan
from replicas.engine.step import unpack_sampling


class GuidedState(NamedTuple):
    """Of the device's state, what a guided draw changes; donated to it.

    Attributes:
        last_token_ids: i32 [num_slots + 1], see `DeviceState`.
        slot_rows: i32 [num_slots, W], see `DeviceState`.
    """

    last_token_ids: Int32[Array, " slots"]
    slot_rows: Int32[Array, "slots W"]


class GuidedDraw(NamedTuple):
    """A draw that the device may still be running.

    Attributes:
        indices: places among the step's scheduled sequences.
        token_ids: i32 [N], on the device; entry i belongs to `indices[i]`.
        logprobs: i32 [N, W], on the device.
    """

    indices: tuple[int, ...]
    token_ids: Int32[Array, " N"]
    logprobs: Int32[Array, "N W"]


def hold_logits(
    held: Float32[Array, "slots V"], logits: Float32[Array, "R V"], outputs: OutputRows
) -> Float32[Array, "slots V"]:
    """Copy the logits of guided rows to where their slots' are held; traced."""
    is_guided = outputs.have(GUIDED)
    guided_first = jnp.argsort(~is_guided, stable=True)

    def copy_row(index: Array, held: Array) -> Array:
        row = guided_first[index]
        of_row = lax.dynamic_slice_in_dim(logits, row, 1)
        return lax.dynamic_update_slice_in_dim(held, of_row, outputs.slots[row], axis=0)

    return lax.fori_loop(0, jnp.sum(is_guided), copy_row, held)


class GuidedLayout:
    """What a draw of up to `num_rows` sequences is told, packed into one vector."""

    def __init__(self, num_rows: int, *, num_slots: int, vocab_size: int) -> None:
        self.num_rows = num_rows
        self._num_slots = num_slots
        self._vocab_size = vocab_size

    def __str__(self) -> str:
        return f"guided{self.num_rows}"

    @cached_property
    def fields(self) -> PackedFields:
        """Layout of the packed vector; masks have a bit for each token, the lowest first."""
        num_rows = self.num_rows
        names = ("slots", "flags", "temperature", "top_k", "top_p", "positions")
        return PackedFields(
            {
                **dict.fromkeys(names, (num_rows,)),
                "seeds": (num_rows, 2),
                "masks": (num_rows, -(-self._vocab_size // 32)),
            }
        )

    def pack(self, parts: SequenceOf[ScheduledSequence]) -> npt.NDArray[np.int32]:
        """Write what a draw for these parts of a step needs; works out their masks.

        Returns:
            i32 [fields.size]; rows past the parts' write to the scratch slot.
        """
        packed = np.zeros(self.fields.size, np.int32)
        view = self.fields.views(packed)
        view["slots"][:] = self._num_slots
        samplings = [part.sequence.request.sampling for part in parts]
        count = len(parts)
        view["slots"][:count] = [part.slot for part in parts]
        view["flags"][:count] = [row_flags(sampling) for sampling in samplings]
        view["positions"][:count] = [part.start + part.num_tokens for part in parts]
        view["temperature"].view(np.float32)[:count] = [s.temperature for s in samplings]
        view["top_k"][:count] = [s.top_k for s in samplings]
        view["top_p"].view(np.float32)[:] = 1.0
        view["top_p"].view(np.float32)[:count] = [s.top_p for s in samplings]
        for row, sampling in enumerate(samplings):
            view["seeds"].view(np.uint32)[row] = seed_words(sampling.seed)
        for words, part in zip(view["masks"], parts, strict=False):
            assert part.sequence.matcher is not None
            part.sequence.matcher.fill_mask(words)
        return packed

    def draw(
        self, state: GuidedState, held: Float32[Array, "slots V"], packed: Int32[Array, " words"]
    ) -> tuple[GuidedState, Int32[Array, " N"], Int32[Array, "N W"]]:
        """Draw a token of each row and note it; traced.

        Rows are drawn in groups of fixed size, so that a row's bits do not depend on their number.
        """
        field = self.fields.split(packed)
        arrays = unpack_sampling(field, positions=field["positions"])
        outputs = OutputRows(slots=field["slots"], flags=field["flags"])
        row_fields = slot_row_fields(self._vocab_size)

        def visit(rows: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            token_ids, table = carry
            own = SamplingArrays(*(a.at[rows].get(mode="clip") for a in arrays))
            slots = outputs.slots.at[rows].get(mode="clip")
            flags = outputs.flags.at[rows].get(mode="clip")
            logits = held.at[slots].get(mode="clip")
            is_allowed = unpack_bits(field["masks"].at[rows].get(mode="clip"), self._vocab_size)
            allowed = jnp.where(is_allowed, logits, -jnp.inf)

            def adjusted() -> Array:
                own_rows = row_fields.split(state.slot_rows.at[slots].get(mode="clip"))
                changed = adjust(allowed, own, own_rows)
                has_any = jnp.max(changed, axis=1) > -jnp.inf
                return jnp.where((((flags & ADJUSTED) > 0) & has_any)[:, None], changed, allowed)

            allowed = lax.cond(jnp.any((flags & ADJUSTED) > 0), adjusted, lambda: allowed)
            drawn = sample(allowed, own)
            table = lax.cond(
                jnp.any((flags & LOGPROBS) > 0),
                lambda: table.at[rows].set(token_entries(logits, drawn), mode="drop"),
                lambda: table,
            )
            return token_ids.at[rows].set(drawn, mode="drop"), table

        token_ids, table = for_each_group(
            outputs.slots < self._num_slots,
            visit,
            (
                jnp.zeros(self.num_rows, jnp.int32),
                jnp.zeros((self.num_rows, logprob_words(self._vocab_size)), jnp.int32),
            ),
        )
        state = GuidedState(
            last_token_ids=state.last_token_ids.at[outputs.slots].set(token_ids),
            slot_rows=note_drawn(
                state.slot_rows,
                token_ids,
                arrays.positions,
                outputs,
                vocab_size=self._vocab_size,
            ),
        )
        return state, token_ids, table

    def lower(
        self,
        state: GuidedState,
        held: Float32[Array, "slots V"],
        sharding: jax.sharding.Sharding | None,
    ) -> jax.stages.Lowered:
        """Trace the program; reads shapes only."""
        packed = jax.ShapeDtypeStruct((self.fields.size,), jnp.int32, sharding=sharding)
        return jax.jit(self.draw, donate_argnums=0).lower(state, held, packed)


def unpack_bits(words: Int32[Array, "G W"], count: int) -> Array:
    """The first `count` bits of each row, as booleans [G, count]; traced."""
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None, :]) & 1
    return bits.reshape(words.shape[0], -1)[:, :count] > 0


def with_guided(plan: StepPlan, output: StepOutput, draw: GuidedDraw) -> StepOutput:
    """Wait for a draw, and put its tokens where the step itself has arbitrary ones."""
    drawn = np.asarray(draw.token_ids)[: len(draw.indices)].tolist()
    token_ids, logprobs = list(output.token_ids), dict(output.logprobs)
    table: npt.NDArray[np.int32] | None = None
    for row, (index, token_id) in enumerate(zip(draw.indices, drawn, strict=True)):
        token_ids[index] = [token_id]
        num_top = plan.scheduled[index].sequence.request.sampling.logprobs
        if num_top is not None:
            table = np.asarray(draw.logprobs) if table is None else table
            of_prompt = logprobs[index].prompt
            entry = pack_logprobs(table[row : row + 1], start=0, num_top=num_top)
            logprobs[index] = SequenceLogprobs(output=entry, prompt=of_prompt)
    return output._replace(token_ids=token_ids, logprobs=logprobs)
