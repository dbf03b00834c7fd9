"""How many KV pages a device has room for, decided before anything is allocated.

From shapes and the configuration alone, never from what a device reports: the number of pages is
part of every program, so the machine that compiles ahead must arrive at the number of the machine
that serves. Invariant: what is planned is what is allocated, byte for byte.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from replicas.config import EngineConfig, ModelConfig
from replicas.engine.tpu_chips import find_chip
from replicas.models.kv_cache import bytes_per_page
from replicas.models.packing import abstract_packed_params
from replicas.models.quantize import abstract_quantized_params
from replicas.models.registry import get_family
from replicas.models.sharding import num_page_groups, param_shardings
from replicas.models.weights import abstract_params

HBM_SHARE = 0.92
"""Of a TPU's memory, for weights and pages; the rest is for a step's temporaries and programs."""
CPU_KV_CACHE_BYTES = 1 << 29
"""Of all pages on CPU, where neither they nor all memory are given a size."""


class NoRoom(ValueError):
    """The weights leave no room for pages.

    Attributes:
        config: resolved, but for its pages.
        model_config: of the checkpoint.
    """

    def __init__(self, message: str, config: EngineConfig, model_config: ModelConfig) -> None:
        super().__init__(message)
        self.config = config
        self.model_config = model_config


def abstract_weights(
    config: EngineConfig, model_config: ModelConfig, mesh: Mesh | AbstractMesh
) -> Any:
    """Return the shapes of the weights as they will lie on the mesh, packed or quantised.

    On a mesh of one device they have no sharding.

    Args:
        config: resolved, but for its pages.
        model_config: of the checkpoint.
        mesh: devices of the replica; abstract ones will do.
    """
    num_shards = config.tensor_parallel
    specs = get_family(model_config).param_specs(model_config, num_shards=num_shards)
    params = abstract_params(
        model_config,
        dtype=jnp.dtype(config.dtype),
        shardings=param_shardings(specs, mesh) if mesh.size > 1 else None,
        num_shards=num_shards,
    )
    if config.quantization == "int8":
        is_native = config.matmul == "native"
        return abstract_quantized_params(params, model_config, is_native=is_native)
    if config.matmul == "native":
        return abstract_packed_params(params, model_config)
    return params


def device_bytes(shapes: Any) -> int:
    """Return the bytes that a tree of arrays, or of their shapes, takes on one device."""
    total = 0
    for leaf in jax.tree.leaves(shapes):
        sharding, shape = leaf.sharding, leaf.shape
        if isinstance(sharding, NamedSharding):
            shape = sharding.shard_shape(shape)
        total += math.prod(shape) * jnp.dtype(leaf.dtype).itemsize
    return total


def page_bytes(config: EngineConfig, model_config: ModelConfig) -> int:
    """Return the bytes of one page over all layers and all devices of the replica."""
    assert config.page_size is not None
    return bytes_per_page(
        model_config,
        page_size=config.page_size,
        dtype=jnp.dtype(config.kv_dtype),
        num_shards=config.tensor_parallel,
        fills_lanes=config.attention == "pallas",
    )


def choose_num_pages(
    config: EngineConfig, model_config: ModelConfig, *, weight_bytes: int, device_kind: str
) -> int:
    """Return the number of pages, null pages included.

    `num_pages` counts them; else `kv_cache_bytes` holds them; else they take what the weights leave
    of `memory_bytes`; else, on a TPU, what they leave of 92% of its memory. Where each device holds
    pages of its own, all have as many, at least `num_pages` in all.

    Args:
        config: resolved, but for its pages.
        model_config: of the checkpoint.
        weight_bytes: on one device.
        device_kind: of the devices.

    Raises:
        ValueError: there is no room for a page; names the setting to change.
    """
    num_groups = num_page_groups(model_config, config.tensor_parallel)
    if config.num_pages is not None:
        return max(2, -(-config.num_pages // num_groups)) * num_groups
    size = page_bytes(config, model_config)
    if config.kv_cache_bytes is not None or (
        config.memory_bytes is None and config.platform != "tpu"
    ):
        kv_bytes = config.kv_cache_bytes or CPU_KV_CACHE_BYTES
        num_pages = num_groups * (1 + kv_bytes // size // num_groups)
        if num_pages < 2 * num_groups:
            raise ValueError(
                f"kv_cache_bytes {kv_bytes} holds no page of {size} bytes"
                f"{' on each device' if num_groups > 1 else ''}: raise it, or lower page_size "
                f"({config.page_size})"
            )
        return num_pages
    budget = memory_budget(config, device_kind)
    num_pages = (budget - weight_bytes) // (size // config.tensor_parallel)
    num_pages -= num_pages % num_groups
    if num_pages < 2 * num_groups:
        raise NoRoom(
            f"the weights take {weight_bytes / 1e9:.2f} of the {budget / 1e9:.2f} GB that a device "
            f"has for weights and KV pages, and a page {size / config.tensor_parallel / 1e9:.3f}: "
            "set quantization to int8, tensor_parallel to more devices, or memory_bytes higher",
            config,
            model_config,
        )
    return num_pages


def memory_budget(config: EngineConfig, device_kind: str) -> int:
    """Return the bytes that weights and pages may take together on one device.

    Raises:
        ValueError: neither the configuration nor the table of chips says it.
    """
    if config.memory_bytes is not None:
        return config.memory_bytes
    return int(HBM_SHARE * find_chip(device_kind).hbm_bytes)
