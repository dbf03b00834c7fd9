"""Turns the matmul weights of a parameter tree into 8-bit integers, once, at load.

From the weights alone: no calibration text, so any model will do. What makes that good enough is
the rotation (`kernels.int8_reference`); without it a few large inputs of each row would take the
resolution from all others. The first layer keeps its dtype: embeddings are small, so it writes
most of what the residual stream holds from there on, and its rounding with it. Embedding, norms,
biases, routers and what takes heads to a latent space and back (`mla`) stay as they are too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from kernels.cpu import int8_matmul, matmul
from kernels.int8_reference import Int8Matrix, largest_rotation, quantize_weight
from replicas.config import ModelConfig
from replicas.models.decoder_params import Pack, Packing
from replicas.models.layer_stack import abstract_stack, stack_layers
from replicas.models.packing import consuming, has_packable_sizes, on_shapes
from replicas.models.registry import get_family


def quantize_params(
    params: Any,
    config: ModelConfig,
    *,
    is_native: bool,
    rotates: bool = True,
    keeps_first: bool = True,
    consumes: bool = False,
) -> Any:
    """Return the tree with int8 matmul weights, the output head's included, the first layer's not.

    Args:
        params: as from `load_params`; sharded ones keep their sharding.
        config: the model's.
        is_native: in the layout of the native kernels, layers as one `LayerStack`; else each weight
            an `Int8Matrix`.
        rotates: False leaves the rotation out, to measure what it is worth.
        keeps_first: False quantises the first layer too, to measure what that costs.
        consumes: free each weight once it is quantised; else memory holds both trees.
    """
    packing = _packing(is_native=is_native, rotation=None if rotates else 1)
    first = _first_packing(params, config, is_native=is_native) if keeps_first else None
    if consumes:
        packing, first = consuming(packing, params), first and consuming(first, params)
    prepare = get_family(config).prepare_params
    if not is_native:
        return prepare(params, config, packing, first=first)
    stack = functools.partial(
        stack_layers, num_layers=config.num_layers, has_first=first is not None
    )
    return jax.device_put(prepare(params, config, packing, stack, first=first))


def abstract_quantized_params(params: Any, config: ModelConfig, *, is_native: bool) -> Any:
    """Return the shapes of what `quantize_params` would make of abstract weights."""
    prepare = get_family(config).prepare_params
    first = _first_packing(params, config, is_native=is_native)
    if not is_native:
        packing = Packing(linear=_quantized_shapes, experts=_quantized_shapes)
        return prepare(params, config, packing, first=first)
    stack = functools.partial(
        abstract_stack, num_layers=config.num_layers, has_first=first is not None
    )
    packing = on_shapes(_packing(is_native=True, rotation=None))
    return prepare(params, config, packing, stack, first=first and on_shapes(first))


def keeps_first_layer(config: ModelConfig) -> bool:
    """Whether the first layer is left as it is: an only layer is quantised."""
    return config.num_layers > 1


def _first_packing(params: Any, config: ModelConfig, *, is_native: bool) -> Packing | None:
    """Return the layout of a first layer that keeps its dtype; None where it is the only one."""
    if not keeps_first_layer(config):
        return None
    is_packed = is_native and params.embedding.dtype == jnp.bfloat16 and has_packable_sizes(config)
    if is_packed:
        return Packing(linear=matmul.pack, gate_up=matmul.pack_gate_up)
    return Packing(linear=lambda weight: weight)


def _packing(*, is_native: bool, rotation: int | None) -> Packing:
    def bind(pack: Callable[..., Any]) -> Pack:
        return functools.partial(pack, rotation=rotation)

    if not is_native:
        return Packing(linear=bind(_quantize_in_place), experts=bind(_quantize_in_place))
    return Packing(
        linear=bind(int8_matmul.pack),
        gate_up=bind(int8_matmul.pack_gate_up),
        experts=bind(int8_matmul.pack_experts),
    )


def _quantize_in_place(weight: jax.Array, *, rotation: int | None) -> Int8Matrix:
    """Quantise a weight, or those of experts, that stays where it lies.

    Where its inputs are sharded, each device rotates its own and has scales of its own, so that it
    can quantise its part of a row without the others.
    """
    shapes: Any = _quantized_shapes(weight)
    num_outputs, num_inputs = weight.shape[-2:]
    num_blocks = shapes.scales.shape[-1] // num_outputs
    blocks = np.asarray(weight).reshape(-1, num_inputs // num_blocks)
    matrix = quantize_weight(blocks, rotation=rotation)
    values = np.asarray(matrix.values).reshape(weight.shape)
    # Scales of a device's inputs lie together.
    scales = np.asarray(matrix.scales).reshape(-1, num_outputs, num_blocks).swapaxes(-1, -2)
    return Int8Matrix(
        values=jax.device_put(values, shapes.values.sharding),
        scales=jax.device_put(scales.reshape(shapes.scales.shape), shapes.scales.sharding),
        rotation=matrix.rotation,
    )


def _quantized_shapes(weight: Any) -> Int8Matrix:
    """Shapes of a quantised weight; without a sharding on a single device, where it has none."""
    *experts, num_outputs, num_inputs = weight.shape
    sharding, scale_sharding, num_blocks = None, None, 1
    if isinstance(weight.sharding, NamedSharding):
        sharding = weight.sharding
        *expert_axes, output_axis, input_axis = sharding.spec
        num_blocks = 1 if input_axis is None else sharding.mesh.shape[input_axis]
        scale_sharding = NamedSharding(
            sharding.mesh, PartitionSpec(*expert_axes, output_axis or input_axis)
        )
    struct: Any = jax.ShapeDtypeStruct  # stands for an array, which type checkers do not see
    return Int8Matrix(
        values=struct(weight.shape, jnp.int8, sharding=sharding),
        scales=struct((*experts, num_blocks * num_outputs), jnp.float32, sharding=scale_sharding),
        rotation=largest_rotation(num_inputs // num_blocks),
    )
