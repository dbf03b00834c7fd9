"""Steps that also verify guesses of the tokens after the next one.

A decode row may have drafts behind it, at the positions that follow. Each row draws its token as
always, from the logits and with the key of its position. A draft that equals what was drawn before
it has been computed on the right past, so what is drawn, up to and including the first token that
its draft did not foresee, is what plain decoding draws, bit for bit, whether greedy or sampled.

How many drafts are right is known on the device only when the next step starts. So what follows
from it lives there: how long each slot's text is, and the text itself, in which drafts are looked
up. The host plans with the fewest tokens that a sequence can have, and reserves pages for the most.
Keys of a wrong draft stand at positions that are written again before a row reads them.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Int

from replicas.engine.adjustments import OutputRows, note_drawn
from replicas.engine.buckets import MIN_ROWS, Bucket
from replicas.engine.engine import SequenceLogprobs, StepOutput
from replicas.engine.packed_fields import PackedFields
from replicas.engine.prompt_lookup import PromptLookup, find_drafts
from replicas.engine.sampler import SamplingArrays
from replicas.engine.scheduler import StepPlan
from replicas.engine.step import (
    DeviceState,
    SlotTable,
    Texts,
    pack_slots,
    pack_targets,
    read_logprobs,
    slot_shapes,
    unpack_sampling,
)
from replicas.models.inputs import ModelInputs

_MAX_DRAFTING = MIN_ROWS // 2
"""Sequences that may have drafts in a step, the first ones: together they fit the fewest rows."""


class VerifyRows(NamedTuple):
    """One step's work, as `StepRows`, where a sequence may have several outputs.

    Attributes:
        inputs: what the model reads.
        output_rows: i32 [R], token rows whose next token is drawn; a sequence's are consecutive.
        num_outputs: i32 [1], output rows in use.
        sampling: of each output row.
        outputs: slot and flags of each output row.
        targets: i32 [T], 1 + the prompt token behind a token row whose logprob is wanted, else 0.
        flags: i32 [S], flags of each sequence.
        slots: i32 [S], slot that takes the sequence's newest token, or num_slots for none.
        text_lens: i32 [S], length of the text that the first output continues.
        first_outputs: i32 [S], where a sequence's outputs begin.
        num_drafts: i32 [S], outputs but the first: each is drawn behind a draft.
        limits: i32 [S], length at which the text ends.
        draft_width: D, most drafts of a sequence.
    """

    inputs: ModelInputs
    output_rows: Int[Array, " R"]
    num_outputs: Int[Array, " 1"]
    sampling: SamplingArrays
    outputs: OutputRows
    targets: Int[Array, " T"]
    flags: Int[Array, " S"]
    slots: Int[Array, " S"]
    text_lens: Int[Array, " S"]
    first_outputs: Int[Array, " S"]
    num_drafts: Int[Array, " S"]
    limits: Int[Array, " S"]
    draft_width: int

    def finish(
        self, state: DeviceState, sampled: Int[Array, " R"], *, vocab_size: int
    ) -> tuple[DeviceState, Int[Array, "S 3+D"]]:
        """Take each sequence's drawn tokens up to the first that its draft did not foresee; traced.

        Returns:
            The state with them, and for `VerifyLayout.read` per sequence: how many, how many drafts
            were verified, and all drawn tokens.
        """
        assert state.texts is not None
        token_ids = self.inputs.token_ids
        places = jnp.arange(self.draft_width + 1, dtype=jnp.int32)[None, :]
        outputs = jnp.minimum(self.first_outputs[:, None] + places, sampled.shape[0] - 1)
        drawn = sampled[outputs]
        next_rows = jnp.minimum(self.output_rows[outputs] + 1, token_ids.shape[0] - 1)
        is_foreseen = (drawn == token_ids[next_rows]) & (places < self.num_drafts[:, None])
        num_accepted = jnp.sum(jnp.cumprod(is_foreseen.astype(jnp.int32), axis=1), axis=1)
        newest = jnp.take_along_axis(drawn, num_accepted[:, None], axis=1)[:, 0]
        text_lens = jnp.minimum(self.text_lens + 1 + num_accepted, self.limits)
        texts = Texts(
            token_pages=_write_tokens(state.texts.token_pages, self.inputs),
            lengths=state.texts.lengths.at[self.slots].set(text_lens),
        )
        state = state._replace(
            last_token_ids=state.last_token_ids.at[self.slots].set(newest),
            # Sequences whose draws are noted have no drafts: the newest is the only one.
            slot_rows=note_drawn(
                state.slot_rows,
                newest,
                self.text_lens,
                OutputRows(slots=self.slots, flags=self.flags),
                vocab_size=vocab_size,
            ),
            texts=texts,
        )
        counts = jnp.stack([1 + num_accepted, self.num_drafts], axis=1)
        return state, jnp.concatenate([counts, drawn], axis=1)


def text_shapes(
    *, num_pages: int, page_size: int, num_slots: int, sharding: jax.sharding.Sharding | None
) -> Texts:
    """Shapes of the texts of a device; all zeros while it has run nothing."""

    def shape(*sizes: int) -> Any:
        return jax.ShapeDtypeStruct(sizes, jnp.int32, sharding=sharding)

    return Texts(token_pages=shape(num_pages, page_size), lengths=shape(num_slots + 1))


class VerifyLayout:
    """A bucket's step in which decode rows may have drafts behind them."""

    def __init__(self, bucket: Bucket, *, table: SlotTable, lookup: PromptLookup) -> None:
        self.bucket = bucket
        self._table = table
        self._lookup = lookup

    @cached_property
    def fields(self) -> PackedFields:
        """Layout of the packed vector.

        Per sequence: its rows, the drafts at most among them, and where they start; or that they
        start at the end of a text whose length the host does not know yet (`is_chained`). The
        token ids of drafts, and of a chained sequence's first row, are filled in on the device.
        """
        num_seqs = self.bucket.num_seqs
        names = ("slots", "starts", "num_rows", "max_drafts", "is_chained", "limits")
        return PackedFields(
            {
                "token_ids": (self.bucket.num_tokens,),
                "targets": (self.bucket.num_tokens,),
                **dict.fromkeys(names, (num_seqs,)),
                **slot_shapes(num_seqs, self._table.pages_per_seq),
            }
        )

    def pack(self, plan: StepPlan) -> npt.NDArray[np.int32]:
        """Write a plan into a fresh packed vector, i32 [fields.size].

        Rows past the plan's are padding: sequences without rows on the scratch slot.
        """
        table = self._table
        packed = np.zeros(self.fields.size, np.int32)
        view = self.fields.views(packed)
        view["slots"][:] = table.num_slots
        row = 0
        slots: list[int] = []
        for index, part in enumerate(plan.scheduled):
            sequence = part.sequence
            table.update(part.slot, sequence)
            slots.append(part.slot)
            end = part.start + part.num_tokens - part.num_drafts
            known = sequence.token_ids[part.start : end]
            view["token_ids"][row : row + len(known)] = known
            view["is_chained"][index] = len(known) < end - part.start
            if part.samples:
                view["slots"][index] = part.slot
            if sequence.request.sampling.prompt_logprobs is not None:
                pack_targets(view["targets"], part, row)
            view["starts"][index] = part.start
            view["num_rows"][index] = part.num_tokens
            view["max_drafts"][index] = part.num_drafts
            view["limits"][index] = sequence.max_total_tokens
            row += part.num_tokens
        pack_slots(view, table, slots)
        return packed

    def begin(self, state: DeviceState, packed: Int[Array, " words"]) -> VerifyRows:
        """Find drafts and lay out the step's rows; traced."""
        assert state.texts is not None
        field = self.fields.split(packed)
        slots, num_rows, max_drafts = field["slots"], field["num_rows"], field["max_drafts"]
        is_chained = field["is_chained"] > 0
        starts = jnp.where(is_chained, state.texts.lengths[slots] - 1, field["starts"])
        first_rows = jnp.cumsum(num_rows) - num_rows
        first_token_ids = jnp.where(
            is_chained,
            state.last_token_ids[slots],
            field["token_ids"].at[first_rows].get(mode="clip"),
        )
        num_known = num_rows - max_drafts
        text_lens = starts + num_known
        # The text may have reached its limit without the host knowing: then one row is computed at
        # its last position, and what it draws is dropped.
        max_drafts = jnp.clip(field["limits"] - text_lens - 1, 0, max_drafts)
        drafts, num_drafts = self._find_drafts(
            state.texts, field["page_indices"], text_lens, first_token_ids, max_drafts
        )

        q_lens = num_known + num_drafts
        cu_q_lens = jnp.pad(jnp.cumsum(q_lens), (1, 0))
        rows = jnp.arange(self.bucket.num_tokens, dtype=jnp.int32)
        owners, offsets = _owners(rows, cu_q_lens)
        is_row = rows < cu_q_lens[-1]
        host_rows = first_rows[owners] + offsets
        token_ids = field["token_ids"].at[host_rows].get(mode="clip")
        token_ids = jnp.where(offsets == 0, first_token_ids[owners], token_ids)
        places = offsets - num_known[owners]
        token_ids = jnp.where(
            places < 0, token_ids, drafts.at[owners, jnp.maximum(places, 0)].get(mode="clip")
        )
        targets = jnp.where(is_row, field["targets"].at[host_rows].get(mode="clip"), 0)
        positions = jnp.where(is_row, starts[owners] + offsets, 0)
        inputs = ModelInputs(
            token_ids=jnp.where(is_row, token_ids, 0),
            positions=positions,
            kv_lens=jnp.where(q_lens > 0, starts + q_lens, 0),
            page_indices=field["page_indices"],
            cu_q_lens=cu_q_lens,
            num_seqs=field["num_seqs"],
        )

        num_outputs = jnp.where(q_lens > 0, 1 + num_drafts, 0)
        cu_outputs = jnp.pad(jnp.cumsum(num_outputs), (1, 0))
        outputs = jnp.arange(self.bucket.num_seqs, dtype=jnp.int32)
        owners, offsets = _owners(outputs, cu_outputs)
        is_output = outputs < cu_outputs[-1]
        output_rows = cu_q_lens[owners + 1] - num_outputs[owners] + offsets
        output_rows = jnp.where(is_output, output_rows, 0)
        sampling = unpack_sampling(field, positions=text_lens)
        sampling = SamplingArrays(*(of_sequence[owners] for of_sequence in sampling))
        flags = jnp.where(slots < self._table.num_slots, field["flags"], 0)
        return VerifyRows(
            inputs=inputs,
            output_rows=output_rows,
            num_outputs=cu_outputs[-1:],
            sampling=sampling._replace(
                temperature=jnp.where(is_output, sampling.temperature, 0.0),
                positions=positions[output_rows] + 1,
            ),
            outputs=OutputRows(slots=slots[owners], flags=jnp.where(is_output, flags[owners], 0)),
            targets=targets,
            flags=flags,
            slots=slots,
            text_lens=text_lens,
            first_outputs=cu_outputs[:-1],
            num_drafts=num_drafts,
            limits=field["limits"],
            draft_width=self._lookup.num_drafts,
        )

    @staticmethod
    def read(
        plan: StepPlan, output: npt.NDArray[np.int32], logprobs: npt.NDArray[np.int32] | None
    ) -> StepOutput:
        """Unpack a step's output; arguments as for `PackedLayout.read`."""
        by_index: dict[int, SequenceLogprobs] = {}
        if logprobs is not None:
            row = 0
            for index, (part, num_drafts) in enumerate(
                zip(plan.scheduled, output[:, 1].tolist(), strict=True)
            ):
                by_index[index] = read_logprobs(
                    logprobs, part, first_row=row, num_outputs=1 + num_drafts
                )
                row += part.num_tokens - part.num_drafts + num_drafts
        return StepOutput(
            token_ids=[row[2 : 2 + row[0]] for row in output.tolist()],
            num_draft_tokens=int(output[:, 1].sum()),
            logprobs=by_index,
        )

    def _find_drafts(
        self,
        texts: Texts,
        page_indices: Int[Array, "S P"],
        text_lens: Int[Array, " S"],
        newest_token_ids: Int[Array, " S"],
        max_drafts: Int[Array, " S"],
    ) -> tuple[Int[Array, "G D"], Int[Array, " S"]]:
        """Drafts of the first sequences, and how many of them are to be verified.

        Args:
            texts: holds each text but its newest token.
            page_indices: of each sequence.
            text_lens: of each sequence.
            newest_token_ids: of each sequence.
            max_drafts: of each sequence; 0 from sequence G on.
        """
        num_seqs, group = max_drafts.shape[0], slice(_MAX_DRAFTING)

        def look_up() -> tuple[Int[Array, "G D"], Int[Array, " G"]]:
            lens = text_lens[group]
            token_ids = texts.token_pages[page_indices[group]].reshape(_MAX_DRAFTING, -1)
            token_ids = token_ids.at[jnp.arange(_MAX_DRAFTING), lens - 1].set(
                newest_token_ids[group], mode="drop"
            )
            return find_drafts(token_ids, lens, self._lookup)

        drafts, num_found = jax.lax.cond(
            jnp.any(max_drafts > 0),
            look_up,
            lambda: (
                jnp.zeros((_MAX_DRAFTING, self._lookup.num_drafts), jnp.int32),
                jnp.zeros(_MAX_DRAFTING, jnp.int32),
            ),
        )
        num_found = jnp.pad(num_found, (0, num_seqs - _MAX_DRAFTING))
        return drafts, jnp.minimum(num_found, max_drafts)


def _write_tokens(token_pages: Int[Array, "N page"], inputs: ModelInputs) -> Int[Array, "N page"]:
    """Return the pages with the step's tokens, where its keys went; padding writes to page 0."""
    page_size = token_pages.shape[1]
    rows = jnp.arange(inputs.token_ids.shape[0], dtype=jnp.int32)
    owners, _ = _owners(rows, inputs.cu_q_lens)
    pages = inputs.page_indices[owners, inputs.positions // page_size]
    pages = jnp.where(rows < inputs.cu_q_lens[-1], pages, 0)
    return token_pages.at[pages, inputs.positions % page_size].set(inputs.token_ids)


def _owners(
    rows: Int[Array, " R"], cu_lens: Int[Array, " S+1"]
) -> tuple[Int[Array, " R"], Int[Array, " R"]]:
    """The sequence of each row, and the row's place in it; for padding, of the last sequence."""
    owners = jnp.sum(rows[:, None] >= cu_lens[None, 1:], axis=1, dtype=jnp.int32)
    owners = jnp.minimum(owners, cu_lens.shape[0] - 2)
    return owners, rows - cu_lens[owners]
