"""A profiler's trace of the next steps of an engine: begun and ended on the device thread.

Knows a profiler by two functions (jax's in service, a fake's in tests). Invariant: at most one
trace runs, and one that was begun is ended, by its number of steps, its time, or the loop's end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Profiler:
    """What begins and ends a trace.

    Attributes:
        start: begins one into a directory.
        stop: ends it and writes it.
    """

    start: Callable[[str], object]
    stop: Callable[[], None]


@dataclass(slots=True, kw_only=True)
class StepTrace:
    """One trace that was asked for.

    Attributes:
        directory: where it is written.
        num_steps: how many steps it takes.
        max_s: it ends after this many seconds, whatever has run.
        done: steps that it holds, once it is written; or why it failed.
    """

    directory: Path
    num_steps: int
    max_s: float
    done: Future[int] = field(default_factory=Future[int])


class StepTracer:
    """Runs the traces of one engine loop. Used by the device thread only."""

    def __init__(
        self, profiler: Profiler | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._profiler = profiler
        self._clock = clock
        self._trace: StepTrace | None = None
        self._num_steps = 0
        self._ends_at_s = 0.0

    def begin(self, trace: StepTrace) -> None:
        """Start a trace; one that cannot start fails at once."""
        if not trace.done.set_running_or_notify_cancel():
            return  # nobody waits for it any more; once it runs it cannot be cancelled
        if self._profiler is None:
            trace.done.set_exception(RuntimeError("this engine has no profiler"))
        elif self._trace is not None:
            trace.done.set_exception(RuntimeError("another trace is being taken"))
        else:
            try:
                trace.directory.mkdir(parents=True, exist_ok=True)
                self._profiler.start(str(trace.directory))
            except Exception as error:
                trace.done.set_exception(RuntimeError(f"the profiler does not start: {error}"))
                return
            self._trace, self._num_steps = trace, 0
            self._ends_at_s = self._clock() + trace.max_s

    def advance(self, *, has_stepped: bool) -> None:
        """Count a step; end the trace when it has all of its steps, or its time is over."""
        if self._trace is None:
            return
        self._num_steps += has_stepped
        if self._num_steps >= self._trace.num_steps or self._clock() >= self._ends_at_s:
            self.end()

    def end(self) -> None:
        """Write the trace that runs, if any."""
        trace, self._trace = self._trace, None
        if trace is None or self._profiler is None:
            return
        try:
            self._profiler.stop()
        except Exception as error:
            trace.done.set_exception(RuntimeError(f"the profiler does not stop: {error}"))
        else:
            trace.done.set_result(self._num_steps)
