"""The bounds that a schedule sets at a time. Pure: the time is an argument.

Where windows overlap, the highest lower bound and the lowest upper bound hold, and the upper bound
wins. Outside them the configuration's own bounds hold.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

from app.autoscaling.config import DAYS, AutoscalingConfig, Window, read_clock

_SEARCH_DAYS = 8
"""A window of a weekly schedule begins again within so many days."""


def bounds_at(config: AutoscalingConfig, at: float) -> tuple[int, int]:
    """Return (min_replicas, max_replicas) at a time, seconds since the epoch."""
    open_windows = [window for window in config.schedule if is_open(config, window, at)]
    lows = [w.min_replicas for w in open_windows if w.min_replicas is not None]
    highs = [w.max_replicas for w in open_windows if w.max_replicas is not None]
    high = min([config.max_replicas, *highs])
    low = max(lows) if lows else config.min_replicas
    return min(low, high), high


def bounds_ahead(config: AutoscalingConfig, now: float) -> tuple[int, int]:
    """Return the bounds now, the lower one being the highest until a replica ordered now is up."""
    low, high = bounds_at(config, now)
    opening = [bounds_at(config, edge)[0] for edge in _edges(config, now, now + config.boot_s)]
    # A window that opens soon needs its replicas ordered now, whatever the one that closes allows.
    low = max([low, *opening])
    return low, max(low, high)


def reopens_at(config: AutoscalingConfig, now: float) -> float | None:
    """Return when a service that the schedule has shut down opens; None while it is open."""
    if bounds_at(config, now)[1] > 0:
        return None
    edges = sorted(_edges(config, now, now + _SEARCH_DAYS * 86400.0))
    return next((edge for edge in edges if bounds_at(config, edge)[1] > 0), None)


def is_open(config: AutoscalingConfig, window: Window, at: float) -> bool:
    """Whether a window holds at a time; its end does not belong to it."""
    return any(start <= at < end for start, end in _spans(config, window, at))


def _spans(config: AutoscalingConfig, window: Window, at: float) -> list[tuple[float, float]]:
    """Return the window's spans that begin on the day of `at` or the day before, in seconds."""
    zone = ZoneInfo(config.timezone)
    start, end = read_clock(window.start), read_clock(window.end)
    today = datetime.fromtimestamp(at, zone).date()
    spans: list[tuple[float, float]] = []
    for day in (today - timedelta(days=1), today):
        if DAYS[day.weekday()] in window.days:
            last = day + timedelta(days=1) if end <= start else day
            begins = datetime.combine(day, start, zone)
            ends = datetime.combine(last, end, zone)
            spans.append((begins.timestamp(), ends.timestamp()))
    return spans


def _edges(config: AutoscalingConfig, since: float, until: float) -> list[float]:
    """Return when windows begin or end in (since, until]."""
    edges: set[float] = set()
    day = since
    while day <= until + 86400.0:
        for window in config.schedule:
            edges.update(edge for span in _spans(config, window, day) for edge in span)
        day += 86400.0
    return [edge for edge in edges if since < edge <= until]
