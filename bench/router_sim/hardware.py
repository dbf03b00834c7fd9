"""What a modelled replica can do: the seconds that its steps take, and its pages.

The default is a roofline of Llama-3-70B in bf16 on a v6e-8 host, not a measurement: compare
policies by it, do not read its times as ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MIN_CHUNK_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Speed and size of a replica.

    Attributes:
        overhead_s: of every step.
        weights_s: reading the weights once; hidden behind the arithmetic of many tokens.
        token_s: arithmetic of one token.
        pair_s: a prompt token attending to one position.
        context_s: a decode row reading one position.
        chunk_tokens: prompt tokens of a step, counted at position 0; later ones count more, as in
            `replicas.engine.scheduler.PrefillBudget`.
        break_even_context: position at which they count double.
        mixed_tokens: most tokens of a step that has decode rows, and `prefill_per_decode` prompt
            tokens for each of them but at least `min_prefill_tokens`, and
            `prefill_per_further_prompt` for each prompt beside the first; None: as without any.
        num_planned_steps: steps that are planned while one runs: an arrival misses them.
        page_size: tokens of a page.
        num_slots: sequences at once.
        num_pages: on the device.
        num_host_pages: pages in host memory behind them.
        fetch_s: one page from host to device.
        start_s: from the order for a replica to its first report.
        contention: share by which each other replica that works slows a step down; above 0 where
            all replicas compute on the cores of one machine.
    """

    overhead_s: float = 1.5e-3
    weights_s: float = 11e-3
    token_s: float = 42e-6
    pair_s: float = 0.8e-9
    context_s: float = 3.6e-8
    chunk_tokens: int = 2048
    break_even_context: int = 52_500
    mixed_tokens: int | None = None
    prefill_per_decode: int = 2
    min_prefill_tokens: int = 16
    prefill_per_further_prompt: int = 16
    num_planned_steps: int = 0
    page_size: int = 512
    num_slots: int = 64
    num_pages: int = 655
    num_host_pages: int = 0
    fetch_s: float = 3.3e-3
    start_s: float = 90.0
    contention: float = 0.0

    def prefill_tokens(self, num_decodes: int, num_prompts: int) -> int:
        """Prompt tokens that a step takes beside so many decode rows, see `mixed_tokens`.

        Args:
            num_decodes: rows.
            num_prompts: unfinished ones that have, or could have, a slot.
        """
        if self.mixed_tokens is None or not num_decodes:
            return self.chunk_tokens
        wanted = max(self.min_prefill_tokens, self.prefill_per_decode * num_decodes)
        wanted += self.prefill_per_further_prompt * max(0, num_prompts - 1)
        return min(wanted, self.mixed_tokens - num_decodes)

    def step_s(self, num_tokens: int, num_pairs: float, num_context: float) -> float:
        """Duration of one step."""
        return (
            self.overhead_s
            + max(self.weights_s, self.token_s * num_tokens)
            + self.pair_s * num_pairs
            + self.context_s * num_context
        )

    def chunk(self, position: int, left: int, budget: float) -> tuple[int, float]:
        """Return how many of the `left` tokens from `position` a budget allows, and their cost.

        A token costs 1 at position 0 and 2 at `break_even_context`.
        """
        context = self.break_even_context
        first = 1 + position / context
        root = math.sqrt(first * first + 2 * budget / context)
        count = min(left, max(int(2 * budget / (first + root)), MIN_CHUNK_TOKENS))
        return count, count * first + count * count / (2 * context)

    def prefill_s(self, num_held: int, num_tokens: int) -> float:
        """Return how long an idle replica takes for a prompt of which it holds a part.

        It computes the last token in any case.
        """
        seconds, position = 0.0, min(num_held, num_tokens - 1)
        while position < num_tokens:
            count, _ = self.chunk(position, num_tokens - position, float(self.chunk_tokens))
            seconds += self.step_s(count, count * (2 * position + count) / 2, 0)
            position += count
        return seconds


HBM_ONLY = Hardware()
HOST_TIER = Hardware(num_host_pages=3345)
