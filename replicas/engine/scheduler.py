"""Which sequences take part in the next step, with how many tokens each.

Plans on counts, never on token values, so that step n+1 can be planned before step n's tokens are
known. Host-only and deterministic: no clock, no randomness, no arrays. There are no prefill and
decode phases: every running sequence has `num_computed_tokens` chasing `num_tokens`.

Invariant: pages of a running sequence cover every token that has been scheduled.
"""

from __future__ import annotations

import bisect
import heapq
import math
from dataclasses import dataclass
from typing import NamedTuple

from replicas.engine.buckets import MIN_ROWS
from replicas.engine.page_allocator import PageAllocator
from replicas.engine.sequence import Sequence, SequenceStatus

MIN_CHUNK_TOKENS = 8
"""Fewest prompt tokens in a step that has room for them."""

MIN_PREFILL_BESIDE_DECODES = 16
PREFILL_PER_DECODE = 2
"""Prompt tokens in a step with decode rows: a prompt may stretch the step of few streams, which is
short, by less than that of many. Measured on CPU, where it keeps the stretch below 3."""

PREFILL_PER_FURTHER_PROMPT = 16
"""Prompt tokens more for each prompt beside the first that could be computed now: one must not
slow all streams, but few streams must not hold up many prompts."""


class ScheduledSequence(NamedTuple):
    """A sequence's part in a step: tokens [start, start + num_tokens) are computed.

    Attributes:
        sequence: the sequence; its counts already include this step.
        slot: its slot when scheduled (it may lose it before the step is fetched).
        start: position of the first token computed; the lowest possible one while drafts of the
            step before are in flight: the device knows how many were accepted.
        num_tokens: how many, drafts included; 1 for a decode row without drafts.
        samples: whether the step yields the sequence's next token.
        num_drafts: at most so many guesses of the tokens after it are verified; the step yields
            1 token more for each that is right.
    """

    sequence: Sequence
    slot: int
    start: int
    num_tokens: int
    samples: bool
    num_drafts: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one device launch computes; decode rows come first.

    Attributes:
        scheduled: at least one.
        num_tokens: total over `scheduled`.
        num_drafts: of those, drafts; like each sequence's last row they need logits.
        admitted: those that got their slot for it.
    """

    scheduled: tuple[ScheduledSequence, ...]
    num_tokens: int
    num_drafts: int = 0
    admitted: tuple[Sequence, ...] = ()


class PendingWork(NamedTuple):
    """What the scheduler still has to do; fields as in `replicas.wire.ReplicaLoad`."""

    num_prefill_tokens: int
    num_waiting_tokens: int
    num_pairs: int
    num_decodes: int
    num_context_tokens: int


class PrefillBudget:
    """What a step has left for prompt tokens, in tokens and in cost."""

    def __init__(self, num_tokens: int, *, break_even_context: int | None) -> None:
        """Allow `num_tokens`, each of cost 1 + position / break_even_context (1 when None)."""
        self._num_tokens = num_tokens
        self._cost = float(num_tokens)
        self._break_even_context = break_even_context

    @property
    def is_spent(self) -> bool:
        """Whether not even one token is left."""
        return self._num_tokens < 1 or self._cost < 1

    def take(self, sequence: Sequence) -> int:
        """Spend on the sequence's next tokens; returns how many, at least 1.

        However long the context, `MIN_CHUNK_TOKENS` are granted: below that a step's fixed cost
        dominates.
        """
        wanted = min(sequence.num_uncomputed_tokens, self._num_tokens)
        context = self._break_even_context
        if context is None:
            self._num_tokens -= wanted
            return wanted
        # n tokens from position p cost n (1 + p / c) + n^2 / 2c; solved for n, to the nearest.
        first = 1 + sequence.num_computed_tokens / context
        root = math.sqrt(first * first + 2 * self._cost / context)
        affordable = round(2 * self._cost / (first + root))
        count = max(1, min(wanted, max(affordable, MIN_CHUNK_TOKENS)))
        self._num_tokens -= count
        self._cost -= count * first + count * count / (2 * context)
        return count


class Scheduler:
    """Continuous batching with chunked prefill, a prefix cache and preemption.

    A step takes decode rows first, then unfinished prompts, then new sequences in order of
    (priority, arrival), up to the token budget. A new sequence is admitted when pages for all its
    tokens are free; when a running one needs a page and none is free, the youngest is preempted:
    it gives its pages back and is recomputed later.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        *,
        page_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_mixed_tokens: int,
        break_even_context: int,
        max_drafts: int = 0,
    ) -> None:
        """Schedule over an allocator.

        Args:
            allocator: owned by the scheduler from here on.
            page_size: tokens per page.
            max_num_seqs: slots.
            max_num_batched_tokens: tokens in a step without decode rows.
            max_mixed_tokens: most tokens in a step with decode rows; >= max_num_seqs. With few
                of them and few prompts it is less (`PREFILL_PER_DECODE`), and counted by cost,
                see below.
            break_even_context: context, tokens, at which a token's attention costs as much as
                everything else about it. Beside decode rows, a prompt token at position p counts
                as 1 + p / break_even_context: so a step's time stays bounded at any position.
            max_drafts: drafts that a decode row may verify; 0 without speculation.
        """
        self.allocator = allocator
        self.page_size = page_size
        self.num_slots = max_num_seqs
        self.num_preemptions = 0
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_mixed_tokens = max_mixed_tokens
        self._break_even_context = break_even_context
        self._max_drafts = max_drafts
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []
        self._waiting_tokens: dict[Sequence, int] = {}  # as counted in the two totals
        self._num_waiting_tokens = 0
        self._num_waiting_pairs = 0
        self._running: list[Sequence] = []
        # Those of them with unfinished prompts, and perhaps some that have none any more: a step of
        # many streams looks at these few instead of at all.
        self._prefilling: list[Sequence] = []
        self._free_slots = list(range(max_num_seqs))

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot."""
        return len(self._waiting_tokens)

    @property
    def num_running(self) -> int:
        """Sequences with a slot."""
        return len(self._running)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences with a slot, oldest first."""
        return tuple(self._running)

    def pending_work(self) -> PendingWork:
        """Count what running and waiting sequences are and will be."""
        prefilling = [s for s in self._prefilling if _is_prefilling(s)]
        num_decodes = len(self._running) - len(prefilling)
        # A decode row has computed all its tokens but the last one.
        context = sum([s.num_computed_tokens for s in self._running]) + num_decodes
        prefill, pairs = 0, self._num_waiting_pairs
        for sequence in prefilling:
            left, num_computed = sequence.num_uncomputed_tokens, sequence.num_computed_tokens
            prefill += left
            pairs += left * (sequence.num_tokens + num_computed) // 2
            context -= num_computed
        return PendingWork(
            num_prefill_tokens=prefill,
            num_waiting_tokens=self._num_waiting_tokens,
            num_pairs=pairs,
            num_decodes=num_decodes,
            num_context_tokens=context,
        )

    @property
    def max_mixed_tokens(self) -> int:
        """Most tokens in a step with decode rows."""
        return self._max_mixed_tokens

    @property
    def has_work(self) -> bool:
        """Whether `schedule` may have something to do, now or once tokens in flight arrive."""
        return bool(self._running) or bool(self._waiting_tokens)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, new or preempted."""
        heapq.heappush(self._waiting, (sequence.order, sequence))
        count = sequence.num_tokens
        self._waiting_tokens[sequence] = count
        self._num_waiting_tokens += count
        self._num_waiting_pairs += count * count // 2

    def finish(self, sequence: Sequence) -> None:
        """Take a waiting or running sequence out; its full pages stay findable.

        Pages may be reused at once although a launched step still writes to them: steps run in
        launch order, so whoever gets the page writes after that.
        """
        if sequence.status is SequenceStatus.RUNNING:
            self.register_full_pages(sequence)
            self._leave_slot(sequence, SequenceStatus.FINISHED)
        elif sequence.status is SequenceStatus.WAITING:
            sequence.status = SequenceStatus.FINISHED
            self._forget_waiting(sequence)

    def schedule(self) -> StepPlan | None:
        """Plan the next step and advance the counts of what it contains.

        Returns:
            The plan, or None when nothing can be computed now.
        """
        rows = self._schedule_decodes()
        num_drafts = sum(row.num_drafts for row in rows) if self._max_drafts else 0
        self._prefilling = [s for s in self._prefilling if _is_prefilling(s)]
        budget = self._make_budget(len(rows), num_drafts)
        self._schedule_prefills(rows, budget)
        num_continued = len(rows)
        self._admit(rows, budget)
        if not rows:
            return None
        for row in rows:
            sequence = row.sequence
            if sequence.num_computed_tokens >= sequence.next_page_end:
                self.register_full_pages(sequence)
        return StepPlan(
            scheduled=tuple(rows),
            num_tokens=sum([row.num_tokens for row in rows]),
            num_drafts=num_drafts,
            admitted=tuple([row.sequence for row in rows[num_continued:]]),
        )

    def register_full_pages(self, sequence: Sequence) -> None:
        """Make pages that are full of computed, known tokens findable.

        Only between steps: within a step, rows of one sequence must not read what another writes.
        """
        for page, key in sequence.take_unregistered_pages(self.page_size):
            self.allocator.register(page, key)

    def _schedule_decodes(self) -> list[ScheduledSequence]:
        rows: list[ScheduledSequence] = []
        max_drafts, page_size = self._drafts_per_sequence(), self.page_size
        for sequence in self.running:
            if not sequence.is_decodable:
                continue
            # The position behind all that may be in flight; most steps find room for it.
            end = sequence.num_computed_tokens + sequence.num_inflight_drafts
            if end >= len(sequence.page_ids) * page_size and not self._reserve(sequence):
                continue
            num_drafts = self._reserve_drafts(sequence, max_drafts) if max_drafts else 0
            rows.append(self._take_decode(sequence, num_drafts))
        return rows

    def _drafts_per_sequence(self) -> int:
        """How many drafts each decode row may verify at the price of the smallest step.

        A step is padded to `MIN_ROWS`: up to there, more rows cost almost nothing. Beyond, a draft
        costs as much as another stream's token, and most drafts are worth less.
        """
        if self._max_drafts == 0:
            return 0
        num_decodes = sum(s.is_decode and s.has_work for s in self._running)
        return min(self._max_drafts, MIN_ROWS // num_decodes - 1) if num_decodes else 0

    def _make_budget(self, num_decodes: int, num_drafts: int) -> PrefillBudget:
        if num_decodes == 0:
            return PrefillBudget(self._max_num_batched_tokens, break_even_context=None)
        wanted = max(MIN_PREFILL_BESIDE_DECODES, PREFILL_PER_DECODE * num_decodes)
        num_prompts = len(self._prefilling) + min(self.num_waiting, len(self._free_slots))
        wanted += PREFILL_PER_FURTHER_PROMPT * max(0, num_prompts - 1)
        num_left = min(wanted, self._max_mixed_tokens - num_decodes - num_drafts)
        return PrefillBudget(num_left, break_even_context=self._break_even_context)

    def _schedule_prefills(self, rows: list[ScheduledSequence], budget: PrefillBudget) -> None:
        """Continue unfinished prompts, oldest first."""
        for sequence in self._prefilling:
            if budget.is_spent:
                break
            if sequence.has_work:
                rows.append(self._take_chunk(sequence, budget.take(sequence)))

    def _admit(self, rows: list[ScheduledSequence], budget: PrefillBudget) -> None:
        while (
            not budget.is_spent
            and self._free_slots
            and (sequence := self._peek_waiting()) is not None
        ):
            if sequence.num_inflight > 0 or not self._start(sequence):
                break
            heapq.heappop(self._waiting)
            self._forget_waiting(sequence)
            rows.append(self._take_chunk(sequence, budget.take(sequence)))

    def _peek_waiting(self) -> Sequence | None:
        while self._waiting:
            sequence = self._waiting[0][1]
            if sequence.status is SequenceStatus.WAITING:
                return sequence
            heapq.heappop(self._waiting)
        return None

    def _forget_waiting(self, sequence: Sequence) -> None:
        count = self._waiting_tokens.pop(sequence)
        self._num_waiting_tokens -= count
        self._num_waiting_pairs -= count * count // 2

    def _start(self, sequence: Sequence) -> bool:
        """Give a slot and pages for all known tokens; False if there are too few pages.

        Tokens whose logits are needed are never taken from the cache, the last one among them. One
        free page per running sequence is left, so that an admission does not cause a preemption at
        once.
        """
        num_tokens = sequence.num_tokens
        keys = sequence.page_keys(page_size=self.page_size, num_tokens=sequence.max_cached_tokens)
        count = -(-num_tokens // self.page_size)
        group = self.allocator.choose_group(keys, count)
        matched = self.allocator.match(keys, group=group)
        count -= len(matched)
        num_left = self.allocator.num_free_in(group) - count
        pages = None
        if num_left >= len(self._running_in(group)) or not self._running:
            pages = self.allocator.allocate(count, group=group)
        if pages is None:
            self.allocator.release(matched)
            return False
        if sequence.num_admissions == 0:
            sequence.num_cached_tokens = len(matched) * self.page_size
        sequence.start(
            heapq.heappop(self._free_slots),
            matched + pages,
            num_matched_pages=len(matched),
            page_size=self.page_size,
        )
        bisect.insort(self._running, sequence, key=_order_of)
        bisect.insort(self._prefilling, sequence, key=_order_of)
        return True

    def _running_in(self, group: int) -> list[Sequence]:
        """Sequences whose pages are of a group, oldest first."""
        if self.allocator.num_groups == 1:
            return self._running
        return [s for s in self._running if self._group_of(s) == group]

    def _group_of(self, sequence: Sequence) -> int:
        """The group that all pages of a sequence are of."""
        return self.allocator.group_of(sequence.page_ids[0])

    def _add_page(self, sequence: Sequence) -> bool:
        """Give a sequence a page more; False if its group has none left."""
        pages = self.allocator.allocate(1, group=self._group_of(sequence))
        if pages is None:
            return False
        sequence.page_ids += pages
        return True

    def _reserve(self, sequence: Sequence) -> bool:
        """Make room for the sequence's next token; False if it has to wait for older ones.

        The oldest sequence of a group can always take every other's pages, so it always advances.
        """
        num_tokens = sequence.max_num_tokens
        while num_tokens > len(sequence.page_ids) * self.page_size:
            if self._add_page(sequence):
                continue
            youngest = self._running_in(self._group_of(sequence))[-1]
            if youngest is sequence:
                return False
            self._leave_slot(youngest, SequenceStatus.WAITING)
            self.num_preemptions += 1
            self.add(youngest)
        return True

    def _reserve_drafts(self, sequence: Sequence, wanted: int) -> int:
        """Make room for drafts behind the next token, in free pages only; returns for how many.

        Nobody is preempted for a guess. Positions at the sequence's end or beyond need no room:
        the device verifies no drafts there. Where a draw depends on the output before it there are
        none: those of drafts would have to be noted and taken back. Nor where a grammar is
        followed: its mask behind a draft is not known.
        """
        sampling = sequence.request.sampling
        if sampling.depends_on_output or sampling.grammar:
            return 0
        wanted = min(wanted, sequence.max_total_tokens - sequence.num_tokens - 1)
        num_tokens = sequence.max_num_tokens
        end = min(num_tokens + wanted, sequence.max_total_tokens)
        while end > len(sequence.page_ids) * self.page_size:
            if not self._add_page(sequence):
                return len(sequence.page_ids) * self.page_size - num_tokens
        return wanted

    def _take_decode(self, sequence: Sequence, num_drafts: int) -> ScheduledSequence:
        """Advance a sequence by its newest token, which may have drafts behind it."""
        start, slot = sequence.num_computed_tokens, sequence.slot
        assert slot is not None
        sequence.num_computed_tokens = start + 1
        sequence.num_inflight += 1
        if not num_drafts:
            # Most rows of most steps: the constructor itself takes three times as long.
            fields = (sequence, slot, start, 1, True, 0)
            return tuple.__new__(ScheduledSequence, fields)  # pyright: ignore[reportUnknownMemberType]
        sequence.num_inflight_drafts += num_drafts
        return ScheduledSequence(sequence, slot, start, 1 + num_drafts, True, num_drafts)

    def _take_chunk(self, sequence: Sequence, count: int) -> ScheduledSequence:
        """Advance a sequence by `count` tokens of its prompt."""
        start = sequence.num_computed_tokens
        sequence.num_computed_tokens += count
        samples = sequence.num_computed_tokens == sequence.num_tokens
        sequence.num_inflight += samples
        assert sequence.slot is not None
        return ScheduledSequence(sequence, sequence.slot, start, count, samples)

    def _leave_slot(self, sequence: Sequence, status: SequenceStatus) -> None:
        assert sequence.slot is not None
        self._running.remove(sequence)
        heapq.heappush(self._free_slots, sequence.slot)
        self.allocator.release(sequence.stop(status))

    def check_integrity(self) -> None:
        """Assert that slots, pages and counts agree; for tests."""
        slots = [sequence.slot for sequence in self._running]
        assert len(set(slots)) == len(slots)
        assert not set(slots) & set(self._free_slots)
        assert [s.order for s in self._running] == sorted(s.order for s in self._running)
        for sequence in self._running:
            assert sequence.status is SequenceStatus.RUNNING
            assert sequence.num_computed_tokens < sequence.num_tokens
            num_computed = max(sequence.num_computed_tokens, sequence.max_num_tokens - 1)
            assert len(sequence.page_ids) * self.page_size >= num_computed
            assert sequence.is_decode or sequence in self._prefilling
        assert len({s.order for s in self._prefilling}) == len(self._prefilling)
        waiting = [s for _, s in self._waiting if s.status is SequenceStatus.WAITING]
        assert self._num_waiting_tokens == sum(self._waiting_tokens.values())
        assert set(waiting) == set(self._waiting_tokens)
        self.allocator.check_integrity()


def _is_prefilling(sequence: Sequence) -> bool:
    return sequence.status is SequenceStatus.RUNNING and not sequence.is_decode


def _order_of(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
