"""The weights of all layers in one array of each kind, so that a program takes few arguments.

Every argument of a program costs host time at each launch. A forward pass iterates over a stack as
over a tuple of layers; knows no family. Invariant: no copy of a packed weight is made, since its
kernel reads it inside the stack (a plain leaf becomes a slice, which XLA may copy).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from kernels import host_memory
from kernels.cpu.int8_matmul import Int8GateUp, Int8Weight
from kernels.cpu.matmul import PackedGateUp, PackedWeight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class LayerStack:
    """Layers of equal structure; iterate inside a traced function.

    Attributes:
        stack: a layer's tree with leaves [L, ...].
        num_layers: L.
        first: a layer before these, in a layout of its own; None for none.
    """

    stack: Any
    num_layers: int = dataclasses.field(metadata={"static": True})
    first: Any = None

    def __iter__(self) -> Iterator[Any]:
        """Yield each layer, as a tree of views."""
        if self.first is not None:
            yield self.first
        yield from map(self._at, range(self.num_layers))

    def _at(self, index: int) -> Any:
        def view(leaf: Any) -> Any:
            if _is_packed(leaf):
                return dataclasses.replace(leaf, layer=index)
            return leaf[index]

        return jax.tree.map(view, self.stack, is_leaf=_is_packed)


def stack_layers(layers: Iterable[Any], *, num_layers: int, has_first: bool = False) -> LayerStack:
    """Stack layers on the host as they come: memory holds one of them beside the stack.

    Args:
        layers: all of them.
        num_layers: how many.
        has_first: the first has a layout of its own.

    Raises:
        ValueError: a layer differs from the first in structure, shapes or dtypes.
    """
    layers = iter(layers)
    first = next(layers) if has_first else None
    num_layers -= has_first
    tree, stacks = None, []
    for index, layer in enumerate(layers):
        leaves, structure = jax.tree.flatten(layer)
        if tree is None:
            tree = structure
            stacks = [host_memory.empty((num_layers, *leaf.shape), leaf.dtype) for leaf in leaves]
        kinds = [(leaf.shape, leaf.dtype) for leaf in leaves]
        if structure != tree or kinds != [(stack.shape[1:], stack.dtype) for stack in stacks]:
            raise ValueError(f"layer {index} does not stack onto the first: {structure}, {kinds}")
        for stack, leaf in zip(stacks, leaves, strict=True):
            stack[index] = leaf
    assert tree is not None
    return LayerStack(tree.unflatten(jax.device_put(stacks)), num_layers, first)


def abstract_stack(
    layers: Iterable[Any], *, num_layers: int, has_first: bool = False
) -> LayerStack:
    """Return the shapes of what `stack_layers` would make of layers that are shapes."""
    layers = iter(layers)
    first = next(layers) if has_first else None
    num_layers -= has_first
    return LayerStack(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct((num_layers, *x.shape), x.dtype), next(layers)),
        num_layers,
        first,
    )


def _is_packed(leaf: object) -> bool:
    return isinstance(leaf, PackedWeight | PackedGateUp | Int8Weight | Int8GateUp)
