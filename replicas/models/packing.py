"""Brings a parameter tree into the layout of the native CPU matmul, once, at load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kernels.cpu.matmul import pack, pack_gate_up
from replicas.config import ModelConfig
from replicas.models.registry import get_family


def pack_params(params: Any, config: ModelConfig) -> Any:
    """Return the tree with bf16 packed matmul weights; host memory holds both trees meanwhile."""
    prepare = get_family(config).prepare_params
    return prepare(params, _on_device(pack), _on_device(pack_gate_up))


def _on_device(pack_weight: Callable[[jax.Array], Any]) -> Callable[[jax.Array], Any]:
    return lambda weight: jax.tree.map(jnp.asarray, pack_weight(weight))
