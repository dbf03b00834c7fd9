"""What the HTTP side needs of whoever runs its sequences; tests put a fake in its place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from app.demands import NO_HINTS
from replicas.errors import EngineNotReady, ServingError
from replicas.wire import ProfileResult, RoutingHints, SamplingParams, ServiceStatus, TokenDelta

STATUS_TIMEOUT_S = 1.5


class TokenClient(Protocol):
    """The part of `app.client.LLMClient` that the ingress uses."""

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
        priority: int = 0,
        cache_salt: str = "",
        traceparent: str | None = None,
        hints: RoutingHints = NO_HINTS,
    ) -> AsyncGenerator[TokenDelta]:
        """Stream the tokens of one sequence; closing it aborts the sequence."""
        ...

    @property
    def num_open(self) -> int:
        """Sequences whose tokens are still expected."""
        ...

    async def status(self) -> ServiceStatus:
        """Ask the router."""
        ...

    async def drop_prefix_cache(self) -> int:
        """Have every replica forget cached pages; return how many did."""
        ...

    async def profile(self, num_steps: int, max_s: float) -> list[ProfileResult | ServingError]:
        """Have every replica trace its next steps; return what each has written, or why not."""
        ...

    async def drain(self, replica_id: str | None, *, is_drained: bool) -> ServiceStatus:
        """Give a replica, or with None the service, no new requests, or give them again."""
        ...

    async def close(self) -> None:
        """Release the sink and all connections."""
        ...


async def status_soon(client: TokenClient) -> ServiceStatus:
    """Ask the router, but not for long: one that has not started yet does not answer.

    Raises:
        EngineNotReady: it is silent.
        ServingError: it cannot be reached.
    """
    try:
        async with asyncio.timeout(STATUS_TIMEOUT_S):
            return await client.status()
    except TimeoutError:
        raise not_ready() from None


def not_ready() -> EngineNotReady:
    """Return what is said while no replica has finished its warm-up."""
    return EngineNotReady(
        "the model is still loading; /ready tells when it can answer", retry_after_s=5
    )
