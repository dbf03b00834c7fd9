"""Decodes MXFP4: blocks of 32 four-bit floats that share a power of two.

Format: OCP Microscaling Formats (MX) 1.0, with element E2M1 and scale E8M0. In a checkpoint, a
weight W [E, N, K] is W_blocks [E, N, K / 32, 16] of two elements a byte, the lower half first, and
W_scales [E, N, K / 32], exponents biased by 127. Decoding is exact in bfloat16 and float32.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from replicas.models.param_spec import Source

_BLOCK = 32
_BIAS = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)


def sources(name: str, shape: tuple[int, int, int]) -> tuple[Source, Source]:
    """Return the tensors that hold a weight [E, N, K].

    Raises:
        ValueError: K is not a multiple of 32.
    """
    *rows, num_columns = shape
    if num_columns % _BLOCK:
        raise ValueError(f"{name} in MXFP4 needs rows of a multiple of {_BLOCK}, got {num_columns}")
    num_blocks = num_columns // _BLOCK
    return (
        Source(name=f"{name}_blocks", shape=(*rows, num_blocks, _BLOCK // 2), is_packed=True),
        Source(name=f"{name}_scales", shape=(*rows, num_blocks), is_packed=True),
    )


def decode(blocks: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Return weights [..., K] of blocks [..., K / 32, 16] and scales [..., K / 32]."""
    values = np.empty((*blocks.shape, 2), np.float32)
    values[..., 0] = _VALUES[blocks & 0xF]
    values[..., 1] = _VALUES[blocks >> 4]
    values = values.reshape(*scales.shape, _BLOCK)
    exponents = scales.astype(np.int32) - _BIAS
    return np.ldexp(values, exponents[..., None]).reshape(*scales.shape[:-1], -1)
