"""What crosses between host and device in a step: one packed i32 vector in, token ids out.

One transfer instead of a dozen small ones: dispatch and transfer cost grow with the number of
arguments, not with these few kilobytes. What concerns few requests stays on the device, in a row of
`DeviceState.slot_rows` that is written when such a sequence takes the slot. The layout depends on
the bucket only. Here is the plain
one; `speculation` has that of steps that also verify drafts.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Int

from replicas.engine.adjustments import (
    ADJUSTED,
    GUIDED,
    OutputRows,
    make_slot_row,
    note_drawn,
    row_flags,
)
from replicas.engine.buckets import Bucket
from replicas.engine.engine import SequenceLogprobs, StepOutput
from replicas.engine.logprobs import pack_logprobs
from replicas.engine.packed_fields import PackedFields
from replicas.engine.sampler import SamplingArrays, seed_words
from replicas.engine.scheduler import ScheduledSequence, StepPlan
from replicas.engine.sequence import Sequence
from replicas.models.inputs import ModelInputs
from replicas.models.kv_cache import KVPages


class DeviceState(NamedTuple):
    """Everything that lives on the device from step to step; donated to each step.

    Attributes:
        kv_pages: [N, 2K, page, D] per layer, or [L, N, 2K, page, D].
        last_token_ids: i32 [num_slots + 1], the newest token of each slot; the last entry takes
            the writes of padding rows.
        slot_rows: i32 [num_slots, W], what changes the logits of each slot's sequence; see
            `adjustments`.
        texts: what drafts are looked up in; None without speculation.
    """

    kv_pages: KVPages
    last_token_ids: Int[Array, " slots"]
    slot_rows: Int[Array, "slots W"]
    texts: Texts | None = None


class Texts(NamedTuple):
    """The tokens that the KV pages stand for, which shared pages share too.

    Attributes:
        token_pages: i32 [N, page]; like a page's keys, tokens at positions that no sequence has
            reached are arbitrary.
        lengths: i32 [num_slots + 1], tokens of prompt and output in each slot, the newest included.
    """

    token_pages: Int[Array, "N page"]
    lengths: Int[Array, " slots"]


class StepRows(NamedTuple):
    """One step's work, as the device derives it from the packed vector and its own state.

    Attributes:
        inputs: what the model reads.
        output_rows: i32 [R], token rows whose next token is drawn.
        num_outputs: i32 [1], output rows in use.
        sampling: of each output row.
        outputs: slot and flags of each output row.
        targets: i32 [T], 1 + the prompt token behind a token row whose logprob is wanted, else 0.
    """

    inputs: ModelInputs
    output_rows: Int[Array, " R"]
    num_outputs: Int[Array, " 1"]
    sampling: SamplingArrays
    outputs: OutputRows
    targets: Int[Array, " T"]

    def finish(
        self, state: DeviceState, sampled: Int[Array, " S"], *, vocab_size: int
    ) -> tuple[DeviceState, Int[Array, " S"]]:
        """Note the drawn tokens; traced. Returns the state and what `PackedLayout.read` takes."""
        state = state._replace(
            last_token_ids=state.last_token_ids.at[self.outputs.slots].set(sampled),
            slot_rows=note_drawn(
                state.slot_rows,
                sampled,
                self.sampling.positions,
                self.outputs,
                vocab_size=vocab_size,
            ),
        )
        return state, sampled


def slot_shapes(num_seqs: int, pages_per_seq: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the fields that `pack_slots` fills."""
    return {
        "num_seqs": (1,),
        "flags": (num_seqs,),
        "temperature": (num_seqs,),
        "top_k": (num_seqs,),
        "top_p": (num_seqs,),
        "seeds": (num_seqs, 2),
        "page_indices": (num_seqs, pages_per_seq),
    }


