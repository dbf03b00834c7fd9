"""A modelled engine replica: continuous batching with chunked prefill, in steps of modelled time.

Follows `replicas.engine.scheduler`: decode rows first, then prompts in order up to a budget by
cost, of which a new one must leave some to be admitted, pages for a whole prompt at admission,
preemption of the youngest. Stretches of steps without
prompts are one event: their end is known, and an arrival cuts them at a step's boundary.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from bench.router_sim.hardware import Hardware
from bench.router_sim.page_cache import PageCache
from replicas.wire import CacheChange, ReplicaLoad


@dataclass(eq=False, slots=True)
class SimSequence:
    """A request on a replica.

    Attributes:
        request_id: of the attempt.
        num_prompt_tokens: to be computed before the first token.
        num_output_tokens: to be produced.
        page_keys: of the prompt's full pages.
        on_first_token, on_end: called with the sequence and the time.
        num_computed: prompt tokens whose KV is there.
        num_cached: prompt tokens that the cache held at first admission; None before.
        num_done: output tokens produced in earlier admissions.
        keys: pages that it references by key.
        num_private: pages that only it has.
        num_registered: of `page_keys`, how many were offered to the cache.
        ready_at: when its pages have come from the host.
        clock_start: the replica's decode clock at its first token since admission.
        first_step: number of the first step that can still hold it.
        is_over: it left, by ending or by abort.
    """

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    page_keys: tuple[bytes, ...]
    on_first_token: Callable[[SimSequence, float], None]
    on_end: Callable[[SimSequence, float], None]
    num_computed: int = 0
    num_cached: int | None = None
    num_done: int = 0
    keys: list[bytes] | None = None
    num_private: int = 0
    num_registered: int = 0
    ready_at: float = 0.0
    clock_start: int = -1
    first_step: int = 0
    is_over: bool = False

    @property
    def num_target(self) -> int:
        """Tokens to compute before it decodes (again)."""
        return self.num_prompt_tokens + self.num_done


class SimReplica:
    """One replica.

    The driver calls `wake(now)` at `wakes_at` whenever that is finite, and `submit` at arrivals.

    Attributes:
        replica_id: its name.
        wakes_at: when the current step, or stretch of steps, ends; infinity when idle.
        is_changed: whether the load changed since this was cleared.
    """

    def __init__(
        self, replica_id: str, hardware: Hardware, machine: Collection[SimReplica] = ()
    ) -> None:
        """Be idle.

        Args:
            replica_id: its name.
            hardware: what it can do.
            machine: the replicas, maybe this one among them, that share its cores; may change.
        """
        self.replica_id = replica_id
        self.hardware = hardware
        self._machine = machine
        self._slowdown = 1.0  # of the current step or stretch
        self.pages = PageCache(hardware.num_pages, num_host_pages=hardware.num_host_pages)
        self.wakes_at = math.inf
        self.is_changed = False
        self.num_preemptions = 0
        self._waiting: deque[SimSequence] = deque()
        self._prefilling: list[SimSequence] = []
        self._decodes: dict[SimSequence, None] = {}  # in order of start
        self._clock = 0  # decode iterations so far
        self._context = 0  # tokens of all decode rows
        self._due: list[tuple[int, int, SimSequence]] = []  # (clock, tie, sequence)
        self._num_due = 0
        self._started_at = 0.0
        self._num_iterations = 0
        self._chunks: list[tuple[SimSequence, int]] = []
        self._link_free_at = 0.0
        self._num_steps = 0
        self._num_computed = 0
        self._num_prefill = 0
        self._num_pairs = 0
        self._num_context = 0
        self._busy_s = 0.0

    @property
    def is_working(self) -> bool:
        """Whether a step runs."""
        return self.wakes_at < math.inf and self._num_iterations > 0

    def notice_machine(self, now: float) -> bool:
        """End a stretch that was planned while more, or fewer, others worked; whether it did."""
        if self._chunks or not self.is_working or self._slowdown == self._current_slowdown():
            return False
        before = self.wakes_at
        self._cut(now)
        return self.wakes_at != before

    def submit(self, sequence: SimSequence, now: float) -> None:
        """Take a sequence; it is admitted between steps."""
        self._waiting.append(sequence)
        self.is_changed = True
        if self.wakes_at == math.inf:
            self._begin(now)
            return
        if not self._chunks:
            self._cut(now)
        self._hold(sequence)

    def wake(self, now: float) -> None:
        """End the current stretch and begin the next."""
        self._finish(now)
        self._begin(now)

    def load(self) -> ReplicaLoad:
        """What the router hears."""
        hardware = self.hardware
        pending = pairs = waiting = 0
        for sequence in self._prefilling:
            target, computed = sequence.num_target, sequence.num_computed
            pending += target - computed
            pairs += (target - computed) * (target + computed) // 2
        for sequence in self._waiting:
            target = sequence.num_target
            waiting += target
            pairs += target * target // 2
        return ReplicaLoad(
            num_running=len(self._prefilling) + len(self._decodes),
            num_waiting=len(self._waiting),
            num_slots=hardware.num_slots,
            num_free_pages=self.pages.num_free,
            num_pages=hardware.num_pages,
            page_size=hardware.page_size,
            num_pending_prefill_tokens=pending,
            num_steps=self._num_steps,
            num_preemptions=self.num_preemptions,
            num_decodes=len(self._decodes),
            num_decode_context_tokens=self._context,
            num_waiting_tokens=waiting,
            num_pending_pairs=pairs,
            max_chunk_tokens=hardware.chunk_tokens,
            num_computed_tokens=self._num_computed,
            num_prefill_tokens=self._num_prefill,
            num_prefill_pairs=self._num_pairs,
            num_context_tokens=self._num_context,
            busy_s=self._busy_s,
        )

    def take_cache_changes(self) -> tuple[CacheChange, CacheChange | None]:
        """What became of the cached pages, device and host tier, since the last call."""
        stored, dropped, host_stored, host_dropped = self.pages.take_changes()
        tier = CacheChange(host_stored, host_dropped) if self.pages.has_tier else None
        return CacheChange(stored, dropped), tier

    def lose(self) -> list[SimSequence]:
        """Die: return what ran."""
        lost = [*self._waiting, *self._prefilling, *self._decodes]
        for sequence in lost:
            sequence.is_over = True
        return lost

    def _begin(self, now: float) -> None:
        """Plan the next step, or stretch of decode steps."""
        self._started_at = now
        self._slowdown = self._current_slowdown()
        hardware = self.hardware
        num_decodes = len(self._decodes)
        self._chunks = []
        if self._prefilling or self._waiting:
            self._plan_prompts(now)
        if self._chunks:
            self._num_iterations = 1
            num_tokens, pairs = num_decodes, 0.0
            for sequence, count in self._chunks:
                num_tokens += count
                pairs += count * (2 * sequence.num_computed + count) / 2
            self.wakes_at = now + self._slowdown * hardware.step_s(num_tokens, pairs, self._context)
        elif num_decodes:
            self._num_iterations = self._due[0][0] - self._clock
            if self._waiting and self._waiting[0].first_step > self._num_steps:
                held = self._waiting[0].first_step - self._num_steps
                self._num_iterations = min(self._num_iterations, held)
            if self._prefilling:  # until the first pages have come from the host
                first = min(sequence.ready_at for sequence in self._prefilling)
                self._num_iterations = min(self._num_iterations, self._iterations_until(first))
            self.wakes_at = now + self._stretch_s(self._num_iterations)
        elif self._prefilling:
            self._num_iterations = 0
            self.wakes_at = min(sequence.ready_at for sequence in self._prefilling)
        else:
            self.wakes_at = math.inf

    def _current_slowdown(self) -> float:
        """What the others that work now make of the duration of a step."""
        if not self.hardware.contention:
            return 1.0
        num_others = sum(other.is_working for other in self._machine if other is not self)
        return 1.0 + self.hardware.contention * num_others

    def _plan_prompts(self, now: float) -> None:
        """Fill the step: first with unfinished prompts, oldest first, then with new ones."""
        num_free = self.hardware.num_slots - len(self._prefilling) - len(self._decodes)
        num_prompts = len(self._prefilling) + min(len(self._waiting), num_free)
        budget = float(self.hardware.prefill_tokens(len(self._decodes), num_prompts))
        for sequence in self._prefilling:
            if budget < 1:
                return
            if sequence.ready_at <= now:
                budget -= self._take_chunk(sequence, budget)
        while budget >= 1 and (sequence := self._admit(now)) is not None:
            if sequence.ready_at <= now:
                budget -= self._take_chunk(sequence, budget)

    def _take_chunk(self, sequence: SimSequence, budget: float) -> float:
        """Put as much of a prompt into the step as a budget allows; return what it costs of it."""
        position = sequence.num_computed
        count, cost = self.hardware.chunk(position, sequence.num_target - position, budget)
        self._chunks.append((sequence, count))
        return cost

    def _admit(self, now: float) -> SimSequence | None:
        """Give the first that waits a slot and pages; None when it has to wait."""
        num_running = len(self._prefilling) + len(self._decodes)
        if not self._waiting or num_running >= self.hardware.num_slots:
            return None
        sequence, pages, page_size = self._waiting[0], self.pages, self.hardware.page_size
        if sequence.first_step > self._num_steps and num_running:
            return None
        depth, held = pages.match(sequence.page_keys)
        num_private = sequence.num_target // page_size + 1 - depth
        if num_running and num_private + num_running > pages.num_free:
            return None
        if not pages.take(sequence.page_keys[:depth], num_private):
            return None
        self._waiting.popleft()
        sequence.keys = list(sequence.page_keys[:depth])
        sequence.num_private = num_private
        sequence.num_registered = depth
        sequence.num_computed = min(held * page_size, sequence.num_target - 1)
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_computed
        sequence.ready_at = now
        if held > depth:
            begins = max(now, self._link_free_at)
            self._link_free_at = begins + (held - depth) * self.hardware.fetch_s
            sequence.ready_at = self._link_free_at
        self._prefilling.append(sequence)
        self.is_changed = True
        return sequence

    def _finish(self, now: float) -> None:
        """Account for what the stretch that ends now has computed."""
        count, num_decodes = self._num_iterations, len(self._decodes)
        if count:
            self._busy_s += now - self._started_at
            self._num_steps += count
            self._num_computed += count * num_decodes
            self._num_context += count * self._context + num_decodes * count * (count - 1) // 2
            self._clock += count
            self._context += count * num_decodes
        chunks, self._chunks = self._chunks, []
        for sequence, num_tokens in chunks:
            self._num_pairs += num_tokens * (2 * sequence.num_computed + num_tokens) // 2
            self._num_computed += num_tokens
            self._num_prefill += num_tokens
            sequence.num_computed += num_tokens
            self._register(sequence)
        while self._due and self._due[0][0] <= self._clock:
            sequence = heapq.heappop(self._due)[2]
            if sequence in self._decodes and not self._grow(sequence):
                self._end(sequence, now)
        for sequence, _ in chunks:
            if sequence.num_computed == sequence.num_target:
                self._start_decoding(sequence, now)
        if chunks:
            self.is_changed = True

    def _register(self, sequence: SimSequence) -> None:
        assert sequence.keys is not None
        count = min(sequence.num_computed // self.hardware.page_size, len(sequence.page_keys))
        for key in sequence.page_keys[sequence.num_registered : count]:
            if self.pages.register(key):
                sequence.num_private -= 1
                sequence.keys.append(key)
        sequence.num_registered = max(sequence.num_registered, count)

    def _start_decoding(self, sequence: SimSequence, now: float) -> None:
        if sequence.is_over:
            return
        self._prefilling.remove(sequence)
        if sequence.num_done == 0:
            sequence.on_first_token(sequence, now)
        sequence.num_done += 1
        if sequence.num_done >= sequence.num_output_tokens:
            self._leave(sequence, now)
            return
        sequence.clock_start = self._clock - sequence.num_done
        self._decodes[sequence] = None
        self._context += sequence.num_target
        self._schedule(sequence)

    def _schedule(self, sequence: SimSequence) -> None:
        """Note when the sequence next needs a page, or ends."""
        done = self._clock - sequence.clock_start
        room = (
            self.hardware.page_size - (sequence.num_prompt_tokens + done) % self.hardware.page_size
        )
        steps = min(sequence.num_output_tokens - done, room)
        self._num_due += 1
        heapq.heappush(self._due, (self._clock + steps, self._num_due, sequence))

    def _grow(self, sequence: SimSequence) -> bool:
        """Give a page to a sequence that goes on; False when it has ended."""
        if self._clock - sequence.clock_start >= sequence.num_output_tokens:
            return False
        while not self.pages.take((), 1):
            youngest = next(reversed(self._decodes))
            self._preempt(youngest)
            if youngest is sequence:
                return True
        sequence.num_private += 1
        self._schedule(sequence)
        return True

    def _preempt(self, sequence: SimSequence) -> None:
        self.num_preemptions += 1
        sequence.num_done = self._clock - sequence.clock_start
        del self._decodes[sequence]
        self._context -= sequence.num_prompt_tokens + sequence.num_done
        self._release(sequence)
        self._waiting.appendleft(sequence)
        self.is_changed = True

    def _end(self, sequence: SimSequence, now: float) -> None:
        del self._decodes[sequence]
        self._context -= sequence.num_prompt_tokens + sequence.num_output_tokens
        self._leave(sequence, now)

    def _leave(self, sequence: SimSequence, now: float) -> None:
        self._release(sequence)
        sequence.is_over = True
        self.is_changed = True
        sequence.on_end(sequence, now)

    def _release(self, sequence: SimSequence) -> None:
        assert sequence.keys is not None
        self.pages.release(sequence.keys, sequence.num_private)
        sequence.keys, sequence.num_private = None, 0

    def _hold(self, sequence: SimSequence) -> None:
        """Keep a sequence out of steps that are planned already.

        The engine launches a step before the one before it has ended, so one more is planned.
        """
        if self.hardware.num_planned_steps:
            ahead = self._num_iterations + self.hardware.num_planned_steps
            sequence.first_step = self._num_steps + ahead

    def _cut(self, now: float) -> None:
        """End a stretch of decode steps with the step that runs now."""
        if not self._num_iterations:
            self.wakes_at = now
            return
        count = self._iterations_until(now)
        if count < self._num_iterations:
            self._num_iterations = count
            self.wakes_at = self._started_at + self._stretch_s(count)

    def _stretch_s(self, count: int) -> float:
        """Duration of `count` decode steps from the stretch's start."""
        rows = len(self._decodes)
        first = self.hardware.step_s(rows, 0, self._context)
        growth = self.hardware.context_s * rows * count * (count - 1) / 2
        return self._slowdown * (count * first + growth)

    def _iterations_until(self, at: float) -> int:
        """Steps of a decode stretch up to the first boundary at or after `at`, at least 1."""
        elapsed = (at - self._started_at) / self._slowdown
        slope = self.hardware.context_s * len(self._decodes) / 2
        first = self.hardware.step_s(len(self._decodes), 0, self._context) - slope
        root = math.sqrt(first * first + 4 * slope * max(elapsed, 0.0))
        return max(1, math.ceil(2 * elapsed / (first + root) - 1e-9))
