"""The state that ingress replicas share, as they reach it: by a Serve handle."""

from __future__ import annotations

import asyncio
import inspect
import pickle
from typing import Any, cast

import pytest
from ray.exceptions import RayActorError

from app import shared_state
from app.rate_limits import Allowance, RateLimit, RateLimits
from app.responses.store import Signal, StoredResponse
from app.shared_state import SharedState, SharedStateConfig, SharedStateHandle
from replicas.errors import EngineNotReady
from tests.fakes import FakeHandle

BODY = b'{"status":"in_progress","incomplete_details":null}'


class Lost(SharedState):
    """Its process has died."""

    async def poll_response(self, response_id: str) -> Signal:
        raise RayActorError

    async def acquire(self, name: str, num_tokens: int) -> Allowance:
        await asyncio.sleep(60)
        raise AssertionError("nobody waits so long")


async def test_every_method_of_the_state_is_reached_by_its_handle() -> None:
    limits = RateLimits(default=RateLimit(requests_per_minute=2, tokens_per_minute=100))
    state = SharedState(SharedStateConfig(limits=limits))
    shared = SharedStateHandle(cast(Any, FakeHandle(state)))
    stored = StoredResponse(body=BODY, items=b"[]")
    assert await shared.put_response("me", "r", stored, is_running=True)
    assert await shared.get_response("me", "r") == stored
    assert await shared.poll_response("r") is Signal.RUN
    assert await shared.cancel_response("me", "r") is not None
    assert await shared.poll_response("r") is Signal.CANCEL
    assert await shared.delete_response("me", "r")
    allowance = await shared.acquire("name", 30)
    await shared.settle("name", -30)
    assert allowance.is_granted
    tokens = (await shared.acquire("name", 0)).tokens
    assert tokens is not None
    assert tokens.remaining == 100
    for value in (stored, allowance, Signal.RUN, limits):
        assert pickle.loads(pickle.dumps(value)) == value


async def test_a_state_that_is_away_is_a_serving_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_state, "CALL_TIMEOUT_S", 0.02)
    shared = SharedStateHandle(cast(Any, FakeHandle(Lost())))
    with pytest.raises(EngineNotReady, match="cannot be reached"):
        await shared.poll_response("r")
    with pytest.raises(EngineNotReady, match="cannot be reached"):
        await shared.acquire("name", 1)


def test_the_handle_has_the_methods_of_the_state() -> None:
    def methods(cls: type) -> dict[str, inspect.Signature]:
        return {
            name: inspect.signature(method)
            for name, method in vars(cls).items()
            if not name.startswith("_")
        }

    assert methods(SharedStateHandle) == methods(SharedState)
