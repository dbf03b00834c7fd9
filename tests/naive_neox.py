"""GPT-NeoX in numpy f64, from its paper's formulas; shares nothing with the product."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests.naive_rope import naive_rope

_erf = np.vectorize(math.erf)


def random_neox_tensors(raw: dict[str, Any], *, seed: int = 0) -> dict[str, np.ndarray]:
    """f32 tensors of the checkpoint that `raw` describes."""
    rng = np.random.default_rng(seed)
    hidden, ffn, vocab = raw["hidden_size"], raw["intermediate_size"], raw["vocab_size"]
    tensors = {"gpt_neox.embed_in.weight": rng.standard_normal((vocab, hidden))}
    if not raw["tie_word_embeddings"]:
        tensors["embed_out.weight"] = rng.standard_normal((vocab, hidden)) * hidden**-0.5
    for i in range(raw["num_hidden_layers"]):
        prefix = f"gpt_neox.layers.{i}"
        for name, rows, columns, has_bias in (
            ("attention.query_key_value", 3 * hidden, hidden, raw["attention_bias"]),
            ("attention.dense", hidden, hidden, raw["attention_bias"]),
            ("mlp.dense_h_to_4h", ffn, hidden, True),
            ("mlp.dense_4h_to_h", hidden, ffn, True),
        ):
            weight = rng.standard_normal((rows, columns)) * columns**-0.5
            tensors[f"{prefix}.{name}.weight"] = weight
            if has_bias:
                tensors[f"{prefix}.{name}.bias"] = rng.standard_normal(rows) * 0.5
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = 1 + 0.2 * rng.standard_normal(hidden)
            tensors[f"{prefix}.{name}.bias"] = 0.2 * rng.standard_normal(hidden)
    tensors["gpt_neox.final_layer_norm.weight"] = 1 + 0.2 * rng.standard_normal(hidden)
    tensors["gpt_neox.final_layer_norm.bias"] = 0.2 * rng.standard_normal(hidden)
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}


class NaiveNeoX:
    """The model of a checkpoint directory."""

    def __init__(self, path: Path) -> None:
        self._raw: dict[str, Any] = json.loads((path / "config.json").read_text())
        self._tensors = {
            name: tensor.astype(np.float64)
            for name, tensor in load_file(path / "model.safetensors").items()
        }

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logits [len(token_ids), V] that follow each token."""
        x = self._tensors["gpt_neox.embed_in.weight"][list(token_ids)]
        for i in range(self._raw["num_hidden_layers"]):
            prefix = f"gpt_neox.layers.{i}"
            attended = self._attend(self._norm(x, f"{prefix}.input_layernorm"), prefix)
            source = x if self._raw["use_parallel_residual"] else x + attended
            up = self._linear(
                self._norm(source, f"{prefix}.post_attention_layernorm"),
                f"{prefix}.mlp.dense_h_to_4h",
            )
            activated = up * 0.5 * (1 + _erf(up / math.sqrt(2)))
            x = x + attended + self._linear(activated, f"{prefix}.mlp.dense_4h_to_h")
        head = "gpt_neox.embed_in" if self._raw["tie_word_embeddings"] else "embed_out"
        return self._linear(self._norm(x, "gpt_neox.final_layer_norm"), head)

    def _attend(self, x: np.ndarray, prefix: str) -> np.ndarray:
        length, hidden = x.shape
        num_heads = self._raw["num_attention_heads"]
        head_dim = hidden // num_heads
        qkv = self._linear(x, f"{prefix}.attention.query_key_value")
        out = []
        for head in range(num_heads):
            begin = 3 * head * head_dim
            q, k, v = (qkv[:, begin + part * head_dim :][:, :head_dim] for part in range(3))
            scores = self._rotate(q) @ self._rotate(k).T / math.sqrt(head_dim)
            scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out.append(weights / weights.sum(axis=1, keepdims=True) @ v)
        return self._linear(np.concatenate(out, axis=1), f"{prefix}.attention.dense")

    def _rotate(self, x: np.ndarray) -> np.ndarray:
        length, head_dim = x.shape
        rotary_dim = int(head_dim * self._raw["rotary_pct"])
        raw = {**self._raw, "rope_theta": self._raw["rotary_emb_base"]}
        frequencies, _ = naive_rope(raw, rotary_dim=rotary_dim, length=length)
        turns = np.exp(1j * np.outer(np.arange(length), frequencies))
        half = rotary_dim // 2
        turned = (x[:, :half] + 1j * x[:, half:rotary_dim]) * turns
        return np.concatenate([turned.real, turned.imag, x[:, rotary_dim:]], axis=1)

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self._tensors[f"{name}.weight"].T + self._tensors.get(f"{name}.bias", 0.0)

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(axis=1, keepdims=True)
        deviation = np.sqrt((centred**2).mean(axis=1, keepdims=True) + self._raw["layer_norm_eps"])
        return centred / deviation * self._tensors[f"{name}.weight"] + self._tensors[f"{name}.bias"]