def unpack_sampling(
    field: Mapping[str, Int[Array, ...]], positions: Int[Array, " S"]
) -> SamplingArrays:
    """Sampling parameters of each sequence, to draw the tokens of `positions`; traced."""
    return SamplingArrays(
        temperature=jax.lax.bitcast_convert_type(field["temperature"], jnp.float32),
        top_k=field["top_k"],
        top_p=jax.lax.bitcast_convert_type(field["top_p"], jnp.float32),
        seeds=jax.lax.bitcast_convert_type(field["seeds"], jnp.uint32),
        positions=positions,
    )


class SlotTable:
    """Per-slot rows that a step's rows are gathered from, so that only changes cost Python time.

    The host's mirror of what the scheduler assigned: page list and sampling parameters by slot.

    Attributes:
        flags: of what a step draws, by slot.
        guided_flags: of what is drawn behind a step.
    """

    def __init__(self, *, num_slots: int, pages_per_seq: int, vocab_size: int) -> None:
        self.num_slots = num_slots
        self.vocab_size = vocab_size
        self.pages_per_seq = pages_per_seq
        self.page_indices = np.zeros((num_slots, pages_per_seq), np.int32)
        self.flags = np.zeros(num_slots, np.int32)
        self.guided_flags = np.zeros(num_slots, np.int32)
        self.temperature = np.zeros(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int32)
        self.top_p = np.ones(num_slots, np.float32)
        self.seeds = np.zeros((num_slots, 2), np.uint32)
        self._owners: list[Sequence | None] = [None] * num_slots
        self._admissions = [0] * num_slots
        self._num_written = [0] * num_slots
        self._new_rows: list[npt.NDArray[np.int32]] = []

    def take_new_rows(self) -> list[npt.NDArray[np.int32]]:
        """[slot, row...] of each sequence that needs a row on the device and has none yet."""
        rows, self._new_rows = self._new_rows, []
        return rows

    def update(self, slot: int, sequence: Sequence) -> None:
        """Write what changed in a slot since the last step that contained it.

        Within one admission a page list only grows, so its tail suffices; a new owner, or the same
        sequence after a preemption, is written whole.
        """
        admission = sequence.num_admissions
        if self._owners[slot] is not sequence or self._admissions[slot] != admission:
            self._owners[slot], self._admissions[slot] = sequence, admission
            self._num_written[slot] = 0
            self._write_sampling(slot, sequence)
        first, last = self._num_written[slot], len(sequence.page_ids)
        if first < last:
            self.page_indices[slot, first:last] = sequence.page_ids[first:]
            self._num_written[slot] = last

    def _write_sampling(self, slot: int, sequence: Sequence) -> None:
        sampling = sequence.request.sampling
        flags = row_flags(sampling)
        if flags & ADJUSTED:
            row = make_slot_row(sequence, self.vocab_size)
            self._new_rows.append(np.concatenate([np.array([slot], np.int32), row]))
        self.flags[slot] = GUIDED if sampling.grammar else flags
        self.guided_flags[slot] = flags if sampling.grammar else 0
        self.temperature[slot] = sampling.temperature
        self.top_k[slot] = sampling.top_k
        self.top_p[slot] = sampling.top_p
        self.seeds[slot] = seed_words(sampling.seed)


def pack_slots(
    view: Mapping[str, npt.NDArray[np.int32]], table: SlotTable, slots: SequenceOf[int]
) -> None:
    """Gather what the table knows of the sequences' slots into the fields of `slot_shapes`."""
    num_seqs = len(slots)
    view["num_seqs"][0] = num_seqs
    view["flags"][:num_seqs] = table.flags[slots]
    pack_sampling(view, table, slots)
    view["page_indices"][:num_seqs] = table.page_indices[slots]


def pack_sampling(
    view: Mapping[str, npt.NDArray[np.int32]], table: SlotTable, slots: SequenceOf[int]
) -> None:
    """Gather the sampling parameters of slots into the fields that `unpack_sampling` reads."""
    count = len(slots)
    view["temperature"].view(np.float32)[:count] = table.temperature[slots]
    view["top_k"][:count] = table.top_k[slots]
    top_p = view["top_p"].view(np.float32)
    top_p[:count] = table.top_p[slots]
    top_p[count:] = 1.0
    view["seeds"].view(np.uint32)[:count] = table.seeds[slots]


