"""A dense llama and a greedy loop in numpy f64: no cache, no pages, no batch, nothing shared.

The independent reference for models and engine. It reads config.json and the tensors by itself and
recomputes the whole text for every token, so it is for tiny checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests.naive_rope import naive_rope


class NaiveLlama:
    """The model of a checkpoint directory (llama or mistral)."""

    def __init__(self, path: Path) -> None:
        self._raw: dict[str, Any] = json.loads((path / "config.json").read_text())
        self._tensors = {
            name: tensor.astype(np.float64)
            for name, tensor in load_file(path / "model.safetensors").items()
        }

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logits [len(token_ids), V] that follow each token."""
        raw = self._raw
        hidden = self._tensors["model.embed_tokens.weight"][list(token_ids)]
        for i in range(raw["num_hidden_layers"]):
            prefix = f"model.layers.{i}"
            normed = self._norm(hidden, f"{prefix}.input_layernorm")
            hidden = hidden + self._attend(normed, f"{prefix}.self_attn")
            normed = self._norm(hidden, f"{prefix}.post_attention_layernorm")
            gate = self._linear(normed, f"{prefix}.mlp.gate_proj")
            up = self._linear(normed, f"{prefix}.mlp.up_proj")
            hidden = hidden + self._linear(
                gate / (1 + np.exp(-gate)) * up, f"{prefix}.mlp.down_proj"
            )
        normed = self._norm(hidden, "model.norm")
        is_tied = raw.get("tie_word_embeddings", False)
        return self._linear(normed, "model.embed_tokens" if is_tied else "lm_head")

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The next `num_tokens` greedy tokens; ignores EOS."""
        token_ids = list(prompt)
        for _ in range(num_tokens):
            token_ids.append(int(self.logits(token_ids)[-1].argmax()))
        return token_ids[len(prompt) :]

    def _attend(self, x: np.ndarray, prefix: str) -> np.ndarray:
        num_heads = self._raw["num_attention_heads"]
        num_kv_heads = self._raw["num_key_value_heads"]
        length = len(x)
        q = self._linear(x, f"{prefix}.q_proj").reshape(length, num_heads, -1)
        k = self._linear(x, f"{prefix}.k_proj").reshape(length, num_kv_heads, -1)
        v = self._linear(x, f"{prefix}.v_proj").reshape(length, num_kv_heads, -1)
        q, k = self._rotate(q), self._rotate(k)
        positions = np.arange(length)
        distance = positions[:, None] - positions[None, :]
        is_visible = distance >= 0
        window = self._raw.get("sliding_window")
        if window is not None:
            is_visible &= distance < window
        out = np.empty_like(q)
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            scores = q[:, head] @ k[:, kv_head].T / np.sqrt(q.shape[2])
            scores = np.where(is_visible, scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v[:, kv_head]
        return self._linear(out.reshape(length, -1), f"{prefix}.o_proj")

    def _rotate(self, x: np.ndarray) -> np.ndarray:
        length, _, head_dim = x.shape
        half = head_dim // 2
        frequencies, factor = naive_rope(self._raw, rotary_dim=head_dim, length=length)
        angles = np.outer(np.arange(length), frequencies)[:, None, :]
        cos, sin = np.cos(angles) * factor, np.sin(angles) * factor
        return np.concatenate(
            [
                x[..., :half] * cos - x[..., half:] * sin,
                x[..., half:] * cos + x[..., :half] * sin,
            ],
            axis=-1,
        )

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        out = x @ self._tensors[f"{name}.weight"].T
        bias = self._tensors.get(f"{name}.bias")
        return out if bias is None else out + bias

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        mean_square = (x**2).mean(axis=-1, keepdims=True)
        scaled = x / np.sqrt(mean_square + self._raw["rms_norm_eps"])
        return scaled * self._tensors[f"{name}.weight"]
