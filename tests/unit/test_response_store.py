"""What is kept of responses: bounds, owners, cancelling, and what becomes of lost ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.responses.store import LEASE_S, ResponseStore, Signal, StoredResponse, StoreLimits


def response(status: str = "completed", size: int = 0) -> StoredResponse:
    body = {"status": status, "incomplete_details": None, "error": None, "text": "x" * size}
    return StoredResponse(body=json.dumps(body).encode(), items=b"[]")


def status_of(stored: StoredResponse | None) -> str | None:
    return None if stored is None else json.loads(stored.body)["status"]


def put(store: ResponseStore, response_id: str, now: float = 0.0, **options: Any) -> bool:
    stored = response(options.pop("status", "completed"), options.pop("size", 0))
    return store.put("me", response_id, stored, now, **{"is_running": False, **options})


def test_responses_are_forgotten_after_their_time() -> None:
    store = ResponseStore(StoreLimits(ttl_s=10))
    put(store, "a", 0.0)
    put(store, "b", 5.0)
    assert store.get("me", "a", 10.0) is not None
    assert store.get("me", "a", 10.1) is None
    assert store.get("me", "b", 15.0) is not None
    assert store.get("me", "b", 15.1) is None
    assert (len(store), store.num_bytes) == (0, 0)


def test_the_oldest_make_room() -> None:
    store = ResponseStore(StoreLimits(max_count=3, max_bytes=1000))
    for name in "abcd":
        assert put(store, name)
    assert [store.get("me", name, 0.0) is not None for name in "abcd"] == [False, True, True, True]
    assert put(store, "e", size=800)
    assert store.get("me", "d", 0.0) is not None
    assert store.get("me", "c", 0.0) is None
    assert store.num_bytes <= 1000
    assert not put(store, "f", size=2000), "larger than all there is"
    assert store.get("me", "e", 0.0) is not None, "and nobody had to go for it"


def test_a_response_belongs_to_its_key() -> None:
    store = ResponseStore(StoreLimits())
    put(store, "a", is_running=True, status="in_progress")
    assert store.get("other", "a", 0.0) is None
    assert not store.delete("other", "a", 0.0)
    assert store.cancel("other", "a", 0.0) is None
    assert not store.put("other", "a", response(), 0.0, is_running=False)
    assert status_of(store.get("me", "a", 0.0)) == "in_progress"
    assert store.poll("a", 0.0) is Signal.RUN


def test_a_cancelled_response_stays_so_whatever_its_end() -> None:
    store = ResponseStore(StoreLimits())
    put(store, "a", is_running=True, status="in_progress")
    assert status_of(store.cancel("me", "a", 1.0)) == "cancelled"
    assert store.poll("a", 1.0) is Signal.CANCEL
    put(store, "a", 2.0, status="completed")
    assert status_of(store.get("me", "a", 2.0)) == "cancelled"
    assert status_of(store.cancel("me", "a", 3.0)) == "cancelled"
    put(store, "b")
    assert status_of(store.cancel("me", "b", 3.0)) == "completed", "it had ended"


def test_a_deleted_response_does_not_come_back() -> None:
    store = ResponseStore(StoreLimits())
    put(store, "a", is_running=True, status="in_progress")
    assert store.delete("me", "a", 1.0)
    assert not store.delete("me", "a", 1.0)
    assert store.get("me", "a", 1.0) is None
    assert store.poll("a", 1.0) is Signal.DELETE
    assert not put(store, "a", 2.0)
    assert (len(store), store.num_bytes) == (0, 0)


def test_a_response_whose_ingress_is_silent_has_failed() -> None:
    store = ResponseStore(StoreLimits())
    put(store, "a", is_running=True, status="in_progress")
    store.poll("a", 5.0)
    assert status_of(store.get("me", "a", 5.0 + LEASE_S)) == "in_progress"
    lost = store.get("me", "a", 5.1 + LEASE_S)
    assert lost is not None
    assert json.loads(lost.body)["error"]["code"] == "server_error"
    assert store.poll("gone", 0.0) is Signal.RUN, "a restarted store ends nobody's work"


@pytest.mark.parametrize("fields", [{"ttl_s": 0}, {"max_count": 0}, {"max_bytes": 0}])
def test_bounds_are_checked(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(fields))} must be"):
        StoreLimits(**fields)
