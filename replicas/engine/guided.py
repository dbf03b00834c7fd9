"""Draws the next tokens of rows that follow a grammar, in a small program of its own.

Which tokens a grammar allows depends on the one before, which the host does not know yet when it
launches a step. So the step draws nothing for such a row, and its logits stay on the device. Once
the host knows the token before, the step is still running: the host works out the mask meanwhile
and launches this program behind it, in front of the next step, which then finds the token where it
finds every newest token. The device waits for nobody.

Invariant: whatever a request's other parameters say, a token that the mask allows is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from functools import cached_property
from typing import Any, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from replicas.engine.adjustments import (
    ADJUSTED,
    LOGPROBS,
    OutputRows,
    adjust_as_asked,
    note_drawn,
)
from replicas.engine.engine import SequenceLogprobs, StepOutput
from replicas.engine.logprobs import logprob_words, pack_logprobs, token_entries
from replicas.engine.packed_fields import PackedFields
from replicas.engine.row_groups import GROUP_ROWS, for_each_group
from replicas.engine.sampler import SamplingArrays, sample
from replicas.engine.scheduler import ScheduledSequence, StepPlan
from replicas.engine.step import SlotTable, pack_sampling, unpack_sampling
from replicas.grammar import Matcher, fill_masks


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


class HeldLogits(NamedTuple):
    """What a step computed for rows whose tokens are drawn behind it; on the device.

    Attributes:
        logits: f32 [R, V], of the step's output rows.
        rows: i32 [num_slots], the output row of each slot that has one; arbitrary for the others.
    """

    logits: Float32[Array, "R V"]
    rows: Int32[Array, " slots"]


class ApplyTokenMasks(Protocol):
    """See `kernels.token_masks`."""

    def __call__(
        self,
        logits: Float32[Array, "R V"],
        rows: Int32[Array, " N"],
        masks: Int32[Array, "N W"],
        needs_logits: Bool[Array, " N"],
        num_rows: Int32[Array, " 1"],
    ) -> tuple[Float32[Array, "N V"], Int32[Array, " N"]]:
        """Allowed logits, and the best allowed token, of each row."""
        ...


def hold_logits(
    logits: Float32[Array, "R V"], outputs: OutputRows, *, num_slots: int
) -> HeldLogits:
    """Note where a draw behind the step finds each slot's logits; traced."""
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)
    by_slot = jnp.zeros(num_slots, jnp.int32).at[outputs.slots].set(rows, mode="drop")
    return HeldLogits(logits, by_slot)


