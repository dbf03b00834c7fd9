"""What the garbage collector should leave alone in a process that serves."""

from __future__ import annotations

import gc


def freeze_started() -> None:
    """Exempt all objects that exist now from collection; call it once, at the end of a start.

    They live as long as the process. A full collection of them would hold the interpreter lock for
    0.1 s every few minutes, and with it every stream, and the device's thread.
    """
    gc.collect()  # what is garbage by now would stay forever
    gc.freeze()
