"""What was measured of each request, and what follows from it.

Pure arithmetic over records: no clock, no I/O. Times are seconds on the client's monotonic clock,
relative to the start of the run. Definitions:

- TTFT: request sent to first token received.
- TPOT: (last token - first token) / (tokens - 1), of requests with at least two tokens.
- ITL: gap between two consecutive events that carry tokens. One event may carry several tokens when
  the server coalesces; `tokens_per_event` tells.
- e2e: request sent to end of stream.
- goodput: requests per second that met both TTFT and TPOT objectives. A failed one never does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

QUANTILES = (0.5, 0.9, 0.99)


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request as the client saw it.

    Attributes:
        index: position in the workload.
        sent_s: when the request was sent.
        num_prompt_tokens: from the server's usage, else what was asked.
        num_cached_tokens: of those, prefix-cache hits that the server reported.
        num_output_tokens: from the server's usage, else the number of events.
        event_times_s: arrival of each event that carried text or tokens.
        end_s: when the stream ended; None if it failed before.
        error: why it failed, or None.
    """

    index: int
    sent_s: float
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    event_times_s: list[float] = field(default_factory=list)
    end_s: float | None = None
    error: str | None = None

    @property
    def is_ok(self) -> bool:
        """True when the stream ended as it should, with at least one token."""
        return self.error is None and self.end_s is not None and bool(self.event_times_s)

    @property
    def ttft_s(self) -> float:
        """Time to first token; only of requests that got one."""
        return self.event_times_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None with fewer than two tokens."""
        if self.num_output_tokens < 2 or len(self.event_times_s) < 2:
            return None
        span = self.event_times_s[-1] - self.event_times_s[0]
        return span / (self.num_output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        """Duration; only of requests that ended."""
        assert self.end_s is not None
        return self.end_s - self.sent_s

    @property
    def itl_s(self) -> list[float]:
        """Gaps between consecutive events."""
        times = self.event_times_s
        return [b - a for a, b in itertools.pairwise(times)]

    def to_json(self) -> dict[str, Any]:
        """Plain data, times rounded to 0.01 ms."""
        data = asdict(self)
        data["event_times_s"] = [round(t, 5) for t in self.event_times_s]
        data["sent_s"] = round(self.sent_s, 5)
        data["end_s"] = None if self.end_s is None else round(self.end_s, 5)
        return data


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Service level that goodput counts against, in seconds."""

    ttft_s: float = 1.0
    tpot_s: float = 0.1

    def is_met(self, record: RequestRecord) -> bool:
        """Whether a request was served well. One-token outputs have no TPOT to miss."""
        if not record.is_ok or record.ttft_s > self.ttft_s:
            return False
        tpot_s = record.tpot_s
        return tpot_s is None or tpot_s <= self.tpot_s


def percentile(values: Sequence[float], quantile: float) -> float:
    """Quantile in [0, 1] by linear interpolation between order statistics.

    Raises:
        ValueError: no values, or a quantile outside [0, 1].
    """
    if not values:
        raise ValueError("percentile of no values")
    if not 0 <= quantile <= 1:
        raise ValueError(f"quantile must be in [0, 1], got {quantile}")
    ordered = sorted(values)
    position = quantile * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def describe(values: Sequence[float], *, scale: float = 1.0) -> dict[str, float] | None:
    """Mean, p50, p90, p99, max and count of `values` times `scale`; None when there are none."""
    if not values:
        return None
    summary = {"mean": sum(values) / len(values) * scale}
    summary |= {f"p{q * 100:g}": percentile(values, q) * scale for q in QUANTILES}
    summary |= {"max": max(values) * scale}
    return {key: round(value, 3) for key, value in summary.items()} | {"count": len(values)}