class GuidedLayout:
    """What a draw of up to `num_rows` sequences is told, packed into one vector."""

    def __init__(
        self,
        num_rows: int,
        *,
        num_outputs: int,
        table: SlotTable,
        apply_token_masks: ApplyTokenMasks,
    ) -> None:
        """Lay a draw out.

        Args:
            num_rows: N, a multiple of the rows of a group.
            num_outputs: R, output rows of the steps that it follows.
            table: knows the sequences' sampling parameters.
            apply_token_masks: the kernel.
        """
        assert num_rows % GROUP_ROWS == 0, num_rows
        self.num_rows = num_rows
        self.num_outputs = num_outputs
        self._table = table
        self._apply_token_masks = apply_token_masks

    def __str__(self) -> str:
        return f"guided{self.num_rows}of{self.num_outputs}"

    @cached_property
    def fields(self) -> PackedFields:
        """Layout of the packed vector; masks have a bit for each token, the lowest first."""
        num_rows = self.num_rows
        names = ("slots", "flags", "temperature", "top_k", "top_p", "positions")
        return PackedFields(
            {
                "num_rows": (1,),
                **dict.fromkeys(names, (num_rows,)),
                "seeds": (num_rows, 2),
                "masks": (num_rows, -(-self._table.vocab_size // 32)),
            }
        )

    def pack(self, parts: SequenceOf[ScheduledSequence]) -> npt.NDArray[np.int32]:
        """Write what a draw for these parts of a step needs; works out their masks.

        Returns:
            i32 [fields.size]; rows past the parts' write to the scratch slot, and have no mask.
        """
        count, slots = len(parts), [part.slot for part in parts]
        packed = np.empty(self.fields.size, np.int32)
        packed[: self.fields.start("masks")] = 0
        view = self.fields.views(packed)
        view["num_rows"][0] = count
        view["slots"][:count] = slots
        view["slots"][count:] = self._table.num_slots
        view["flags"][:count] = self._table.guided_flags[slots]
        view["positions"][:count] = [part.start + part.num_tokens for part in parts]
        pack_sampling(view, self._table, slots)
        fill_masks([cast("Matcher", part.sequence.matcher) for part in parts], view["masks"])
        return packed

    def draw(
        self, state: GuidedState, held: HeldLogits, packed: Int32[Array, " words"]
    ) -> tuple[GuidedState, Int32[Array, " N"], Int32[Array, "N W"]]:
        """Draw a token of each row and note it; traced.

        The likeliest allowed token is all that a greedy row needs, and the mask finds it.
        """
        field = self.fields.split(packed)
        arrays = unpack_sampling(field, positions=field["positions"])
        outputs = OutputRows(slots=field["slots"], flags=field["flags"])
        is_row = outputs.slots < self._table.num_slots
        is_drawn = is_row & ((arrays.temperature > 0) | outputs.have(ADJUSTED))
        held_rows = held.rows.at[outputs.slots].get(mode="clip")
        allowed, best = self._apply_token_masks(
            held.logits, held_rows, field["masks"], is_drawn, field["num_rows"]
        )
        adjust = adjust_as_asked(outputs, state.slot_rows)

        def adjust_allowed(logits: Array, own: SamplingArrays, rows: Array) -> Array:
            adjusted = adjust(logits, own, rows)
            has_any = jnp.max(adjusted, axis=1) > -jnp.inf
            return jnp.where(has_any[:, None], adjusted, logits)

        drawn = sample(
            allowed, arrays, is_drawn, is_changed=outputs.have(ADJUSTED), change=adjust_allowed
        )
        token_ids = jnp.where(is_drawn, drawn, best)

        def visit(rows: Array, table: Array) -> Array:
            own_rows = held_rows.at[rows].get(mode="clip")
            entries = token_entries(
                held.logits.at[own_rows].get(mode="clip"), token_ids.at[rows].get(mode="clip")
            )
            return table.at[rows].set(entries, mode="drop")

        has_logprobs = is_row & outputs.have(LOGPROBS)
        table = jnp.zeros((self.num_rows, logprob_words(self._table.vocab_size)), jnp.int32)
        table = lax.cond(
            jnp.any(has_logprobs), lambda: for_each_group(has_logprobs, visit, table), lambda: table
        )
        state = GuidedState(
            last_token_ids=state.last_token_ids.at[outputs.slots].set(token_ids),
            slot_rows=note_drawn(
                state.slot_rows,
                token_ids,
                arrays.positions,
                outputs,
                vocab_size=self._table.vocab_size,
            ),
        )
        return state, token_ids, table

    def held_shapes(self, sharding: jax.sharding.Sharding | None) -> HeldLogits:
        """What a step holds, abstractly."""
        logits = (self.num_outputs, self._table.vocab_size)
        return HeldLogits(
            *(
                cast("Any", jax.ShapeDtypeStruct(shape, dtype, sharding=sharding))
                for shape, dtype in ((logits, jnp.float32), ((self._table.num_slots,), jnp.int32))
            )
        )

    def lower(
        self, state: GuidedState, sharding: jax.sharding.Sharding | None
    ) -> jax.stages.Lowered:
        """Trace the program; reads shapes only."""
        packed = jax.ShapeDtypeStruct((self.fields.size,), jnp.int32, sharding=sharding)
        held = self.held_shapes(sharding)
        return jax.jit(self.draw, donate_argnums=0).lower(state, held, packed)


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
