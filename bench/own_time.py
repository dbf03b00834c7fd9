"""A clock that stands still while this process does.

On a machine that is shared, everything here may be stopped for minutes while somebody measures.
Limits must not run out meanwhile, and what fails across such a pause is tried again.
"""

from __future__ import annotations

import threading
import time

TICK_S = 0.25
PAUSE_S = 2.0
"""A tick that comes this much too late was a pause; less is a busy machine."""


class OwnTime:
    """Monotonic seconds without the pauses of this process."""

    def __init__(self) -> None:
        self.paused_s = 0.0
        """All pauses since the start."""
        self._ticked_at = time.monotonic()
        self._lock = threading.Lock()
        threading.Thread(target=self._tick, daemon=True, name="own-time").start()

    def now(self) -> float:
        """Seconds; as far apart as on a watch that was stopped in the pauses."""
        with self._lock:
            self._look()
            return self._ticked_at - self.paused_s

    def _look(self) -> None:
        now = time.monotonic()
        late_s = now - self._ticked_at - TICK_S
        if late_s > PAUSE_S:
            self.paused_s += late_s
        self._ticked_at = now

    def _tick(self) -> None:
        while True:
            time.sleep(TICK_S)
            with self._lock:
                self._look()


CLOCK = OwnTime()
now = CLOCK.now