def pack_targets(targets: npt.NDArray[np.int32], part: ScheduledSequence, first_row: int) -> None:
    """Mark the token rows of a part, the first of which is given, that give prompt logprobs."""
    rows = part.sequence.prompt_logprob_rows(part.start, part.start + part.num_tokens)
    if rows:
        tokens = part.sequence.token_ids[rows.start + 1 : rows.stop + 1]
        offset = first_row - part.start
        targets[rows.start + offset : rows.stop + offset] = np.asarray(tokens) + 1


def wants_logprobs(plan: StepPlan) -> bool:
    """Whether the host may read what a step computes of log-probabilities."""
    return any(part.sequence.wants_logprobs for part in plan.scheduled)


def read_logprobs(
    table: npt.NDArray[np.int32], part: ScheduledSequence, *, first_row: int, num_outputs: int
) -> SequenceLogprobs:
    """What a part's token rows say: those of prompt tokens, and its last `num_outputs`.

    Args:
        table: i32 [T, W], see `compute_logprobs`.
        part: of the plan.
        first_row: its first token row.
        num_outputs: rows whose tokens were drawn; a plain step has one a sequence.
    """
    sampling = part.sequence.request.sampling
    prompt, output = None, None
    num_rows = part.num_tokens - part.num_drafts
    if sampling.prompt_logprobs is not None:
        rows = part.sequence.prompt_logprob_rows(part.start, part.start + num_rows)
        if rows:
            offset = first_row - part.start
            prompt = pack_logprobs(
                table[rows.start + offset : rows.stop + offset],
                start=rows.start + 1,
                num_top=sampling.prompt_logprobs,
            )
    if sampling.logprobs is not None and part.samples:
        first = first_row + num_rows - 1
        output = pack_logprobs(
            table[first : first + num_outputs], start=0, num_top=sampling.logprobs
        )
    return SequenceLogprobs(output=output, prompt=prompt)


