"""The content filter: a function of the operator's that may refuse what goes in and comes out.

    def check(text: str, stage: str) -> str | None

`text` is the whole prompt, or all of an answer's text so far, reasoning and calls included; `stage`
is "input" or "output". A string refuses, and is the reason. The function may be asynchronous; one
that is not runs on the event loop, so it must be quick. Invariant: no text reaches a client before
the filter has seen it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Awaitable, Callable
from typing import Literal, cast

from replicas.errors import InvalidRequest

Stage = Literal["input", "output"]
Check = Callable[[str, Stage], "str | Awaitable[str | None] | None"]


class ContentFiltered(InvalidRequest):
    """The operator's filter refuses the prompt."""

    code = "content_filter"


def load_check(name: str) -> Check:
    """Import the function that `module:function` names.

    Raises:
        ValueError: there is none; the message says why.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ValueError(f"expected 'module:function', got {name!r}")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"cannot import '{module_name}': {error}") from error
    check = getattr(module, function_name, None)
    if not callable(check):
        raise ValueError(f"'{module_name}' has no function '{function_name}'")
    return cast(Check, check)


class ContentFilter:
    """Asks the function."""

    def __init__(self, check: Check) -> None:
        self._check = check

    async def check_input(self, text: str, *, param: str) -> None:
        """Let a prompt pass, or not.

        Raises:
            ContentFiltered: not.
        """
        if (reason := await self._ask(text, "input")) is not None:
            raise ContentFiltered(
                f"the request was refused by the content filter: {reason}", param=param
            )

    async def refuses_output(self, text: str) -> bool:
        """Whether an answer has to end before its newest piece."""
        return await self._ask(text, "output") is not None

    async def _ask(self, text: str, stage: Stage) -> str | None:
        answer = self._check(text, stage)
        if inspect.isawaitable(answer):
            answer = await answer
        return answer
