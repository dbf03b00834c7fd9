"""What crosses between host and device in a step: one packed i32 vector in, token ids out.

One transfer instead of a dozen small ones: dispatch and transfer cost grow with the number of
arguments, not with these few kilobytes. The layout depends on the bucket only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Int

from replicas.engine.buckets import Bucket
from replicas.engine.sampler import SamplingArrays
from replicas.engine.scheduler import StepPlan
from replicas.engine.sequence import Sequence
from replicas.models.inputs import ModelInputs
from replicas.models.kv_cache import KVPages


class DeviceState(NamedTuple):
    """Everything that lives on the device from step to step; donated to each step.

    Attributes:
        kv_pages: [N, 2K, page, D] per layer, or [L, N, 2K, page, D].
        last_token_ids: i32 [num_slots + 1], the newest token of each slot; the last entry takes
            the writes of padding rows.
    """

    kv_pages: KVPages
    last_token_ids: Int[Array, " slots"]


class StepBatch(NamedTuple):
    """One step's input, unpacked on the device.

    Attributes:
        inputs: what the model reads. A token id whose value the host does not know yet is encoded
            in `token_slots` instead.
        token_slots: i32 [T], slot whose newest token is the row's input, or num_slots for none.
        slots: i32 [S], slot that takes the row's sampled token, or num_slots for none.
        sampling: per row.
    """

    inputs: ModelInputs
    token_slots: Int[Array, " T"]
    slots: Int[Array, " S"]
    sampling: SamplingArrays


@dataclass(frozen=True)
class PackedLayout:
    """Offsets of a bucket's fields in the packed vector, in i32 words."""

    bucket: Bucket
    pages_per_seq: int

    @cached_property
    def fields(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Field name to (offset, shape)."""
        num_tokens, num_seqs = self.bucket.num_tokens, self.bucket.num_seqs
        shapes: dict[str, tuple[int, ...]] = {
            "token_ids": (num_tokens,),
            "token_slots": (num_tokens,),
            "positions": (num_tokens,),
            "kv_lens": (num_seqs,),
            "cu_q_lens": (num_seqs + 1,),
            "num_seqs": (1,),
            "slots": (num_seqs,),
            "temperature": (num_seqs,),
            "top_k": (num_seqs,),
            "top_p": (num_seqs,),
            "seeds": (num_seqs, 2),
            "page_indices": (num_seqs, self.pages_per_seq),
        }
        offset, fields = 0, {}
        for name, shape in shapes.items():
            fields[name] = (offset, shape)
            offset += int(np.prod(shape))
        return fields

    @cached_property
    def size(self) -> int:
        """Length of the packed vector."""
        offset, shape = self.fields["page_indices"]
        return offset + int(np.prod(shape))

    def views(self, packed: npt.NDArray[np.int32]) -> dict[str, npt.NDArray[np.int32]]:
        """Writable views of every field of a packed host vector."""
        return {
            name: packed[offset : offset + int(np.prod(shape))].reshape(shape)
            for name, (offset, shape) in self.fields.items()
        }

    def unpack(self, packed: Int[Array, " words"]) -> StepBatch:
        """Split a packed vector on the device; traced."""
        field = {
            name: jax.lax.slice(packed, (offset,), (offset + int(np.prod(shape)),)).reshape(shape)
            for name, (offset, shape) in self.fields.items()
        }
        inputs = ModelInputs(
            token_ids=field["token_ids"],
            positions=field["positions"],
            kv_lens=field["kv_lens"],
            page_indices=field["page_indices"],
            cu_q_lens=field["cu_q_lens"],
            num_seqs=field["num_seqs"],
        )
        sampling = SamplingArrays(
            temperature=jax.lax.bitcast_convert_type(field["temperature"], jnp.float32),
            top_k=field["top_k"],
            top_p=jax.lax.bitcast_convert_type(field["top_p"], jnp.float32),
            seeds=jax.lax.bitcast_convert_type(field["seeds"], jnp.uint32),
            positions=field["kv_lens"],
        )
        return StepBatch(inputs, field["token_slots"], field["slots"], sampling)


class SlotTable:
    """Per-slot rows that a step's rows are gathered from, so that only changes cost Python time.

    The host's mirror of what the scheduler assigned: page list and sampling parameters by slot.
    """

    def __init__(self, *, num_slots: int, pages_per_seq: int) -> None:
        self.num_slots = num_slots
        self.page_indices = np.zeros((num_slots, pages_per_seq), np.int32)
        self.temperature = np.zeros(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int32)
        self.top_p = np.ones(num_slots, np.float32)
        self.seeds = np.zeros((num_slots, 2), np.uint32)
        self._owners: list[tuple[Sequence, int] | None] = [None] * num_slots
        self._num_written = [0] * num_slots

    def update(self, slot: int, sequence: Sequence) -> None:
        """Write what changed in a slot since the last step that contained it.

        Within one admission a page list only grows, so its tail suffices; a new owner, or the same
        sequence after a preemption, is written whole.
        """
        owner = (sequence, sequence.num_admissions)
        if self._owners[slot] != owner:
            self._owners[slot] = owner
            self._num_written[slot] = 0
            self._write_sampling(slot, sequence)
        first, last = self._num_written[slot], len(sequence.page_ids)
        if first < last:
            self.page_indices[slot, first:last] = sequence.page_ids[first:]
            self._num_written[slot] = last

    def _write_sampling(self, slot: int, sequence: Sequence) -> None:
        sampling = sequence.request.sampling
        self.temperature[slot] = sampling.temperature
        self.top_k[slot] = sampling.top_k
        self.top_p[slot] = sampling.top_p
        self.seeds[slot] = (sampling.seed >> 32) & 0xFFFFFFFF, sampling.seed & 0xFFFFFFFF


def pack_step(plan: StepPlan, layout: PackedLayout, table: SlotTable) -> npt.NDArray[np.int32]:
    """Write a plan into a fresh packed vector.

    Returns:
        i32 [layout.size]; rows past the plan's are padding: they read the null page's sequence of
        length 0, and write to the scratch slot.
    """
    packed = np.zeros(layout.size, np.int32)
    view = layout.views(packed)
    scratch = table.num_slots
    view["token_slots"][:] = scratch
    view["slots"][:] = scratch
    row, num_seqs = 0, len(plan.scheduled)
    slots: list[int] = []
    for index, part in enumerate(plan.scheduled):
        sequence, end = part.sequence, part.start + part.num_tokens
        table.update(part.slot, sequence)
        slots.append(part.slot)
        known = sequence.token_ids[part.start : end]
        view["token_ids"][row : row + len(known)] = known
        if len(known) < part.num_tokens:
            view["token_slots"][row + len(known)] = part.slot
        if part.num_tokens == 1:
            view["positions"][row] = part.start
        else:
            view["positions"][row : row + part.num_tokens] = np.arange(part.start, end)
        view["kv_lens"][index] = end
        if part.samples:
            view["slots"][index] = part.slot
        row += part.num_tokens
        view["cu_q_lens"][index + 1] = row
    view["cu_q_lens"][num_seqs + 1 :] = row
    view["num_seqs"][0] = num_seqs
    view["temperature"].view(np.float32)[:num_seqs] = table.temperature[slots]
    view["top_k"][:num_seqs] = table.top_k[slots]
    view["top_p"].view(np.float32)[:] = 1.0
    view["top_p"].view(np.float32)[:num_seqs] = table.top_p[slots]
    view["seeds"].view(np.uint32)[:num_seqs] = table.seeds[slots]
    view["page_indices"][:num_seqs] = table.page_indices[slots]
    return packed
