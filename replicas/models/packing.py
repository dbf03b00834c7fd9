"""Brings a parameter tree into the layout of the native CPU matmul, once, at load."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.cpu.matmul import pack, pack_gate_up
from replicas.config import ModelConfig
from replicas.models.registry import get_family


def pack_params(params: Any, config: ModelConfig) -> Any:
    """Return the tree with bf16 packed matmul weights; host memory holds both trees meanwhile."""
    prepare = get_family(config).prepare_params
    return prepare(params, _on_device(pack), _on_device(pack_gate_up))


def abstract_packed_params(params: Any, config: ModelConfig) -> Any:
    """Return what `pack_params` would make of abstract weights; packs one of each shape."""
    prepare = get_family(config).prepare_params
    return prepare(params, _abstract(pack), _abstract(pack_gate_up))


def _abstract(pack_weight: Callable[[np.ndarray], Any]) -> Callable[[jax.ShapeDtypeStruct], Any]:
    """Return `pack_weight` from shapes to shapes."""

    @functools.cache
    def pack_zeros(shape: tuple[int, ...], dtype: np.dtype) -> Any:
        packed = pack_weight(np.zeros(shape, dtype))
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), packed)

    return lambda weight: pack_zeros(weight.shape, weight.dtype)


def _on_device(pack_weight: Callable[[jax.Array], Any]) -> Callable[[jax.Array], Any]:
    return lambda weight: jax.tree.map(jnp.asarray, pack_weight(weight))
