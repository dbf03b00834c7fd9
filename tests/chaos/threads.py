"""Stops a single thread of another process, as a device that never answers does. Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

_ATTACH, _DETACH = 16, 17
_WALL = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


@contextlib.contextmanager
def hung(pid: int, name: str) -> Iterator[int]:
    """Hold the thread of this name still, as a debugger does; the others run on.

    Yields:
        The thread's id; `reap` it while the process may be killed.

    Raises:
        OSError: there is no such thread, or it cannot be traced.
    """
    thread = _find(pid, name)
    if _libc.ptrace(_ATTACH, thread, None, None) != 0:
        raise OSError(ctypes.get_errno(), f"cannot trace thread {thread} of {pid}")
    try:
        yield thread
    finally:
        _libc.ptrace(_DETACH, thread, None, None)
        reap(thread)


def reap(thread: int) -> None:
    """Take notice of what became of a traced thread; a dead one is gone only then."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(thread, os.WNOHANG | _WALL)


def _find(pid: int, name: str) -> int:
    for task in Path(f"/proc/{pid}/task").iterdir():
        if (task / "comm").read_text().strip() == name:
            return int(task.name)
    raise OSError(f"process {pid} has no thread {name!r}")
