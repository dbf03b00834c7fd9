"""Brings a parameter tree into the layout of the native CPU matmul, once, at load."""

from __future__ import annotations

import functools
import gc
from typing import Any

import jax
import numpy as np

from kernels.cpu.matmul import pack, pack_gate_up
from replicas.config import ModelConfig
from replicas.models.decoder_params import Pack, Packing
from replicas.models.layer_stack import abstract_stack, stack_layers
from replicas.models.registry import get_family


def has_packable_sizes(config: ModelConfig) -> bool:
    """Whether bf16 weights can be packed, which pairs the inputs of each output."""
    sizes = [config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim]
    if config.moe is not None:
        sizes.append(config.moe.shared_intermediate_size)
    if config.mla is not None:
        sizes += [config.mla.q_lora_rank or 0, config.num_heads * config.mla.v_head_dim]
    return all(size % 2 == 0 for size in sizes)


def pack_params(params: Any, config: ModelConfig, *, consumes: bool = False) -> Any:
    """Return the tree with bf16 packed matmul weights, its layers as one `LayerStack`.

    Args:
        params: as from `load_params`.
        config: the model's.
        consumes: free each weight once it is packed; else host memory holds both trees.
    """
    stack = functools.partial(stack_layers, num_layers=config.num_layers)
    packing = Packing(linear=pack, gate_up=pack_gate_up)
    if consumes:
        packing = consuming(packing, params)
    return jax.device_put(get_family(config).prepare_params(params, config, packing, stack))


def consuming(packing: Packing, params: Any) -> Packing:
    """Return `packing` that frees what it has packed, but an embedding that is looked up."""

    def bind(pack_weight: Pack) -> Pack:
        def pack_and_free(weight: jax.Array) -> Any:
            packed = pack_weight(weight)
            if packed is not weight and weight is not params.embedding:
                weight.delete()
                # jax lets go of host memory that it was lent when Python next collects garbage.
                gc.collect(0)
            return packed

        return pack_and_free

    return packing.wrapped(bind)


def abstract_packed_params(params: Any, config: ModelConfig) -> Any:
    """Return what `pack_params` would make of abstract weights; packs one of each shape."""
    stack = functools.partial(abstract_stack, num_layers=config.num_layers)
    packing = on_shapes(Packing(linear=pack, gate_up=pack_gate_up))
    return get_family(config).prepare_params(params, config, packing, stack)


def on_shapes(packing: Packing) -> Packing:
    """Return `packing` from shapes to shapes; it packs zeros, once for each shape."""

    def bind(pack_weight: Pack) -> Pack:
        @functools.cache
        def pack_zeros(shape: tuple[int, ...], dtype: np.dtype) -> Any:
            experts = shape[:-2]  # of which one is packed: they may be many
            packed = pack_weight(np.zeros((*(1 for _ in experts), *shape[-2:]), dtype))
            return jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(
                    (*experts, *leaf.shape[len(experts) :]), leaf.dtype
                ),
                packed,
            )

        return lambda weight: pack_zeros(weight.shape, weight.dtype)

    return packing.wrapped(bind)
