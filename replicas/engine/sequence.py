"""The engine's record of one sequence. Counts run ahead of values: see `num_inflight`.

A launched step yields at least one token; with speculation it may yield more, so counts are lower
bounds until it is fetched (`num_tokens`), beside an upper one (`max_num_tokens`).

Invariant while running: `num_computed_tokens < num_tokens`, and pages cover every computed token.
"""

from __future__ import annotations

import enum
from array import array

from replicas.grammar import Matcher
from replicas.page_keys import PageKey, hash_page
from replicas.wire import GenerateRequest


class SequenceStatus(enum.Enum):
    """Where a sequence is: it waits, holds a slot, or has ended."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Sequence:
    """One sequence from arrival to its end; used by the engine's thread only.

    Attributes:
        request: what the caller asked.
        token_ids: prompt and the output tokens that the host knows, i32.
        num_prompt_tokens: tokens of the prompt.
        max_total_tokens: prompt + output at which the sequence ends.
        num_computed_tokens: KV is valid for [0, n), counting launched steps.
        num_inflight: output tokens that launched steps will produce at least and the host has not
            fetched: one for each such step.
        num_inflight_drafts: drafts that those steps verify: the most tokens that they may produce
            beyond `num_inflight`.
        page_ids: pages that hold [0, num_computed_tokens) and the room reserved after it.
        next_page_end: computed tokens from which on a page is full that is not registered.
        slot: row of the device's slot state while running, else None.
        arrival_s: clock at arrival, seconds.
        first_output: position of the first output token; before a migration's own, which its prompt
            holds.
        first_step_s: clock at the first step that contained it, or None.
        first_token_s: clock when its first output token was known, or None.
        num_admissions: how often it got a slot; more than 1 after a preemption.
        num_cached_tokens: prompt tokens found in the prefix cache at first admission.
        stop_token_ids: ids that end the output.
        next_prompt_logprob: position of the first prompt token whose log-probability is still to be
            delivered; behind the prompt when there is none.
        matcher: where in its grammar the output is, as far as the host knows it; None without one.
        wants_logprobs: whether the host reads log-probabilities of its tokens, of prompt or output.
        order: (priority, arrival number): who goes first, and (largest) who is preempted first.
    """

    __slots__ = (
        "_num_registered_pages",
        "_page_keys",
        "_root_key",
        "arrival_s",
        "first_output",
        "first_step_s",
        "first_token_s",
        "matcher",
        "max_total_tokens",
        "next_page_end",
        "next_prompt_logprob",
        "num_admissions",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_inflight",
        "num_inflight_drafts",
        "num_prompt_tokens",
        "order",
        "page_ids",
        "request",
        "slot",
        "status",
        "stop_token_ids",
        "token_ids",
        "wants_logprobs",
    )

    def __init__(
        self,
        request: GenerateRequest,
        *,
        arrival_number: int,
        arrival_s: float,
        max_total_tokens: int,
        root_key: PageKey,
        stop_token_ids: frozenset[int] = frozenset(),
        page_size: int = 0,
        matcher: Matcher | None = None,
    ) -> None:
        self.request = request
        self.matcher = matcher
        self.stop_token_ids = stop_token_ids
        self.token_ids = array("i", request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.first_output = self.num_prompt_tokens - request.output_offset
        self.max_total_tokens = max_total_tokens
        self.num_computed_tokens = 0
        self.num_inflight = 0
        self.num_inflight_drafts = 0
        self.page_ids: list[int] = []
        self.next_page_end = 0
        self.slot: int | None = None
        self.status = SequenceStatus.WAITING
        self.arrival_s = arrival_s
        self.first_step_s: float | None = None
        self.first_token_s: float | None = None
        self.num_admissions = 0
        self.num_cached_tokens = 0
        sampling = request.sampling
        self.wants_logprobs = sampling.logprobs is not None or sampling.prompt_logprobs is not None
        self.next_prompt_logprob = self.num_prompt_tokens
        if sampling.prompt_logprobs is not None:
            self.next_prompt_logprob = min(sampling.prompt_logprobs_start, self.num_prompt_tokens)
        self.order = (request.priority, arrival_number)
        self._root_key = root_key
        self._page_keys = self._checked_keys(page_size)
        self._num_registered_pages = 0

    def _checked_keys(self, page_size: int) -> list[PageKey]:
        """Take over the router's keys; none when its first one shows another model or page size."""
        keys = self.request.page_keys
        if not keys or not page_size or len(keys) * page_size > self.num_prompt_tokens:
            return []
        first = hash_page(self._root_key, self.token_ids[:page_size].tobytes())
        return list(keys) if keys[0] == first else []

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence, those in flight included."""
        return len(self.token_ids) + self.num_inflight

    @property
    def max_num_tokens(self) -> int:
        """The most tokens that it may have once everything in flight has arrived."""
        num_tokens = len(self.token_ids) + self.num_inflight + self.num_inflight_drafts
        return min(num_tokens, self.max_total_tokens)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that the host knows."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def max_cached_tokens(self) -> int:
        """Tokens that need not be computed again where their KV is found: no logits of them."""
        if self.next_prompt_logprob < self.num_prompt_tokens:
            return self.next_prompt_logprob - 1
        return self.num_tokens - 1

    def prompt_logprob_rows(self, start: int, end: int) -> range:
        """Of the positions [start, end), those whose logits give a missing prompt logprob."""
        first = max(start, self.next_prompt_logprob - 1)
        return range(first, max(first, min(end, self.num_prompt_tokens - 1)))

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV is still to be computed; 1 for a decode row."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def has_work(self) -> bool:
        """Whether a step could advance it: its last allowed token has not been launched yet."""
        return self.num_tokens < self.max_total_tokens

    @property
    def is_decode(self) -> bool:
        """Whether one token completes it for now: the row is a decode row."""
        return self.num_computed_tokens == self.num_tokens - 1 and self.num_computed_tokens > 0

    @property
    def is_decodable(self) -> bool:
        """Whether the next step can take it as a decode row: `is_decode`, `has_work` and a slot.

        One expression of its own, since every step asks every sequence.
        """
        num_tokens = len(self.token_ids) + self.num_inflight
        return (
            0 < self.num_computed_tokens == num_tokens - 1
            and num_tokens < self.max_total_tokens
            and self.slot is not None
        )

    def page_keys(self, *, page_size: int, num_tokens: int) -> list[PageKey]:
        """Content keys of the full pages within the first `num_tokens` known tokens."""
        count = num_tokens // page_size
        keys = self._page_keys
        while len(keys) < count:
            start = len(keys) * page_size
            parent = keys[-1] if keys else self._root_key
            keys.append(hash_page(parent, self.token_ids[start : start + page_size].tobytes()))
        return keys[:count]

    def take_unregistered_pages(self, page_size: int) -> list[tuple[int, PageKey]]:
        """Pages that became full of computed, known tokens since the last call, with their keys.

        Rejected drafts are never among them: they lie behind the last known token.
        """
        num_valid = min(self.num_computed_tokens, len(self.token_ids))
        first = self._num_registered_pages
        if num_valid // page_size <= first:
            return []
        keys = self.page_keys(page_size=page_size, num_tokens=num_valid)
        self._num_registered_pages = len(keys)
        self.next_page_end = (len(keys) + 1) * page_size
        return [(self.page_ids[i], keys[i]) for i in range(first, len(keys))]

    def start(
        self, slot: int, page_ids: list[int], *, num_matched_pages: int, page_size: int
    ) -> None:
        """Take a slot and pages, the first of which already hold the sequence's own prefix."""
        self.status = SequenceStatus.RUNNING
        self.slot = slot
        self.num_admissions += 1
        self.page_ids = page_ids
        self.num_computed_tokens = num_matched_pages * page_size
        self._num_registered_pages = num_matched_pages
        self.next_page_end = (num_matched_pages + 1) * page_size

    def stop(self, status: SequenceStatus) -> list[int]:
        """Give up slot and pages (returned); the tokens stay, their KV is forgotten."""
        pages, self.page_ids = self.page_ids, []
        self.status = status
        self.slot = None
        self.num_computed_tokens = 0
        self._num_registered_pages = 0
        return pages
