"""Random checkpoints in Hugging Face's layout, small enough to run in a test."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

TINY_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def random_tensors(raw: Mapping[str, Any], *, seed: int = 0) -> dict[str, np.ndarray]:
    """f32 tensors of the checkpoint that `raw` describes."""
    rng = np.random.default_rng(seed)
    hidden, ffn = raw["hidden_size"], raw["intermediate_size"]
    head_dim = raw.get("head_dim") or hidden // raw["num_attention_heads"]
    q_size = raw["num_attention_heads"] * head_dim
    kv_size = raw["num_key_value_heads"] * head_dim
    tensors: dict[str, np.ndarray] = {}

    def add(name: str, *shape: int, scale: float = 1.0, mean: float = 0.0) -> None:
        tensors[name] = (mean + scale * rng.standard_normal(shape)).astype(np.float32)

    def add_linear(name: str, rows: int, columns: int, *, has_bias: bool) -> None:
        add(f"{name}.weight", rows, columns, scale=columns**-0.5)
        if has_bias:
            add(f"{name}.bias", rows, scale=0.5)

    add("model.embed_tokens.weight", raw["vocab_size"], hidden)
    for i in range(raw["num_hidden_layers"]):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        for name, rows in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
            has_bias = raw.get("attention_bias", False)
            add_linear(f"{attention}.{name}", rows, hidden, has_bias=has_bias)
        add_linear(f"{attention}.o_proj", hidden, q_size, has_bias=raw.get("attention_bias", False))
        for name in ("gate_proj", "up_proj"):
            add_linear(f"{mlp}.{name}", ffn, hidden, has_bias=raw.get("mlp_bias", False))
        add_linear(f"{mlp}.down_proj", hidden, ffn, has_bias=raw.get("mlp_bias", False))
        add(f"model.layers.{i}.input_layernorm.weight", hidden, scale=0.2, mean=1.0)
        add(f"model.layers.{i}.post_attention_layernorm.weight", hidden, scale=0.2, mean=1.0)
    add("model.norm.weight", hidden, scale=0.2, mean=1.0)
    if not raw.get("tie_word_embeddings", False):
        add("lm_head.weight", raw["vocab_size"], hidden, scale=hidden**-0.5)
    return tensors


def write_checkpoint(
    path: Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    tensors: Mapping[str, np.ndarray] | None = None,
    dtype: str = "float32",
    seed: int = 0,
) -> Path:
    """Write config.json and model.safetensors; `overrides` with value None remove the key."""
    raw = {**TINY_LLAMA, **(overrides or {})}
    raw = {key: value for key, value in raw.items() if value is not None}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw))
    storage = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    source = random_tensors(raw, seed=seed) if tensors is None else tensors
    save_file(
        {name: np.ascontiguousarray(tensor.astype(storage)) for name, tensor in source.items()},
        path / "model.safetensors",
    )
    return path
