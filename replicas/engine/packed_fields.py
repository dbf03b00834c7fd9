"""Several i32 arrays laid end to end in one vector: what host and device exchange.

One transfer instead of a dozen small ones. Invariant: both sides derive the layout from the same
shapes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from jax import lax
from jaxtyping import Array, Int


class PackedFields:
    """Arrays of i32 laid end to end in one vector.

    Attributes:
        size: length of the vector.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.size = 0
        self._spans: dict[str, tuple[int, int, tuple[int, ...]]] = {}
        for name, shape in shapes.items():
            end = self.size + int(np.prod(shape))
            self._spans[name] = (self.size, end, shape)
            self.size = end

    def views(self, packed: npt.NDArray[np.int32]) -> dict[str, npt.NDArray[np.int32]]:
        """Writable views of every field of a packed host vector."""
        return {
            name: packed[start:end].reshape(shape)
            for name, (start, end, shape) in self._spans.items()
        }

    def start(self, name: str) -> int:
        """Where a field begins."""
        return self._spans[name][0]

    def split(self, packed: Int[Array, "... words"]) -> dict[str, Int[Array, ...]]:
        """Every field of packed vectors on the device; traced."""
        outer = packed.shape[:-1]
        return {
            name: lax.slice_in_dim(packed, start, end, axis=-1).reshape(*outer, *shape)
            for name, (start, end, shape) in self._spans.items()
        }