def summarise(records: Sequence[RequestRecord], objective: Objective) -> dict[str, Any]:
    """The figures of one run. Latencies in ms, rates per second of wall time.

    Wall time runs from the first request sent to the last event or end of stream.
    """
    ok = [record for record in records if record.is_ok]
    failed = [record for record in records if not record.is_ok]
    wall_s = _wall_s(records)
    num_output = sum(record.num_output_tokens for record in ok)
    num_events = sum(len(record.event_times_s) for record in ok)
    num_good = sum(objective.is_met(record) for record in records)
    tpots = [tpot for record in ok if (tpot := record.tpot_s) is not None]
    return {
        "num_requests": len(records),
        "num_ok": len(ok),
        "num_failed": len(failed),
        "errors": _count(record.error or "no tokens" for record in failed),
        "wall_s": round(wall_s, 4),
        "output_tokens": num_output,
        "prompt_tokens": sum(record.num_prompt_tokens for record in ok),
        "cached_prompt_tokens": sum(record.num_cached_tokens for record in ok),
        "output_tokens_per_s": _rate(num_output, wall_s),
        "requests_per_s": _rate(len(ok), wall_s),
        "goodput_requests_per_s": _rate(num_good, wall_s),
        "goodput_share": round(num_good / len(records), 4) if records else 0.0,
        "tokens_per_event": round(num_output / num_events, 3) if num_events else None,
        "ttft_ms": describe([record.ttft_s for record in ok], scale=1e3),
        "tpot_ms": describe(tpots, scale=1e3),
        "itl_ms": describe([gap for record in ok for gap in record.itl_s], scale=1e3),
        "e2e_ms": describe([record.e2e_s for record in ok], scale=1e3),
    }


def find_knee(points: Sequence[tuple[int, float]]) -> int | None:
    """The concurrency past which waiting grows faster than throughput.

    It maximises Kleinrock's power, throughput / latency. In a closed loop Little's law makes the
    latency of a request proportional to concurrency / throughput, so power is
    throughput**2 / concurrency and needs no second measurement. Ties go to the smaller concurrency.

    Args:
        points: (concurrency, output tokens per second).

    Returns:
        The concurrency at the knee, or None with fewer than three points: it is then an end.
    """
    if len(points) < 3:
        return None
    best = max(sorted(points), key=lambda point: point[1] ** 2 / point[0])
    return best[0]


def longest_stall(
    streams: Iterable[RequestRecord], *, start_s: float, end_s: float
) -> dict[str, float] | None:
    """The largest gap that streams show while something else is going on, in decode steps.

    A decode step is the median gap before `start_s`, once all streams had their first token. A gap
    counts when it overlaps [start_s, end_s].

    Returns:
        Median step, largest gap (both ms) and their ratio; None when there is nothing to compare.
    """
    records = [record for record in streams if record.event_times_s]
    if not records:
        return None
    settled_s = max(record.event_times_s[0] for record in records)
    before: list[float] = []
    during: list[float] = []
    for record in records:
        times = record.event_times_s
        for a, b in itertools.pairwise(times):
            if settled_s <= a and b <= start_s:
                before.append(b - a)
            if b > start_s and a < end_s:
                during.append(b - a)
    if not before or not during:
        return None
    step_s = percentile(before, 0.5)
    return {
        "decode_step_ms": round(step_s * 1e3, 3),
        "largest_itl_ms": round(max(during) * 1e3, 3),
        "largest_itl_steps": round(max(during) / step_s, 3),
        "median_itl_steps": round(percentile(during, 0.5) / step_s, 3),
        "num_gaps": len(during),
    }


def _wall_s(records: Sequence[RequestRecord]) -> float:
    ends = [
        end
        for record in records
        for end in (record.end_s, record.event_times_s[-1] if record.event_times_s else None)
        if end is not None
    ]
    if not ends:
        return 0.0
    return max(ends) - min(record.sent_s for record in records)


def _rate(count: int, wall_s: float) -> float:
    return round(count / wall_s, 3) if wall_s > 0 else 0.0


def _count(names: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return counts
