"""Turns the matmul weights of a parameter tree into 8-bit integers, once, at load.

From the weights alone: no calibration text, so any model will do. What makes that good enough is
the rotation (`kernels.int8_reference`); without it a few large inputs of each row would take the
resolution from all others. Embedding, norms and biases stay as they are.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from kernels.cpu import int8_matmul
from kernels.int8_reference import quantize_weight
from replicas.config import ModelConfig
from replicas.models.layer_stack import abstract_stack, stack_layers
from replicas.models.packing import on_shapes
from replicas.models.registry import UnsupportedModelError, get_family


def require_quantizable(config: ModelConfig) -> None:
    """Refuse a model that loses too much, or gains too little.

    Raises:
        UnsupportedModelError: it has experts, whose routers choose others for rounded inputs.
    """
    if config.moe is not None:
        raise UnsupportedModelError(
            f"quantization = 'int8' is not supported for model_type {config.family!r}, which has "
            "experts: set it to 'none'"
        )


def quantize_params(
    params: Any, config: ModelConfig, *, is_native: bool, rotates: bool = True
) -> Any:
    """Return the tree with int8 matmul weights, the output head's included.

    Args:
        params: as from `load_params`, on one device.
        config: the model's.
        is_native: in the layout of the native kernel, layers as one `LayerStack`; else each weight
            an `Int8Matrix`.
        rotates: False leaves the rotation out, to measure what it is worth.

    Raises:
        UnsupportedModelError: see `require_quantizable`.
    """
    require_quantizable(config)
    rotation = None if rotates else 1
    prepare = get_family(config).prepare_params
    if not is_native:
        return jax.device_put(
            prepare(params, config, functools.partial(quantize_weight, rotation=rotation))
        )
    prepared = prepare(
        params,
        config,
        functools.partial(int8_matmul.pack, rotation=rotation),
        functools.partial(int8_matmul.pack_gate_up, rotation=rotation),
        functools.partial(stack_layers, num_layers=config.num_layers),
    )
    return jax.device_put(prepared)


def abstract_quantized_params(params: Any, config: ModelConfig, *, is_native: bool) -> Any:
    """Return the shapes of what `quantize_params` would make of abstract weights."""
    prepare = get_family(config).prepare_params
    if not is_native:
        return prepare(params, config, on_shapes(quantize_weight))
    return prepare(
        params,
        config,
        on_shapes(int8_matmul.pack),
        on_shapes(int8_matmul.pack_gate_up),
        functools.partial(abstract_stack, num_layers=config.num_layers),
    )
