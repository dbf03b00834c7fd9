"""What is sent to the service under test: seeded prompts, shared and not, and when they come."""

from __future__ import annotations

import random

from bench.router_real.client import Ask
from bench.workloads import Vocabulary

VOCABULARY = Vocabulary()


def distinct(
    count: int, *, prompt_tokens: int, max_tokens: int, seed: int, rate: float | None = None
) -> list[Ask]:
    """Requests that have nothing in common.

    Args:
        count: how many.
        prompt_tokens, max_tokens: lengths.
        seed: of everything random; another one gives other prompts.
        rate: requests per second, with exponential gaps; None: all at once.
    """
    rng = random.Random(f"distinct-{seed}")
    at = 0.0
    asks: list[Ask] = []
    for number in range(count):
        at += 0.0 if rate is None else rng.expovariate(rate)
        asks.append(
            Ask(
                prompt_token_ids=VOCABULARY.draw(rng, prompt_tokens),
                max_tokens=max_tokens,
                arrival_s=at,
                seed=number,
            )
        )
    return asks


def with_shared_prefixes(
    count: int,
    *,
    seed: int,
    rate: float | None,
    num_prefixes: int = 24,
    prefix_tokens: int = 192,
    own_tokens: tuple[int, int] = (16, 48),
    max_tokens: int = 12,
) -> list[Ask]:
    """Requests of which each begins with one of some prefixes, a few much more often than most.

    Args:
        count: how many.
        seed: of everything random.
        rate: requests per second, with exponential gaps; None: all at once.
        num_prefixes: prefix k is drawn with weight 1 / (k + 1).
        prefix_tokens: of each prefix.
        own_tokens: fewest and most tokens that a prompt has of its own.
        max_tokens: output.
    """
    rng = random.Random(f"shared-{seed}")
    prefixes = [VOCABULARY.draw(rng, prefix_tokens) for _ in range(num_prefixes)]
    weights = [1 / (rank + 1) for rank in range(num_prefixes)]
    at = 0.0
    asks: list[Ask] = []
    for _ in range(count):
        at += 0.0 if rate is None else rng.expovariate(rate)
        (prefix,) = rng.choices(prefixes, weights)
        own = VOCABULARY.draw(rng, rng.randint(*own_tokens))
        asks.append(Ask(prompt_token_ids=prefix + own, max_tokens=max_tokens, arrival_s=at))
    return asks
