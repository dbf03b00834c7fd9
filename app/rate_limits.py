"""Requests and tokens per minute of each API key, as token buckets.

Pure: time is an argument. A bucket holds a minute's worth and refills evenly. Whoever waits for
nothing but a bucket is told how long. Invariant: over any time t a name gets at most its limit
times (1 + t / 1 min), however its requests are spread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from replicas.errors import Overloaded

MINUTE_S = 60.0
BYTES_PER_TOKEN = 4
"""By which a prompt is estimated before it is tokenised."""


class RateLimited(Overloaded):
    """A key has used up what it may; try again after `retry_after_s`."""

    code = "rate_limit_exceeded"


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimit:
    """What one name may do in a minute; None: without limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    def __post_init__(self) -> None:
        for name in ("requests_per_minute", "tokens_per_minute"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be >= 1 or null, got {value}")

    @property
    def is_none(self) -> bool:
        """Whether nothing is limited."""
        return self.requests_per_minute is None and self.tokens_per_minute is None


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimits:
    """Limits of all keys.

    Attributes:
        default: of names that are not in `keys`, each for itself.
        keys: by the name of the key.
    """

    default: RateLimit = RateLimit()
    keys: Mapping[str, RateLimit] = field(default_factory=dict[str, RateLimit])

    def of(self, name: str) -> RateLimit:
        """Return the limits of a name."""
        return self.keys.get(name, self.default)


NO_LIMITS = RateLimits()


@dataclass(frozen=True, slots=True)
class Quota:
    """What is left of one limit.

    Attributes:
        limit: per minute.
        remaining: now.
        reset_s: seconds until all of it is there again.
    """

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """The answer to a request for admission.

    Attributes:
        is_granted: it may go on.
        requests: what is left of the requests; None: they are not limited.
        tokens: what is left of the tokens; None: they are not limited.
        retry_after_s: when a refused one would be granted, if nobody else comes.
    """

    is_granted: bool
    requests: Quota | None = None
    tokens: Quota | None = None
    retry_after_s: float = 0.0

    def headers(self) -> dict[str, str]:
        """Return OpenAI's headers."""
        headers: dict[str, str] = {}
        for name, quota in (("requests", self.requests), ("tokens", self.tokens)):
            if quota is not None:
                headers[f"x-ratelimit-limit-{name}"] = str(quota.limit)
                headers[f"x-ratelimit-remaining-{name}"] = str(quota.remaining)
                headers[f"x-ratelimit-reset-{name}"] = duration(quota.reset_s)
        return headers

    def check(self) -> None:
        """Raise what the client is told.

        Raises:
            RateLimited: it was not granted.
        """
        if self.is_granted:
            return
        used_up = [
            f"{quota.limit} {name} per minute"
            for name, quota in (("requests", self.requests), ("tokens", self.tokens))
            if quota is not None
        ]
        raise RateLimited(
            f"the API key's limit of {' and '.join(used_up)} is reached; try again in "
            f"{duration(self.retry_after_s)}",
            retry_after_s=self.retry_after_s,
        )


class _Bucket:
    __slots__ = ("_at", "_level", "_limit")

    def __init__(self, limit: int, now: float) -> None:
        self._limit = limit
        self._level = float(limit)
        self._at = now

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` is there; more than the bucket holds counts as a full one."""
        self._refill(now)
        missing = min(amount, self._limit) - self._level
        return max(0.0, missing * MINUTE_S / self._limit)

    def take(self, amount: float) -> None:
        """Take an amount; what is not there is owed. A negative amount is given back."""
        self._level = min(float(self._limit), self._level - amount)

    def quota(self) -> Quota:
        missing_s = (self._limit - self._level) * MINUTE_S / self._limit
        return Quota(self._limit, max(0, int(self._level)), missing_s)

    def _refill(self, now: float) -> None:
        gained = (now - self._at) * self._limit / MINUTE_S
        self._level = min(float(self._limit), self._level + gained)
        self._at = now


class RateLimiter:
    """The buckets of all names. There is one for the whole application."""

    def __init__(self, limits: RateLimits) -> None:
        self._limits = limits
        self._buckets: dict[str, tuple[_Bucket | None, _Bucket | None]] = {}

    def acquire(self, name: str, num_tokens: int, now: float) -> Allowance:
        """Let one request of so many tokens, as far as is known, pass or not.

        A request that needs more than a minute's tokens passes when the bucket is full, and the
        name is in debt for as long as they are worth.
        """
        requests, tokens = self._of(name, now)
        waits_s = [0.0]
        if requests is not None:
            waits_s.append(requests.wait_s(1, now))
        if tokens is not None:
            waits_s.append(tokens.wait_s(max(1, num_tokens), now))
        is_granted = max(waits_s) <= 0
        if is_granted:
            if requests is not None:
                requests.take(1)
            if tokens is not None:
                tokens.take(num_tokens)
        return Allowance(
            is_granted=is_granted,
            requests=None if requests is None else requests.quota(),
            tokens=None if tokens is None else tokens.quota(),
            retry_after_s=max(waits_s),
        )

    def settle(self, name: str, num_tokens: int, now: float) -> None:
        """Charge what a request used beyond what it acquired; negative: give the rest back."""
        _, tokens = self._of(name, now)
        if tokens is not None:
            tokens.wait_s(0, now)
            tokens.take(num_tokens)

    def _of(self, name: str, now: float) -> tuple[_Bucket | None, _Bucket | None]:
        if name not in self._buckets:
            limit = self._limits.of(name)
            requests, tokens = limit.requests_per_minute, limit.tokens_per_minute
            self._buckets[name] = (
                None if requests is None else _Bucket(requests, now),
                None if tokens is None else _Bucket(tokens, now),
            )
        return self._buckets[name]


def estimate_tokens(body: Mapping[str, Any], num_bytes: int) -> int:
    """Guess a request's tokens before any work is done for it: its body, and what it asks for."""
    wanted = 0
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        value = body.get(name)
        if type(value) is int and value > 0:
            wanted = value
    n = body.get("n")
    return num_bytes // BYTES_PER_TOKEN + wanted * (n if type(n) is int and n > 0 else 1)


def duration(seconds: float) -> str:
    """Write a time as OpenAI's headers do: 350ms, 7.66s, 2m59s."""
    if seconds < 1:
        return f"{int(seconds * 1000 + 0.999)}ms"
    minutes, rest = divmod(seconds, MINUTE_S)
    text = f"{rest:.2f}".rstrip("0").rstrip(".")
    return f"{int(minutes)}m{text}s" if minutes else f"{text}s"
