"""What a router answers to requests that it does not take, with when to come back.

Pure: the words and the Retry-After of each refusal. Knows not when to refuse.
"""

from __future__ import annotations

from app.router.admission import MAX_RETRY_AFTER_S, MIN_RETRY_AFTER_S, DrainRate, WaitingQueue
from replicas.errors import DeadlineExceeded, EngineNotReady, Overloaded

NOT_READY_RETRY_AFTER_S = 5.0


def queue_full(
    queue: WaitingQueue, drain_rate: DrainRate, *, num_prompt_tokens: int, now: float
) -> Overloaded:
    """The queue has no room: come back when it will have drained.

    Args:
        queue: as it is.
        drain_rate: how fast it drains.
        num_prompt_tokens: of the request that finds no room.
        now: router clock.
    """
    return Overloaded(
        f"the queue is full: {len(queue)} requests with {queue.num_tokens} prompt tokens wait "
        f"(limits {queue.max_requests} and {queue.max_tokens})",
        retry_after_s=drain_rate.retry_after_s(queue.num_tokens + num_prompt_tokens, now),
    )


def cannot_meet(ttft_s: float, left_s: float) -> Overloaded:
    """The first token is predicted in `ttft_s` and wanted within `left_s`."""
    return Overloaded(
        f"the first token is predicted in {ttft_s:.1f} s, and wanted within {left_s:.1f} s",
        retry_after_s=min(max(ttft_s - left_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S),
    )


def deadline_exceeded() -> DeadlineExceeded:
    """The request has waited for too long."""
    return DeadlineExceeded("the request's time budget was spent before a replica could take it")


def not_ready() -> EngineNotReady:
    """There is no replica."""
    return EngineNotReady(
        "no replica is ready to take the request", retry_after_s=NOT_READY_RETRY_AFTER_S
    )
