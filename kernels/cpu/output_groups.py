"""The order in which the native matmuls read a weight: 32 outputs side by side, word by word.

A word is 4 bytes of an output's inputs: two of bf16, or four of 8 bits. Invariant: beside weight
and result it takes a few megabytes, and XLA uses the result in place.
"""

from __future__ import annotations

import numpy as np

from kernels import host_memory

GROUP = 32
"""Outputs whose weights lie together; as kGroup and kInt8Group in src."""
_WORD_BYTES = 4
_BLOCK_BYTES = 1 << 20


def group_outputs(parts: np.ndarray, *, dtype: np.dtype, fill: int) -> np.ndarray:
    """Order the outputs of B parts in groups, with 32 / B from each part.

    Args:
        parts: [B, N, K] of any dtype that `dtype` can be cast from.
        dtype: of at most 4 bytes.
        fill: what stands for outputs past N, and for inputs past K.

    Returns:
        [ceil(N * B / 32), ceil(K / W), 32, W], W inputs being 4 bytes.
    """
    num_parts, num_outputs, num_inputs = parts.shape
    part, width = GROUP // num_parts, _WORD_BYTES // dtype.itemsize
    num_groups, num_words = -(-num_outputs // part), -(-num_inputs // width)
    words = host_memory.empty((num_groups, num_words, num_parts, part), np.uint32)
    step = max(1, _BLOCK_BYTES // (GROUP * num_words * _WORD_BYTES))
    for begin in range(0, num_groups, step):
        end = min(begin + step, num_groups)
        rows = parts[:, begin * part : end * part]
        block = np.full((num_parts, (end - begin) * part, num_words * width), fill, dtype)
        block[:, : rows.shape[1], :num_inputs] = rows
        block_words = block.view(np.uint32).reshape(num_parts, end - begin, part, num_words)
        words[begin:end] = block_words.transpose(1, 3, 0, 2)
    return words.view(dtype).reshape(num_groups, num_words, GROUP, width)