class PackedLayout:
    """A bucket's step without drafts: each sequence yields one token."""

    def __init__(self, bucket: Bucket, table: SlotTable) -> None:
        self.bucket = bucket
        self._table = table

    @cached_property
    def fields(self) -> PackedFields:
        """Layout of the packed vector.

        A token id whose value the host does not know yet is encoded in `token_slots` instead: the
        slot whose newest token is the row's input, or num_slots for none.
        """
        num_tokens, num_seqs = self.bucket.num_tokens, self.bucket.num_seqs
        return PackedFields(
            {
                "token_ids": (num_tokens,),
                "token_slots": (num_tokens,),
                "positions": (num_tokens,),
                "targets": (num_tokens,),
                "kv_lens": (num_seqs,),
                "cu_q_lens": (num_seqs + 1,),
                "slots": (num_seqs,),
                **slot_shapes(num_seqs, self._table.pages_per_seq),
            }
        )

    def pack(self, plan: StepPlan) -> npt.NDArray[np.int32]:
        """Write a plan into a fresh packed vector.

        Returns:
            i32 [fields.size]; rows past the plan's are padding: they read the null page's sequence
            of length 0, and write to the scratch slot.
        """
        table = self._table
        packed = np.zeros(self.fields.size, np.int32)
        view = self.fields.views(packed)
        view["token_slots"][:] = table.num_slots
        view["slots"][:] = table.num_slots
        num_singles = self._pack_singles(view, plan.scheduled)
        row = num_singles
        slots = [part.slot for part in plan.scheduled]
        for index, part in enumerate(plan.scheduled[num_singles:], num_singles):
            sequence, end = part.sequence, part.start + part.num_tokens
            table.update(part.slot, sequence)
            known = sequence.token_ids[part.start : end]
            view["token_ids"][row : row + len(known)] = known
            if len(known) < part.num_tokens:
                view["token_slots"][row + len(known)] = part.slot
            view["positions"][row : row + part.num_tokens] = np.arange(part.start, end)
            view["kv_lens"][index] = end
            if part.samples:
                view["slots"][index] = part.slot
            if sequence.request.sampling.prompt_logprobs is not None:
                pack_targets(view["targets"], part, row)
            row += part.num_tokens
            view["cu_q_lens"][index + 1] = row
        view["cu_q_lens"][len(slots) + 1 :] = row
        pack_slots(view, table, slots)
        return packed

    def _pack_singles(
        self,
        view: Mapping[str, npt.NDArray[np.int32]],
        scheduled: SequenceOf[ScheduledSequence],
    ) -> int:
        """Write the parts of one token that a plan begins with; returns how many they are.

        By lists, since an array takes 100 ns for each single value: a step of many streams is made
        of these. What gives prompt logprobs is left to the general way.
        """
        table = self._table
        token_ids: list[int] = []
        token_slots: list[int] = []
        positions: list[int] = []
        sampled_slots: list[int] = []
        for part in scheduled:
            sequence, slot, start, num_tokens, samples, _ = part
            if num_tokens != 1 or sequence.next_prompt_logprob < sequence.num_prompt_tokens:
                break
            table.update(slot, sequence)
            if start < len(sequence.token_ids):
                token_ids.append(sequence.token_ids[start])
                token_slots.append(table.num_slots)
            else:
                token_ids.append(0)
                token_slots.append(slot)
            positions.append(start)
            sampled_slots.append(slot if samples else table.num_slots)
        count = len(positions)
        view["token_ids"][:count] = token_ids
        view["token_slots"][:count] = token_slots
        view["positions"][:count] = positions
        view["kv_lens"][:count] = view["positions"][:count] + 1
        view["slots"][:count] = sampled_slots
        view["cu_q_lens"][: count + 1] = np.arange(count + 1)
        return count

    def begin(self, state: DeviceState, packed: Int[Array, " words"]) -> StepRows:
        """Unpack a step; traced."""
        field = self.fields.split(packed)
        token_ids = jnp.where(
            field["token_slots"] < self._table.num_slots,
            state.last_token_ids[field["token_slots"]],
            field["token_ids"],
        )
        inputs = ModelInputs(
            token_ids=token_ids,
            positions=field["positions"],
            kv_lens=field["kv_lens"],
            page_indices=field["page_indices"],
            cu_q_lens=field["cu_q_lens"],
            num_seqs=field["num_seqs"],
        )
        return StepRows(
            inputs=inputs,
            output_rows=jnp.maximum(field["cu_q_lens"][1:] - 1, 0),
            num_outputs=inputs.num_seqs,
            sampling=unpack_sampling(field, positions=field["kv_lens"]),
            outputs=OutputRows(
                slots=field["slots"],
                # A row that only computes a prompt draws nothing.
                flags=jnp.where(field["slots"] < self._table.num_slots, field["flags"], 0),
            ),
            targets=field["targets"],
        )

    @staticmethod
    def read(
        plan: StepPlan, output: npt.NDArray[np.int32], logprobs: npt.NDArray[np.int32] | None
    ) -> StepOutput:
        """Unpack a step's output.

        Args:
            plan: what was computed.
            output: what `StepRows.finish` returned, cut to the plan's sequences.
            logprobs: i32 [T, W], see `compute_logprobs`; None where `wants_logprobs` is false.
        """
        by_index: dict[int, SequenceLogprobs] = {}
        if logprobs is not None:
            row = 0
            for index, part in enumerate(plan.scheduled):
                by_index[index] = read_logprobs(logprobs, part, first_row=row, num_outputs=1)
                row += part.num_tokens
        return StepOutput(token_ids=output[:, None].tolist(), num_draft_tokens=0, logprobs=by_index)
