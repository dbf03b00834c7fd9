"""Moves the wall clock of every Python process that starts with this directory on PYTHONPATH.

The offset, a float64 of seconds, lies in the file that SYSTOLE_CHAOS_CLOCK names and is read at
each call: the clock jumps in all processes at once. The monotonic clock stays: it cannot jump.
"""

import mmap
import os
import struct
import time

_path = os.environ.get("SYSTOLE_CHAOS_CLOCK")
if _path and os.path.exists(_path):
    with open(_path, "rb") as _file:
        _offset = mmap.mmap(_file.fileno(), 8, prot=mmap.PROT_READ)
    _real_time, _real_time_ns = time.time, time.time_ns

    def _time() -> float:
        return _real_time() + struct.unpack("d", _offset[:8])[0]

    def _time_ns() -> int:
        return _real_time_ns() + int(struct.unpack("d", _offset[:8])[0] * 1e9)

    time.time, time.time_ns = _time, _time_ns
