"""What can be known to fail before a replica is started: weights, memory, TPU chips.

Serve builds an application before it touches the one that runs, so what is refused here costs
nobody anything. Pure but for the headers of the weights' files: the cluster's nodes are arguments.
Invariant: only what cannot work anywhere is refused; a doubt is no refusal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from app.errors import ConfigError
from app.settings import ReplicaOptions
from replicas.config import EngineConfig
from replicas.model_files.safetensors_header import read_header
from replicas.model_files.source import LocalSource, parse_source

TPU = "TPU"
TPU_CHIP_COUNTS = (1, 2, 4, 8)
"""What Ray assigns to one actor of a host."""
DEVICES_PER_CHIP = 2
"""At most: a TPU7x chip shows as two."""
_BYTES_PER_VALUE = {"bfloat16": 2, "float32": 4}
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def check_deployable(
    engine: EngineConfig,
    replicas: ReplicaOptions,
    *,
    nodes: Sequence[Mapping[str, float]],
    can_grow: bool,
) -> None:
    """Refuse what could never start.

    Args:
        engine: of each replica.
        replicas: what each reserves.
        nodes: resources of each living node; empty where there is no cluster.
        can_grow: an autoscaler may add nodes, of which nothing is known.

    Raises:
        ConfigError: names the setting, its value and what to do.
    """
    check_chips(engine, replicas.resources)
    if nodes and not can_grow:
        check_placement(replicas, nodes)
    source = parse_source(engine.model)
    # What is still to be downloaded is measured by nobody yet.
    num_values = count_weights(source.directory) if isinstance(source, LocalSource) else 0
    check_memory(engine, num_values, nodes=() if can_grow else nodes)


def check_chips(engine: EngineConfig, resources: Mapping[str, float]) -> None:
    """Refuse a number of TPU chips that no host gives, or too few for the mesh.

    Raises:
        ConfigError: it is so.
    """
    chips = resources.get(TPU)
    if chips is None:
        return
    if chips not in TPU_CHIP_COUNTS:
        raise ConfigError(
            f"replicas.resources.TPU: a replica takes 1, 2, 4 or 8 chips of one host, got {chips:g}"
        )
    if engine.tensor_parallel > chips * DEVICES_PER_CHIP:
        raise ConfigError(
            f"engine.tensor_parallel: {engine.tensor_parallel} devices are more than the {chips:g} "
            "chips of replicas.resources.TPU have; raise the one or lower the other"
        )


def check_placement(replicas: ReplicaOptions, nodes: Sequence[Mapping[str, float]]) -> None:
    """Refuse what one replica reserves when no node has that much, whatever else runs there.

    Raises:
        ConfigError: it is so.
    """
    wanted = {name: amount for name, amount in replicas.resources.items() if amount > 0}
    if replicas.num_cpus:
        wanted["CPU"] = replicas.num_cpus
    for name, amount in wanted.items():
        most = max(node.get(name, 0.0) for node in nodes)
        if amount > most:
            key = "replicas.num_cpus" if name == "CPU" else f"replicas.resources.{name}"
            raise ConfigError(
                f"{key}: a replica wants {amount:g}, and the largest node of the cluster has "
                f"{most:g}; lower it, or add such a node first"
            )


def check_memory(
    engine: EngineConfig, num_values: int, *, nodes: Sequence[Mapping[str, float]]
) -> None:
    """Refuse a model whose weights exceed the memory that is given for them.

    On CPU without `memory_bytes`, that is the memory of the largest node.

    Args:
        engine: of each replica.
        num_values: of the weights.
        nodes: resources of each node of a cluster that does not grow.

    Raises:
        ConfigError: it is so.
    """
    bytes_per_value = 1 if engine.quantization == "int8" else _BYTES_PER_VALUE[engine.dtype]
    num_bytes = num_values * bytes_per_value
    remedy = "set engine.quantization to int8, shard over more devices with engine.tensor_parallel"
    if engine.memory_bytes is not None:
        limit = engine.memory_bytes * engine.tensor_parallel
        if num_bytes > limit:
            raise ConfigError(
                f"engine.memory_bytes: the weights of {engine.model} take at least "
                f"{num_bytes / 1e9:.2f} GB, and {engine.tensor_parallel} device(s) of "
                f"{engine.memory_bytes / 1e9:.2f} GB are given; raise it, {remedy}"
            )
    elif engine.platform == "cpu" and nodes:
        # Ray counts what it found at its start less its object store.
        limit = max(
            node.get("memory", 0.0) + node.get("object_store_memory", 0.0) for node in nodes
        )
        total = num_bytes + (engine.kv_cache_bytes or 0)
        if 0 < limit < total:
            raise ConfigError(
                f"engine: the weights of {engine.model} and engine.kv_cache_bytes take "
                f"{total / 1e9:.2f} GB, and the largest node has {limit / 1e9:.2f} GB; lower "
                f"kv_cache_bytes or {remedy}"
            )


def count_weights(model: Path) -> int:
    """Return the number of values in a checkpoint, from the headers of its files.

    Raises:
        ConfigError: a file is missing, cut off or no safetensors file.
    """
    files = {path.name for path in model.glob("*.safetensors")}
    index = model / _INDEX
    if index.is_file():
        try:
            named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"model: {index} is damaged: {error!r}") from None
        if missing := sorted(named - files):
            raise ConfigError(
                f"model: {len(missing)} of {len(named)} weight files are missing, the first is "
                f"{model / missing[0]}; download the model again"
            )
        files = named
    elif _SINGLE in files:  # what else lies there is not loaded
        files = {_SINGLE}
    return sum(_count_values(model / name) for name in sorted(files))


def _count_values(path: Path) -> int:
    try:
        size = path.stat().st_size
        header, data_start = read_header(path)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        num_values = sum(math.prod(entry["shape"]) for entry in header.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"model: {path} is no readable safetensors file: {error}") from None
    if data_start + end > size:
        raise ConfigError(
            f"model: {path} is cut off: {size} of {data_start + end} bytes; download it again"
        )
    return num_values
