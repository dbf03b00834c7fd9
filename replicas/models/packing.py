"""Brings a parameter tree into the layout of the native CPU matmul, once, at load."""

from __future__ import annotations

import functools
from typing import Any

import jax

from kernels.cpu.matmul import pack, pack_gate_up
from replicas.config import ModelConfig
from replicas.models.layer_stack import stack_layers
from replicas.models.registry import get_family


def pack_params(params: Any, config: ModelConfig) -> Any:
    """Return the tree with bf16 packed matmul weights, its layers as one `LayerStack`.

    Host memory holds both trees meanwhile.
    """
    stack = functools.partial(stack_layers, num_layers=config.num_layers)
    prepared = get_family(config).prepare_params(params, pack, pack_gate_up, stack)
    return jax.device_put(prepared)
