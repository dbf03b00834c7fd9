"""One description per parameter: shape, logical axes, and the checkpoint tensors it is made of.

Abstract arrays, shardings and loading all derive from it, so they cannot disagree. A family builds
a tree of these; nothing here knows a family. Invariant: rows of a fused weight are ordered by
shard, so that splitting them evenly over the tensor axis gives every device whole heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jax.typing import DTypeLike


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A tensor of the checkpoint that a parameter is made of.

    Attributes:
        name: its name in the safetensors file.
        shape: its shape there.
        num_heads: groups of rows that are repeated together; matters only with `repeats` > 1.
        repeats: copies of each head: KV heads are replicated when fewer than the tensor axis.
    """

    name: str
    shape: tuple[int, ...]
    num_heads: int = 1
    repeats: int = 1

    @property
    def num_rows(self) -> int:
        """Rows that it contributes to the parameter."""
        return self.shape[0] * self.repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """A parameter before it exists.

    Attributes:
        sources: tensors stacked along the rows, in this order within each shard.
        axes: logical axis name of each dimension (see sharding.py).
        num_shards: devices that a fused weight's rows are ordered for.
        is_float32: kept in f32 whatever the compute dtype (norm weights: small, and used in f32).
    """

    sources: tuple[Source, ...]
    axes: tuple[str, ...]
    num_shards: int = 1
    is_float32: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape over all shards."""
        return (sum(source.num_rows for source in self.sources), *self.sources[0].shape[1:])

    def abstract(self, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        """Return shape and dtype for a model that computes in `dtype`."""
        return jax.ShapeDtypeStruct(self.shape, self._storage_dtype(dtype))

    def assemble(self, tensors: Sequence[np.ndarray], dtype: DTypeLike) -> np.ndarray:
        """Fuse the source tensors into a fresh host array in storage dtype.

        Always a copy: the device array may alias its memory, and a memory-mapped file may change.
        """
        expanded = [
            _repeat_heads(tensor, source)
            for tensor, source in zip(tensors, self.sources, strict=True)
        ]
        if len(expanded) == 1:
            return np.array(expanded[0], dtype=self._storage_dtype(dtype))
        out = np.empty(self.shape, self._storage_dtype(dtype))
        row = 0
        for shard in range(self.num_shards):
            for tensor in expanded:
                rows = tensor.shape[0] // self.num_shards
                out[row : row + rows] = tensor[shard * rows : (shard + 1) * rows]
                row += rows
        return out

    def _storage_dtype(self, dtype: DTypeLike) -> np.dtype:
        return np.dtype(jnp.float32) if self.is_float32 else np.dtype(dtype)


def _repeat_heads(tensor: np.ndarray, source: Source) -> np.ndarray:
    if source.repeats == 1:
        return tensor
    heads = tensor.reshape(source.num_heads, -1, *tensor.shape[1:])
    return heads.repeat(source.repeats, axis=0).reshape(-1, *tensor.shape[1:])
