"""The request router inside Serve: who is asked first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.router.pinned import PinnedRequestRouter


async def rank(args: list[object] | None) -> tuple[list[set[str]], bool]:
    """Rank replicas a-d for a call with these arguments; also: may Serve back off?"""
    candidates = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in "abcd"]
    pending = args and SimpleNamespace(
        args=args, routing_context=SimpleNamespace(should_backoff=False)
    )
    router = cast(Any, object.__new__(PinnedRequestRouter))  # it keeps no state
    ranks = await router.choose_replicas(candidates, pending or None)
    names = [{replica.replica_id.unique_id for replica in ranked} for ranked in ranks]
    return names, bool(pending) and pending.routing_context.should_backoff


@pytest.mark.parametrize(
    ("route", "expected"),
    [
        ({"target": "b", "excluded": ()}, [{"b"}, {"a", "c", "d"}]),
        ({"target": "b", "excluded": ("a", "d")}, [{"b"}, {"c"}, {"a", "d"}]),
        ({"target": "gone", "excluded": ("a",)}, [{"b", "c", "d"}, {"a"}]),
        ({"target": "gone", "excluded": ("a", "b", "c", "d")}, [{"a", "b", "c", "d"}]),
        ({}, [{"a", "b", "c", "d"}]),
        ("not a route", [{"a", "b", "c", "d"}]),
    ],
)
async def test_the_target_is_first_and_the_excluded_last(
    route: object, expected: list[set[str]]
) -> None:
    assert await rank([route, "request"]) == (expected, True)


async def test_a_call_without_a_request_may_go_anywhere() -> None:
    assert (await rank(None))[0] == [{"a", "b", "c", "d"}]
