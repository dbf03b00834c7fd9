"""Parameters that are more than rows of tensors: stacks of parameters, and converted layouts.

Same interface as `ParamSpec`, whose subclasses they are. Knows no family.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kernels import host_memory
from replicas.models.param_spec import ParamSpec

if TYPE_CHECKING:
    import jax
    from jax.typing import DTypeLike


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSpec(ParamSpec):
    """Parameters of one shape along a new first axis, and zeros after the last.

    Attributes:
        members: the parameters; `sources` are all of theirs, in order.
        num_padding: entries of zeros.
    """

    members: tuple[ParamSpec, ...]
    num_padding: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape over all shards."""
        return (len(self.members) + self.num_padding, *self.members[0].shape)

    def assemble(
        self,
        tensors: Sequence[np.ndarray],
        dtype: DTypeLike,
        *,
        release: Callable[[], None] | None = None,
    ) -> np.ndarray:
        """See `ParamSpec`."""
        out = _empty(self.abstract(dtype), self.num_padding)
        start = 0
        for index, member in enumerate(self.members):
            end = start + len(member.sources)
            out[index] = member.assemble(tensors[start:end], dtype, release=release)
            start = end
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedSpec(ParamSpec):
    """Heads or experts along the first axis, from tensors in a layout of their own; then zeros.

    Attributes:
        num_entries: of the first axis, and of each source's, whose rows they share evenly.
        entry_shape: shape of one.
        convert: from an entry's rows of every source to the entry, of any dtype. One at a time:
            what it allocates stays small.
        num_padding: entries of zeros after the last.
    """

    num_entries: int
    entry_shape: tuple[int, ...]
    convert: Callable[[Sequence[np.ndarray]], np.ndarray]
    num_padding: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape over all shards."""
        return (self.num_entries + self.num_padding, *self.entry_shape)

    def assemble(
        self,
        tensors: Sequence[np.ndarray],
        dtype: DTypeLike,
        *,
        release: Callable[[], None] | None = None,
    ) -> np.ndarray:
        """See `ParamSpec`."""
        out = _empty(self.abstract(dtype), self.num_padding)
        entries = [tensor.reshape(self.num_entries, -1, *tensor.shape[1:]) for tensor in tensors]
        for index in range(self.num_entries):
            out[index] = self.convert([rows[index] for rows in entries]).reshape(self.entry_shape)
            if release is not None:
                release()
        return out


def _empty(shape: jax.ShapeDtypeStruct, num_padding: int) -> np.ndarray:
    """Return an array of arbitrary content, but for the zeros at the end of its first axis."""
    out = host_memory.empty(shape.shape, shape.dtype)
    out[shape.shape[0] - num_padding :] = 0
    return out
