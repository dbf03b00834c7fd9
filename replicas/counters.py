"""Counters that are exported from 0 on.

Ray exports a counter from its first increment and refuses to increment by 0. A panel of what never
happens is then empty, which looks like a broken scrape, and `increase()` and `rate()` miss the
first event, since they see no step from 0.
"""

from __future__ import annotations

from collections.abc import Iterable

from ray.serve import metrics
from ray.util.metrics import Metric


def start_at_zero(counter: metrics.Counter, label: str = "", values: Iterable[str] = ()) -> None:
    """Export 0 for a counter, once for each value of its label where it has one.

    Call it where the counter is made: labels of a replica are known there.
    """
    for tags in [{label: value} for value in values] if label else [{}]:
        record_zero(counter, tags)


def record_zero(counter: metrics.Counter, tags: dict[str, str]) -> None:
    """Export 0 for these labels.

    `_record` is what `inc` calls after it has refused 0; recording 0 is sound, since what is
    recorded is added.
    """
    Metric._record(counter, 0.0, tags)  # pyright: ignore[reportPrivateUsage]
