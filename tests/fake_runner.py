"""A device without arrays: pages hold token ids, and the next token is a hash of what a row reads.

A row that reads a wrong page, a stale page or a wrong slot gets another token, so an engine on this
runner produces `naive_tokens` if and only if its page and slot bookkeeping is right.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence

from replicas.engine.buckets import Bucket
from replicas.engine.engine import Engine, StepOutput
from replicas.engine.page_allocator import PageAllocator
from replicas.engine.scheduler import ScheduledSequence, Scheduler, StepPlan
from replicas.wire import GenerateRequest, ModelInfo, SamplingParams, SinkAddress, TokenDelta

VOCAB_SIZE = 1000
NO_SINK = SinkAddress(host="127.0.0.1", port=0, sink_id="none", key=b"")


def next_token(token_ids: Sequence[int]) -> int:
    """The fake model: any change in any earlier token changes the result."""
    return zlib.crc32(b",".join(str(t).encode() for t in token_ids)) % VOCAB_SIZE


def naive_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """What any correct engine produces for the fake model."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeRunner:
    """Executes plans at launch, in launch order, as a device does."""

    def __init__(self, *, num_pages: int, page_size: int, num_slots: int) -> None:
        self.num_compiles_after_warmup = 0
        self.last_bucket: Bucket | None = None
        self.plans: list[StepPlan] = []
        self._page_size = page_size
        self._pages: list[list[int | None]] = [[None] * page_size for _ in range(num_pages)]
        self._last_token_ids = [-1] * num_slots

    def launch(self, plan: StepPlan) -> StepOutput:
        self._note(plan)
        reads = [self._write(part) for part in plan.scheduled]
        sampled = [next_token([-1 if t is None else t for t in row]) for row in reads]
        for part, token_id in zip(plan.scheduled, sampled, strict=True):
            if part.samples:
                self._last_token_ids[part.slot] = token_id
        return StepOutput(token_ids=[[token_id] for token_id in sampled], num_draft_tokens=0)

    def fetch(self, step: StepOutput) -> StepOutput:
        return step

    def _note(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        num_rows = -(-plan.num_tokens // 8) * 8
        self.last_bucket = Bucket(num_rows, min(num_rows, 8))

    def _write(self, part) -> list[int | None]:
        sequence, end = part.sequence, part.start + part.num_tokens
        for position in range(part.start, end):
            is_known = position < len(sequence.token_ids)
            token = sequence.token_ids[position] if is_known else self._last_token_ids[part.slot]
            page = sequence.page_ids[position // self._page_size]
            self._pages[page][position % self._page_size] = token
        return [
            self._pages[sequence.page_ids[i // self._page_size]][i % self._page_size]
            for i in range(end)
        ]


class DraftingFakeRunner(FakeRunner):
    """Verifies drafts too: right ones, except that some are spoilt and some texts have none.

    Like a device, it alone knows where a text ends while drafts are in flight.
    """

    def __init__(self, *, num_pages: int, page_size: int, num_slots: int, seed: int) -> None:
        super().__init__(num_pages=num_pages, page_size=page_size, num_slots=num_slots)
        self._rng = random.Random(seed)
        self._lengths = [0] * num_slots

    def launch(self, plan: StepPlan) -> StepOutput:
        self._note(plan)
        num_drafts = 0
        token_ids: list[list[int]] = []
        for part in plan.scheduled:
            drafts, sampled = self._verify(part)
            num_drafts += len(drafts)
            num_right = 0
            while num_right < len(drafts) and drafts[num_right] == sampled[num_right]:
                num_right += 1
            token_ids.append(sampled[: num_right + 1])
            if part.samples:
                limit = part.sequence.max_total_tokens
                self._lengths[part.slot] = min(self._text_len + num_right + 1, limit)
                self._last_token_ids[part.slot] = sampled[num_right]
        return StepOutput(token_ids=token_ids, num_draft_tokens=num_drafts)

    def _verify(self, part: ScheduledSequence) -> tuple[list[int], list[int]]:
        """The drafts of a part, and what each of its outputs draws."""
        sequence, start = part.sequence, part.start
        num_known = part.num_tokens - part.num_drafts
        rows = sequence.token_ids[start : start + num_known].tolist()
        if len(rows) < num_known:
            start = self._lengths[part.slot] - 1
            rows = [self._last_token_ids[part.slot]]
        self._text_len = start + num_known
        assert part.start <= start < sequence.max_total_tokens
        assert self._text_len <= len(sequence.page_ids) * self._page_size
        self._put(sequence.page_ids, start, rows)
        room = max(0, sequence.max_total_tokens - self._text_len - 1)
        drafts = self._guess(sequence.page_ids, min(part.num_drafts, room))
        self._put(sequence.page_ids, self._text_len, drafts)
        ends = range(self._text_len, self._text_len + len(drafts) + 1)
        return drafts, [next_token(self._text(sequence.page_ids, end)) for end in ends]

    def _guess(self, page_ids: list[int], count: int) -> list[int]:
        if self._rng.random() < 0.2:
            return []
        text = self._text(page_ids, self._text_len)
        drafts: list[int] = []
        for _ in range(count):
            is_spoilt = self._rng.random() < 0.25
            drafts.append(self._rng.randrange(VOCAB_SIZE) if is_spoilt else next_token(text))
            text.append(drafts[-1])
        return drafts

    def _put(self, page_ids: list[int], start: int, token_ids: list[int]) -> None:
        for position, token in enumerate(token_ids, start=start):
            self._pages[page_ids[position // self._page_size]][position % self._page_size] = token

    def _text(self, page_ids: list[int], end: int) -> list[int]:
        size = self._page_size
        tokens = [self._pages[page_ids[i // size]][i % size] for i in range(end)]
        return [-1 if token is None else token for token in tokens]


def make_engine(
    *,
    num_pages: int = 64,
    page_size: int = 8,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    max_mixed_tokens: int = 16,
    break_even_context: int = 1000,
    enable_prefix_caching: bool = True,
    eos_token_ids: tuple[int, ...] = (),
    max_drafts: int = 0,
    num_page_groups: int = 1,
    seed: int = 0,
) -> tuple[Engine, FakeRunner]:
    """An engine on a fake device, which speculates if `max_drafts` is above 0."""
    sizes = {"num_pages": num_pages, "page_size": page_size, "num_slots": max_num_seqs}
    runner = DraftingFakeRunner(**sizes, seed=seed) if max_drafts else FakeRunner(**sizes)
    allocator = PageAllocator(
        num_pages, num_groups=num_page_groups, enable_prefix_caching=enable_prefix_caching
    )
    scheduler = Scheduler(
        allocator,
        page_size=page_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_mixed_tokens=max_mixed_tokens,
        break_even_context=break_even_context,
        max_drafts=max_drafts,
    )
    info = ModelInfo(
        model_id="fake",
        max_model_len=4096,
        max_request_tokens=allocator.max_per_sequence * page_size,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=eos_token_ids,
        fingerprint="fake",
    )
    return Engine(scheduler, runner, model_info=info), runner


def make_request(
    request_id: str, prompt: Sequence[int], max_tokens: int = 8, **fields
) -> GenerateRequest:
    """A greedy request; `fields` of SamplingParams or GenerateRequest override."""
    names = SamplingParams.__dataclass_fields__
    sampling = {k: v for k, v in fields.items() if k in names}
    rest = {k: v for k, v in fields.items() if k not in names}
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        sink=NO_SINK,
        **rest,
    )


Deltas = dict[str, list[TokenDelta]]


def step(engine: Engine, deltas: Deltas) -> None:
    """One step, its deltas filed by request."""
    for delta in engine.step().deltas:
        deltas.setdefault(delta.request_id, []).append(delta)
    engine.scheduler.check_integrity()


def run(engine: Engine, deltas: Deltas | None = None, *, max_steps: int = 10_000) -> Deltas:
    """Step until idle; the deltas by request, checked for order and a single end.

    `deltas` holds what earlier steps gave.
    """
    deltas = {} if deltas is None else deltas
    for _ in range(max_steps):
        if not engine.has_work:
            break
        step(engine, deltas)
    assert not engine.has_work, "the engine did not become idle"
    for parts in deltas.values():
        assert [p.result is not None for p in parts] == [False] * (len(parts) - 1) + [True]
        index = parts[0].start_index
        for part in parts:
            assert part.start_index == index
            index += len(part.token_ids)
        assert parts[-1].result.num_output_tokens == index - parts[0].start_index
    return deltas


def output(deltas: list[TokenDelta]) -> list[int]:
    """All tokens of one request."""
    return [token for delta in deltas for token in delta.token_ids]
