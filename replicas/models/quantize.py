"""Turns the matmul weights of a parameter tree into 8-bit integers, once, at load.

From the weights alone: no calibration text, so any model will do. What makes that good enough is
the rotation (`kernels.int8_reference`); without it a few large inputs of each row would take the
resolution from all others. Embedding, norms and biases stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from kernels.cpu import int8_matmul
from kernels.int8_reference import Int8Matrix, largest_rotation, quantize_weight
from replicas.config import ModelConfig
from replicas.models.layer_stack import abstract_stack, stack_layers
from replicas.models.packing import consuming, on_shapes
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
    params: Any,
    config: ModelConfig,
    *,
    is_native: bool,
    rotates: bool = True,
    consumes: bool = False,
) -> Any:
    """Return the tree with int8 matmul weights, the output head's included.

    Args:
        params: as from `load_params`; sharded ones keep their sharding.
        config: the model's.
        is_native: in the layout of the native kernel, layers as one `LayerStack`; else each weight
            an `Int8Matrix`.
        rotates: False leaves the rotation out, to measure what it is worth.
        consumes: free each weight once it is quantised; else memory holds both trees.

    Raises:
        UnsupportedModelError: see `require_quantizable`.
    """
    require_quantizable(config)
    rotation = None if rotates else 1
    prepare = get_family(config).prepare_params

    def bound(pack: Callable[..., Any]) -> Callable[..., Any]:
        rotating = functools.partial(pack, rotation=rotation)
        return consuming(rotating, params) if consumes else rotating

    if not is_native:
        return prepare(params, config, bound(_quantize_in_place))
    prepared = prepare(
        params,
        config,
        bound(int8_matmul.pack),
        bound(int8_matmul.pack_gate_up),
        functools.partial(stack_layers, num_layers=config.num_layers),
    )
    return jax.device_put(prepared)


def abstract_quantized_params(params: Any, config: ModelConfig, *, is_native: bool) -> Any:
    """Return the shapes of what `quantize_params` would make of abstract weights."""
    prepare = get_family(config).prepare_params
    if not is_native:
        return prepare(params, config, _quantized_shapes)
    return prepare(
        params,
        config,
        on_shapes(int8_matmul.pack),
        on_shapes(int8_matmul.pack_gate_up),
        functools.partial(abstract_stack, num_layers=config.num_layers),
    )


def _quantize_in_place(weight: jax.Array, *, rotation: int | None) -> Int8Matrix:
    """Quantise a weight that stays where it lies.

    Where its inputs are sharded, each device rotates its own and has scales of its own, so that it
    can quantise its part of a row without the others.
    """
    shapes: Any = _quantized_shapes(weight)
    num_outputs, num_inputs = weight.shape
    num_blocks = shapes.scales.shape[0] // num_outputs
    blocks = np.asarray(weight).reshape(num_outputs * num_blocks, num_inputs // num_blocks)
    matrix = quantize_weight(blocks, rotation=rotation)
    values = np.asarray(matrix.values).reshape(num_outputs, num_inputs)
    scales = np.asarray(matrix.scales).reshape(num_outputs, num_blocks).T.reshape(-1)
    return Int8Matrix(
        values=jax.device_put(values, shapes.values.sharding),
        scales=jax.device_put(scales, shapes.scales.sharding),
        rotation=matrix.rotation,
    )


def _quantized_shapes(weight: Any) -> Int8Matrix:
    """Shapes of a quantised weight; without a sharding on a single device, where it has none."""
    num_outputs, num_inputs = weight.shape
    sharding, scale_sharding, num_blocks = None, None, 1
    if isinstance(weight.sharding, NamedSharding):
        sharding = weight.sharding
        output_axis, input_axis = sharding.spec
        num_blocks = 1 if input_axis is None else sharding.mesh.shape[input_axis]
        scale_sharding = NamedSharding(sharding.mesh, PartitionSpec(output_axis or input_axis))
    struct: Any = jax.ShapeDtypeStruct  # stands for an array, which type checkers do not see
    return Int8Matrix(
        values=struct(weight.shape, jnp.int8, sharding=sharding),
        scales=struct((num_blocks * num_outputs,), jnp.float32, sharding=scale_sharding),
        rotation=largest_rotation(num_inputs // num_blocks),
    )
