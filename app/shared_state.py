"""What all ingress replicas of an application share: stored responses and rate limits.

A Serve deployment with one replica, so there is one truth and no lock. Everything is in its memory
and gone when it is restarted: stored responses are then unknown, and rate limits begin anew.
Invariant: no method waits for anything, so none can be overtaken in its middle.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from dataclasses import dataclass
from typing import Any, Protocol, cast

from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from app.rate_limits import NO_LIMITS, Allowance, RateLimiter, RateLimits
from app.responses.store import DEFAULT_LIMITS, ResponseStore, Signal, StoredResponse, StoreLimits
from replicas.errors import EngineNotReady


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStateConfig:
    """What the shared state is told.

    Attributes:
        responses: bounds of the stored responses.
        limits: of each key.
    """

    responses: StoreLimits = DEFAULT_LIMITS
    limits: RateLimits = NO_LIMITS


CALL_TIMEOUT_S = 5.0
"""How long the state may be away; Serve itself would wait until there is one again."""


class SharedAccess(Protocol):
    """The shared state as an ingress sees it; all methods raise EngineNotReady while it is away."""

    async def put_response(
        self, owner: str, response_id: str, response: StoredResponse, *, is_running: bool
    ) -> bool:
        """See `ResponseStore.put`."""
        ...

    async def get_response(self, owner: str, response_id: str) -> StoredResponse | None:
        """See `ResponseStore.get`."""
        ...

    async def delete_response(self, owner: str, response_id: str) -> bool:
        """See `ResponseStore.delete`."""
        ...

    async def cancel_response(self, owner: str, response_id: str) -> StoredResponse | None:
        """See `ResponseStore.cancel`."""
        ...

    async def poll_response(self, response_id: str) -> Signal:
        """See `ResponseStore.poll`."""
        ...

    async def acquire(self, name: str, num_tokens: int) -> Allowance:
        """See `RateLimiter.acquire`."""
        ...

    async def settle(self, name: str, num_tokens: int) -> None:
        """See `RateLimiter.settle`."""
        ...


class SharedState:
    """The state itself. Bind undecorated; one replica."""

    def __init__(self, config: SharedStateConfig | None = None) -> None:
        config = config or SharedStateConfig()
        self._responses = ResponseStore(config.responses)
        self._limiter = RateLimiter(config.limits)

    async def put_response(
        self, owner: str, response_id: str, response: StoredResponse, *, is_running: bool
    ) -> bool:
        """See `ResponseStore.put`."""
        now = time.monotonic()
        return self._responses.put(owner, response_id, response, now, is_running=is_running)

    async def get_response(self, owner: str, response_id: str) -> StoredResponse | None:
        """See `ResponseStore.get`."""
        return self._responses.get(owner, response_id, time.monotonic())

    async def delete_response(self, owner: str, response_id: str) -> bool:
        """See `ResponseStore.delete`."""
        return self._responses.delete(owner, response_id, time.monotonic())

    async def cancel_response(self, owner: str, response_id: str) -> StoredResponse | None:
        """See `ResponseStore.cancel`."""
        return self._responses.cancel(owner, response_id, time.monotonic())

    async def poll_response(self, response_id: str) -> Signal:
        """See `ResponseStore.poll`."""
        return self._responses.poll(response_id, time.monotonic())

    async def acquire(self, name: str, num_tokens: int) -> Allowance:
        """See `RateLimiter.acquire`."""
        return self._limiter.acquire(name, num_tokens, time.monotonic())

    async def settle(self, name: str, num_tokens: int) -> None:
        """See `RateLimiter.settle`."""
        self._limiter.settle(name, num_tokens, time.monotonic())


class SharedStateHandle:
    """The shared state over a Serve handle."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._methods: dict[str, DeploymentHandle[Any]] = {}

    async def put_response(
        self, owner: str, response_id: str, response: StoredResponse, *, is_running: bool
    ) -> bool:
        """See `ResponseStore.put`."""
        return await self._call("put_response", owner, response_id, response, is_running=is_running)

    async def get_response(self, owner: str, response_id: str) -> StoredResponse | None:
        """See `ResponseStore.get`."""
        return await self._call("get_response", owner, response_id)

    async def delete_response(self, owner: str, response_id: str) -> bool:
        """See `ResponseStore.delete`."""
        return await self._call("delete_response", owner, response_id)

    async def cancel_response(self, owner: str, response_id: str) -> StoredResponse | None:
        """See `ResponseStore.cancel`."""
        return await self._call("cancel_response", owner, response_id)

    async def poll_response(self, response_id: str) -> Signal:
        """See `ResponseStore.poll`."""
        return await self._call("poll_response", response_id)

    async def acquire(self, name: str, num_tokens: int) -> Allowance:
        """See `RateLimiter.acquire`."""
        return await self._call("acquire", name, num_tokens)

    async def settle(self, name: str, num_tokens: int) -> None:
        """See `RateLimiter.settle`."""
        await self._call("settle", name, num_tokens)

    async def _call(self, name: str, *args: object, **options: object) -> Any:
        method = self._methods.get(name)
        if method is None:
            # Not in __init__: see `LLMClient._method`.
            method = self._methods[name] = self._handle.options(
                method_name=name,
                _by_reference=False,
                request_serialization="pickle",
                response_serialization="pickle",
            )
        # In an empty context: see `LLMClient.call`.
        response = contextvars.Context().run(method.remote, *args, **options)
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                return await cast("DeploymentResponse[Any]", response)
        except (RayActorError, DeploymentUnavailableError, TimeoutError) as error:
            raise EngineNotReady(
                f"the state that the ingress replicas share cannot be reached: {error!r}",
                retry_after_s=1.0,
            ) from error
