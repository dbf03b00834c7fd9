"""Type guards for parsed JSON, whose values the type checker cannot know."""

from __future__ import annotations

from typing import Any, TypeGuard


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Whether a value is a JSON array."""
    return isinstance(value, list)


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether a value is a JSON object."""
    return isinstance(value, dict)


def is_token_ids(value: object) -> TypeGuard[list[int]]:
    """Whether a value is an array of integers >= 0 (`true` is not one)."""
    return is_list(value) and all(type(i) is int and i >= 0 for i in value)


def is_deeper(value: object, limit: int) -> bool:
    """Whether containers are nested deeper than `limit`. Breadth first: no recursion."""
    level: list[object] = [value]
    for _ in range(limit + 1):
        inner: list[object] = []
        for item in level:
            if is_object(item):
                inner += item.values()
            elif is_list(item):
                inner += item
        if not inner:
            return False
        level = inner
    return True
