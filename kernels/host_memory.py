"""Host arrays for weights: where XLA uses them in place, and gone as soon as they are freed.

Memory of the C library's heap is neither: XLA copies what is not aligned, and a freed array of some
megabytes stays with the process. Knows no weights.
"""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

_ALIGNMENT = 64
"""What XLA asks of host memory that it uses in place."""
_MAPPED_BYTES = 1 << 20
"""Arrays from this size on are mapped; a mapping takes whole pages and a system call."""


def empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an array of arbitrary content that XLA need not copy."""
    dtype = np.dtype(dtype)
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes >= _MAPPED_BYTES:
        memory = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
        return memory.view(dtype).reshape(shape)
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    offset = -memory.ctypes.data % _ALIGNMENT
    return memory[offset : offset + num_bytes].view(dtype).reshape(shape)
