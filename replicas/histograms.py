"""Bounds of the histograms' buckets: fine enough to read a P999 off, few enough to keep.

Each bound is about a third above the one before, so a quantile is right within that.
"""

from __future__ import annotations


def geometric_bounds(first: float, last: float, *, per_decade: int) -> tuple[float, ...]:
    """Return bounds from `first` to at least `last`, rounded to two digits, `per_decade` a tenfold.

    Args:
        first: smallest bound, > 0.
        last: the largest bound is this or the next above.
        per_decade: bounds between x and 10 x, x excluded.
    """
    bounds: list[float] = []
    index = 0
    while not bounds or bounds[-1] < last:
        bounds.append(float(f"{first * 10 ** (index / per_decade):.2g}"))
        index += 1
    return tuple(bounds)


LATENCY_BUCKETS_S = geometric_bounds(0.001, 600.0, per_decade=6)
"""From a millisecond to ten minutes: queues, first tokens."""

INTER_TOKEN_BUCKETS_S = geometric_bounds(0.001, 10.0, per_decade=8)
"""From a millisecond to ten seconds: tokens and steps."""

REQUEST_BUCKETS_S = geometric_bounds(0.01, 3600.0, per_decade=5)
"""From ten milliseconds to an hour: whole requests."""

RATIO_BUCKETS = (
    *(0.05, 0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9),
    *(1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0),
)
"""What was predicted over what came, finest around 1."""

CPU_TIME_BUCKETS_S = geometric_bounds(0.00001, 0.1, per_decade=5)
"""From ten microseconds to a tenth of a second: what a decision costs the host."""
