"""Settings of the autoscaling policy.

Standard library only: Serve's controller gets it by value and may not have this checkout.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import time
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_CLOCK = re.compile(r"([01]\d|2[0-3]):([0-5]\d)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Other bounds at some times of the week.

    Attributes:
        start: "HH:MM", when it begins.
        end: "HH:MM", when it ends; not after `start`: on the next day.
        days: on which it begins, of `DAYS`.
        min_replicas: at least so many; None: as elsewhere.
        max_replicas: at most so many; 0 shuts the service down; None: as elsewhere.
    """

    start: str
    end: str
    days: tuple[str, ...] = DAYS
    min_replicas: int | None = None
    max_replicas: int | None = None

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            read_clock(getattr(self, name))
        for day in self.days:
            if day not in DAYS:
                raise ValueError(f"days must be of {', '.join(DAYS)}, got {day!r}")
        low, high = self.min_replicas, self.max_replicas
        if low is None and high is None:
            raise ValueError("a window needs min_replicas or max_replicas")
        if min(low or 0, high or 0) < 0 or (low is not None and high is not None and low > high):
            raise ValueError(f"need 0 <= min_replicas <= max_replicas, got {low} and {high}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalingConfig:
    """When to add and when to release replicas.

    Attributes:
        min_replicas: at least so many; 0 lets the last one go.
        max_replicas: at most so many.
        initial_replicas: at deployment, until something is known; None: min_replicas, at least 1.
        ttft_target_s: time to first token that 95% of the requests should see.
        tpot_target_s: mean time per output token that they should see.
        headroom: share by which the load may exceed what is foreseen.
        kv_target: share of a replica's KV pages that may be in use.
        boot_s: from the order for a replica to its first answer: VM, image, weights, programs.
        upscale_delay_s: for so long without a break more must be needed before more is ordered.
        downscale_window_s: a replica goes when it was not needed at any time for so long.
        scale_to_zero_after_s: the last replica goes after so long without a request.
        report_interval_s: between the reports of a replica.
        timezone: of `schedule`, an IANA name.
        schedule: other bounds at some times; a lower bound is met `boot_s` ahead of its window.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    initial_replicas: int | None = None
    ttft_target_s: float = 2.0
    tpot_target_s: float = 0.1
    headroom: float = 0.15
    kv_target: float = 0.9
    boot_s: float = 240.0
    upscale_delay_s: float = 10.0
    downscale_window_s: float = 600.0
    scale_to_zero_after_s: float = 1800.0
    report_interval_s: float = 2.0
    timezone: str = "UTC"
    schedule: tuple[Window, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.min_replicas <= self.max_replicas or self.max_replicas < 1:
            raise ValueError(
                "need 0 <= min_replicas <= max_replicas and max_replicas >= 1, got "
                f"{self.min_replicas} and {self.max_replicas}"
            )
        initial = self.initial_replicas
        if initial is not None and not self.min_replicas <= initial <= self.max_replicas:
            raise ValueError(
                f"initial_replicas must be in [{self.min_replicas}, {self.max_replicas}], "
                f"got {initial}"
            )
        for name in ("ttft_target_s", "tpot_target_s", "report_interval_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")
        for name in (
            "headroom",
            "boot_s",
            "upscale_delay_s",
            "downscale_window_s",
            "scale_to_zero_after_s",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        if not 0 < self.kv_target <= 1:
            raise ValueError(f"kv_target must be in (0, 1], got {self.kv_target}")
        try:
            ZoneInfo(self.timezone)
        except (ZoneInfoNotFoundError, ValueError):
            raise ValueError(f"timezone {self.timezone!r} is not an IANA name") from None
        for window in self.schedule:
            if (window.min_replicas or 0) > self.max_replicas:
                raise ValueError(
                    f"schedule: min_replicas {window.min_replicas} exceeds max_replicas "
                    f"{self.max_replicas}"
                )

    @property
    def can_reach_zero(self) -> bool:
        """Whether there are times without a replica, by idleness or by schedule."""
        return self.min_replicas == 0 or any(
            window.max_replicas == 0 or window.min_replicas == 0 for window in self.schedule
        )


def read_clock(text: str) -> time:
    """Return the time of day of "HH:MM".

    Raises:
        ValueError: it is none.
    """
    match = _CLOCK.fullmatch(text)
    if match is None:
        raise ValueError(f'a time of day is "HH:MM", got {text!r}')
    return time(int(match[1]), int(match[2]))
