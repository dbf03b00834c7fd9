"""An engine on a device of constant step time: what is left is the host's own cost."""

from __future__ import annotations

import time
from typing import Any

from replicas.engine.buckets import Bucket, make_buckets, smallest_bucket
from replicas.engine.engine import Engine, StepOutput
from replicas.engine.page_allocator import PageAllocator
from replicas.engine.scheduler import Scheduler, StepPlan
from replicas.engine.step import PackedLayout, SlotTable
from replicas.wire import ModelInfo

_FAKE_BATCHED_TOKENS = 512
_FAKE_VOCAB_SIZE = 32000
_FAKE_MIXED_TOKENS = 64
_FAKE_BREAK_EVEN_CONTEXT = 4096


class ConstantTimeRunner:
    """A device on which every step takes the same time; sampled tokens are arbitrary.

    Packs each step as the real runner does, since the device waits for that too.
    """

    num_compiles_after_warmup = 0

    def __init__(self, step_s: float, *, num_slots: int, pages_per_seq: int) -> None:
        self._step_s = step_s
        self._free_at_s = 0.0
        self.last_bucket: Bucket | None = None
        table = SlotTable(
            num_slots=num_slots, pages_per_seq=pages_per_seq, vocab_size=_FAKE_VOCAB_SIZE
        )
        self._buckets = make_buckets(
            max_num_seqs=num_slots,
            max_mixed_tokens=max(_FAKE_MIXED_TOKENS, num_slots),
            max_num_batched_tokens=_FAKE_BATCHED_TOKENS,
        )
        self._layouts = {bucket: PackedLayout(bucket, table) for bucket in self._buckets}

    def launch(self, plan: StepPlan) -> tuple[float, int]:
        """Pack a step and queue it behind the ones before it."""
        bucket = smallest_bucket(
            self._buckets, num_tokens=plan.num_tokens, num_seqs=len(plan.scheduled)
        )
        self.last_bucket = bucket
        self._layouts[bucket].pack(plan)
        self._free_at_s = max(self._free_at_s, time.monotonic()) + self._step_s
        return self._free_at_s, len(plan.scheduled)

    def draw_guided(self, step: tuple[float, int], indices: tuple[int, ...]) -> tuple[float, int]:
        """Nothing to draw: tokens are arbitrary."""
        del indices
        return step

    def fetch(self, step: tuple[float, int]) -> StepOutput:
        """Sleep until the step is done."""
        ready_at_s, num_rows = step
        time.sleep(max(0.0, ready_at_s - time.monotonic()))
        return StepOutput(token_ids=[[7] for _ in range(num_rows)], num_draft_tokens=0)


def fake_engine(step_s: float, *, max_num_seqs: int) -> Engine[Any]:
    """An engine on a `ConstantTimeRunner`, with pages for all its slots."""
    page_size, pages_per_seq = 16, 64
    num_pages = 1 + max_num_seqs * pages_per_seq
    scheduler = Scheduler(
        PageAllocator(num_pages),
        page_size=page_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=_FAKE_BATCHED_TOKENS,
        max_mixed_tokens=max(_FAKE_MIXED_TOKENS, max_num_seqs),
        break_even_context=_FAKE_BREAK_EVEN_CONTEXT,
    )
    info = ModelInfo(
        model_id="fake",
        max_model_len=pages_per_seq * page_size,
        max_request_tokens=pages_per_seq * page_size,
        vocab_size=_FAKE_VOCAB_SIZE,
        eos_token_ids=(),
        fingerprint="fake",
    )
    runner = ConstantTimeRunner(step_s, num_slots=max_num_seqs, pages_per_seq=pages_per_seq)
    return Engine(scheduler, runner, model_info=info)
