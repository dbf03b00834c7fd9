"""Loads a checkpoint into a parameter tree: audited first, then streamed tensor by tensor.

Each parameter is fused on the host and goes straight to its sharding, so host memory holds one
parameter at a time. Invariant: nothing is loaded from a checkpoint that does not match its config
exactly.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from replicas.config import ModelConfig
from replicas.models.checkpoint import Checkpoint, CheckpointError
from replicas.models.param_spec import ParamSpec
from replicas.models.registry import get_family

if TYPE_CHECKING:
    from jax.typing import DTypeLike

__all__ = ["CheckpointError", "abstract_params", "load_params"]

# Constants that old exporters stored beside the weights; the config says the same.
_IGNORED_NAMES = re.compile(r"\.rotary_emb\.inv_freq$|\.attention\.(masked_)?bias$")
_EMBEDDING_OF_HEAD = {
    "lm_head.weight": "model.embed_tokens.weight",
    "embed_out.weight": "gpt_neox.embed_in.weight",
}


def load_params(
    path: Path,
    config: ModelConfig,
    *,
    dtype: DTypeLike,
    shardings: Any = None,
    num_shards: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Any:
    """Load the parameter tree of a checkpoint directory.

    Args:
        path: directory with model.safetensors, or its index and shards.
        config: what the checkpoint should hold.
        dtype: storage dtype of matmul weights and embedding.
        shardings: tree of shardings as from `sharding.param_shardings`, or None: default device.
        num_shards: devices that fused weights are ordered for; the size of the tensor axis.
        progress: called with (bytes done, bytes in all) after each parameter.

    Raises:
        CheckpointError: lists every missing, extra, misshapen, malformed or truncated tensor.
    """
    specs, tree = jax.tree.flatten(
        get_family(config).param_specs(config, num_shards=num_shards),
        is_leaf=lambda node: isinstance(node, ParamSpec),
    )
    checkpoint = Checkpoint(path)
    problems = [*checkpoint.problems, *_audit(checkpoint, specs, config)]
    if problems:
        raise CheckpointError(path, problems)

    leaf_shardings = [None] * len(specs) if shardings is None else tree.flatten_up_to(shardings)
    names = {source.name for spec in specs for source in spec.sources}
    total_bytes = sum(checkpoint.tensors[name].num_bytes for name in names)
    done_bytes = 0
    params: list[jax.Array] = []
    for spec, sharding in zip(specs, leaf_shardings, strict=True):
        tensors = [checkpoint.read(source.name) for source in spec.sources]
        array = jax.device_put(spec.assemble(tensors, dtype, release=checkpoint.release), sharding)
        # Waiting bounds host memory to one parameter in flight.
        params.append(array.block_until_ready())
        checkpoint.release()
        done_bytes += sum(
            source.select(tensor).nbytes
            for source, tensor in zip(spec.sources, tensors, strict=True)
        )
        if progress is not None:
            progress(done_bytes, total_bytes)
    return tree.unflatten(params)


def abstract_params(
    config: ModelConfig,
    *,
    dtype: DTypeLike,
    shardings: Any = None,
    num_shards: int = 1,
) -> Any:
    """Return shape, dtype and sharding of what `load_params` would load; reads no checkpoint."""
    specs, tree = jax.tree.flatten(
        get_family(config).param_specs(config, num_shards=num_shards),
        is_leaf=lambda node: isinstance(node, ParamSpec),
    )
    leaf_shardings = [None] * len(specs) if shardings is None else tree.flatten_up_to(shardings)
    return tree.unflatten(
        spec.abstract(dtype).update(sharding=sharding)
        for spec, sharding in zip(specs, leaf_shardings, strict=True)
    )


def _audit(checkpoint: Checkpoint, specs: list[ParamSpec], config: ModelConfig) -> list[str]:
    """Compare names and shapes with what the config asks for; return every difference."""
    expected = {source.name: source.shape for spec in specs for source in spec.sources}
    # Tensors whose bytes are at fault are reported once, not again as missing.
    reported = " ".join(checkpoint.problems)
    missing = [
        f"missing: {name} {list(shape)}"
        for name, shape in expected.items()
        if name not in checkpoint.tensors and f": {name} " not in reported
    ]
    misshapen = [
        f"misshapen: {name} is {list(checkpoint.tensors[name].shape)}, config.json asks for "
        f"{list(shape)}"
        for name, shape in expected.items()
        if name in checkpoint.tensors and checkpoint.tensors[name].shape != shape
    ]
    packed = {source.name for spec in specs for source in spec.sources if source.is_packed}
    mistyped = [
        f"mistyped: {name} is {entry.dtype}, not {'bytes' if name in packed else 'a float'}"
        for name, entry in checkpoint.tensors.items()
        if name in expected and (entry.dtype == np.uint8) != (name in packed)
    ]
    first = config.num_layers
    skipped = tuple(
        f"model.layers.{index}." for index in range(first, first + config.num_skipped_layers)
    )
    extra = [
        f"extra: {name} {list(entry.shape)} is not part of the model that config.json describes"
        for name, entry in checkpoint.tensors.items()
        if name not in expected
        and not _IGNORED_NAMES.search(name)
        and not name.startswith(skipped)
        and not _is_tied_copy(checkpoint, name)
    ]
    return [*missing, *misshapen, *mistyped, *extra]


def _is_tied_copy(checkpoint: Checkpoint, name: str) -> bool:
    """Whether `name` is an output head stored although it equals the tied embedding."""
    embedding_name = _EMBEDDING_OF_HEAD.get(name)
    if embedding_name not in checkpoint.tensors:
        return False
    head, embedding = checkpoint.tensors[name], checkpoint.tensors[embedding_name]
    return (head.shape, head.dtype) == (embedding.shape, embedding.dtype) and np.array_equal(
        checkpoint.read(name), checkpoint.read(embedding_name)
    )
