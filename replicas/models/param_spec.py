"""One description per parameter: shape, logical axes, and the checkpoint tensors it is made of.

Abstract arrays, shardings and loading all derive from it, so they cannot disagree. A family builds
a tree of these; nothing here knows a family. Invariant: rows of a fused weight are ordered by
shard, so that splitting them evenly over the tensor axis gives every device whole heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from kernels import host_memory

if TYPE_CHECKING:
    from jax.typing import DTypeLike

_BLOCK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A tensor of the checkpoint that a parameter is made of, or some of its rows.

    Rows are selected, then repeated by head, then padded with zeros.

    Attributes:
        name: its name in the safetensors file.
        shape: its shape there.
        num_groups: groups of equally many rows, from each of which [begin, end) is taken: q, k or v
            of a tensor that holds all three, once or head by head.
        begin: first row taken of each group.
        end: end of the rows taken of each group; None: the group's.
        num_heads: heads of the selected rows that are repeated together; matters with `repeats`.
        repeats: copies of each head, one after the other.
        num_padding_rows: rows of zeros after the last.
        num_padding_columns: columns of zeros after the last.
        is_packed: a format of bytes, which something else decodes.
    """

    name: str
    shape: tuple[int, ...]
    num_groups: int = 1
    begin: int = 0
    end: int | None = None
    num_heads: int = 1
    repeats: int = 1
    num_padding_rows: int = 0
    num_padding_columns: int = 0
    is_packed: bool = False

    @property
    def num_selected_rows(self) -> int:
        """Rows of the tensor that are taken."""
        group_size = self.shape[0] // self.num_groups
        return self.num_groups * ((group_size if self.end is None else self.end) - self.begin)

    @property
    def num_rows(self) -> int:
        """Rows that it contributes to the parameter."""
        return self.num_selected_rows * self.repeats + self.num_padding_rows

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row that it contributes."""
        if len(self.shape) == 1:
            return ()
        return (self.shape[1] + self.num_padding_columns, *self.shape[2:])

    def select(self, tensor: np.ndarray) -> np.ndarray:
        """Return the rows taken, without a copy where they lie together."""
        groups = tensor.reshape(self.num_groups, -1, *tensor.shape[1:])
        return groups[:, self.begin : self.end].reshape(-1, *tensor.shape[1:])

    def arrange(self, tensor: np.ndarray) -> np.ndarray:
        """Return the rows [num_rows, *row_shape] that it contributes."""
        rows = self.select(tensor)
        if self.repeats > 1:
            heads = rows.reshape(self.num_heads, -1, *rows.shape[1:])
            rows = heads.repeat(self.repeats, axis=0).reshape(-1, *rows.shape[1:])
        padding = [(0, self.num_padding_rows), (0, self.num_padding_columns)][: rows.ndim]
        padding += [(0, 0)] * (rows.ndim - len(padding))
        return np.pad(rows, padding) if any(after for _, after in padding) else rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """A parameter before it exists.

    Attributes:
        sources: tensors stacked along the rows, in this order within each shard.
        axes: logical axis name of each dimension (see sharding.py).
        num_shards: devices that a fused weight's rows are ordered for.
        is_float32: kept in f32 whatever the compute dtype (norm weights: small, and used in f32).
        offset: added to every element, after conversion: some norms store their weight minus 1.
    """

    sources: tuple[Source, ...]
    axes: tuple[str, ...]
    num_shards: int = 1
    is_float32: bool = False
    offset: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape over all shards."""
        return (sum(source.num_rows for source in self.sources), *self.sources[0].row_shape)

    def abstract(self, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        """Return shape and dtype for a model that computes in `dtype`."""
        return jax.ShapeDtypeStruct(self.shape, self._storage_dtype(dtype))

    def assemble(
        self,
        tensors: Sequence[np.ndarray],
        dtype: DTypeLike,
        *,
        release: Callable[[], None] | None = None,
    ) -> np.ndarray:
        """Fuse the source tensors into a fresh host array in storage dtype.

        Always a copy: the device array may alias its memory, and a memory-mapped file may change.

        Args:
            tensors: of `sources`, in their order.
            dtype: that the model computes in.
            release: called every few megabytes; what was read so far is not needed again.
        """
        parts = [
            source.arrange(tensor) for tensor, source in zip(tensors, self.sources, strict=True)
        ]
        out = host_memory.empty(self.shape, self._storage_dtype(dtype))
        row_bytes = max(1, out.nbytes // max(1, out.shape[0]))
        block = max(1, _BLOCK_BYTES // row_bytes)
        row = 0
        for shard in range(self.num_shards if len(parts) > 1 else 1):
            for part in parts:
                rows = part.shape[0] // (self.num_shards if len(parts) > 1 else 1)
                first = shard * rows
                for begin in range(0, rows, block):
                    end = min(begin + block, rows)
                    out[row + begin : row + end] = part[first + begin : first + end]
                    if release is not None:
                        release()
                row += rows
        if self.offset:
            out += out.dtype.type(self.offset)
        return out

    def _storage_dtype(self, dtype: DTypeLike) -> np.dtype:
        return np.dtype(jnp.float32) if self.is_float32 else np.dtype(dtype)
