"""Loading a checkpoint: its speed against the disk's, and the memory that it takes.

    python -m bench.weights [--gigabytes 1] [--repeats 3]

Writes a synthetic checkpoint of a llama in bf16, in two shards, and loads it in fresh processes as
an engine does: to plain weights, to weights packed for the native kernels, and to int8. Each time
the file is read plainly first; neither finds it in the page cache. Peak memory is what the process
grew by at most; the bar is 1.15 times the size of plain weights.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench import report

MODES = ("plain", "packed", "int8")
RSS_BAR = 1.15
_HIDDEN, _FFN, _VOCAB, _HEADS, _KV_HEADS, _HEAD_DIM = 2048, 5632, 32_000, 32, 8, 64
_READ_BYTES = 8 << 20
_NUM_NUMBERS = 1 << 20


def layer_shapes(layer: str) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a layer."""
    q_size, kv_size = _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM
    return {
        f"{layer}.self_attn.q_proj.weight": (q_size, _HIDDEN),
        f"{layer}.self_attn.k_proj.weight": (kv_size, _HIDDEN),
        f"{layer}.self_attn.v_proj.weight": (kv_size, _HIDDEN),
        f"{layer}.self_attn.o_proj.weight": (_HIDDEN, q_size),
        f"{layer}.mlp.gate_proj.weight": (_FFN, _HIDDEN),
        f"{layer}.mlp.up_proj.weight": (_FFN, _HIDDEN),
        f"{layer}.mlp.down_proj.weight": (_HIDDEN, _FFN),
        f"{layer}.input_layernorm.weight": (_HIDDEN,),
        f"{layer}.post_attention_layernorm.weight": (_HIDDEN,),
    }


def write_checkpoint(directory: Path, *, num_bytes: int, num_shards: int = 2) -> None:
    """Write config.json, and random weights of about `num_bytes` in shards with an index."""
    outer: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (_VOCAB, _HIDDEN),
        "lm_head.weight": (_VOCAB, _HIDDEN),
        "model.norm.weight": (_HIDDEN,),
    }
    per_layer = _count(layer_shapes("")) * 2
    num_layers = max(1, round((num_bytes - 2 * _count(outer)) / per_layer))
    shapes = dict(outer)
    for index in range(num_layers):
        shapes |= layer_shapes(f"model.layers.{index}")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _VOCAB,
        "hidden_size": _HIDDEN,
        "intermediate_size": _FFN,
        "num_hidden_layers": num_layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "max_position_embeddings": 2048,
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config))
    names = list(shapes)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = directory / f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        chosen = names[shard * len(names) // num_shards : (shard + 1) * len(names) // num_shards]
        _write_shard(file, {name: shapes[name] for name in chosen}, seed=shard)
        weight_map |= dict.fromkeys(chosen, file.name)
    index = {"weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_shard(file: Path, shapes: dict[str, tuple[int, ...]], *, seed: int) -> None:
    """Write bf16 tensors one after the other, of the same random numbers."""
    header: dict[str, Any] = {}
    offset = 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    numbers = np.random.default_rng(seed).standard_normal(_NUM_NUMBERS, np.float32)
    # Upper halves of f32 numbers are bf16 ones.
    block = (numbers * np.float32(0.02)).view(np.uint16)[1::2].tobytes()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            size = 2 * int(np.prod(shape))
            for begin in range(0, size, len(block)):
                stream.write(block[: size - begin])


def _count(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(int(np.prod(shape)) for shape in shapes.values())


def read_plainly(directory: Path) -> float:
    """Read the weights from the disk and forget them; return bytes per second."""
    files = sorted(directory.glob("*.safetensors"))
    forget(files)
    buffer = bytearray(_READ_BYTES)
    begin_s = time.perf_counter()
    num_bytes = 0
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                num_bytes += count
    seconds = time.perf_counter() - begin_s
    forget(files)
    return num_bytes / seconds


def forget(files: list[Path]) -> None:
    """Drop files from the page cache."""
    for file in files:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load(directory: str, mode: str) -> dict[str, Any]:
    """Load the checkpoint in this process, which should be fresh; return what it took."""
    import jax
    import jax.numpy as jnp

    from replicas.models.packing import pack_params
    from replicas.models.quantize import quantize_params
    from replicas.models.registry import load_model_config
    from replicas.models.weights import load_params

    jax.config.update("jax_platforms", "cpu")
    path = Path(directory)
    jax.block_until_ready(jnp.zeros(8) + 1)
    config = load_model_config(path)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status_bytes("VmRSS")
    begin_s = time.perf_counter()
    params = load_params(path, config, dtype=jnp.bfloat16)
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    if mode == "packed":
        params = pack_params(params, config, consumes=True)
    elif mode == "int8":
        params = quantize_params(params, config, is_native=True, consumes=True)
    jax.block_until_ready(params)
    seconds = time.perf_counter() - begin_s
    return {
        "seconds": seconds,
        "weight_bytes": num_bytes,
        "peak_bytes": _status_bytes("VmHWM") - before,
        "left_bytes": _status_bytes("VmRSS") - before,
    }


def _status_bytes(key: str) -> int:
    """A figure of this process's memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {key}")


def measure(directory: Path, *, repeats: int) -> list[dict[str, Any]]:
    """Measure every mode in fresh processes, in turn with plain reads; medians over the repeats."""
    context = multiprocessing.get_context("spawn")
    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for _ in range(repeats):
        for mode in MODES:
            disk = read_plainly(directory)
            with context.Pool(1) as pool:
                runs[mode].append({"disk": disk, **pool.apply(load, (str(directory), mode))})
    return [_summarize(mode, runs[mode]) for mode in MODES]


def _summarize(mode: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    def median(values: list[float]) -> float:
        return statistics.median(values)

    speeds = [run["weight_bytes"] / run["seconds"] for run in runs]
    return {
        "weights": mode,
        "GB": round(runs[0]["weight_bytes"] / 1e9, 3),
        "disk GB/s": round(median([run["disk"] for run in runs]) / 1e9, 2),
        "load GB/s": round(median(speeds) / 1e9, 2),
        "of disk": round(
            median([speed / run["disk"] for speed, run in zip(speeds, runs, strict=True)]), 2
        ),
        "peak / weights": round(
            median([run["peak_bytes"] / run["weight_bytes"] for run in runs]), 3
        ),
        "left / weights": round(
            median([run["left_bytes"] / run["weight_bytes"] for run in runs]), 3
        ),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="where the checkpoint is written meanwhile")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        directory = Path(name)
        write_checkpoint(directory, num_bytes=round(options.gigabytes * 1e9))
        rows = measure(directory, repeats=options.repeats)
    print(report.format_table(rows))
    path = report.result_path("weights")
    report.write_json(path, {"stamp": report.stamp(), "rss_bar": RSS_BAR, "rows": rows})
    is_within = all(row["peak / weights"] <= RSS_BAR for row in rows)
    print(f"peak memory {'meets' if is_within else 'misses'} the bar of {RSS_BAR}")
    return 0 if is_within else 1


if __name__ == "__main__":
    raise SystemExit(main())
