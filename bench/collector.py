"""Keeps Python's cyclic garbage collector out of what is measured, or makes no cycles."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Generator


@contextlib.contextmanager
def collector_off() -> Generator[None]:
    """No garbage collection inside; afterwards as before."""
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_collecting:
            gc.enable()
