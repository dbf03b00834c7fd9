"""The dense families in numpy f64, their config.json read by transformers' own classes.

Written from transformers' modelling code, one text at a time: no cache, no batch, no fused weights.
Shares nothing with the product, the reading of config.json included. For tiny checkpoints.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from transformers import CONFIG_MAPPING

from tests.naive_rope import naive_rope

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "glm4", "phi3")
_erf = np.vectorize(math.erf)


class NaiveDense:
    """The model of a checkpoint directory of one of `FAMILIES`."""

    def __init__(self, path: Path) -> None:
        raw = json.loads((path / "config.json").read_text())
        self._family: str = raw["model_type"]
        self._config: Any = CONFIG_MAPPING[self._family].from_dict(raw)
        self._tensors = {
            name: tensor.astype(np.float64)
            for name, tensor in load_file(path / "model.safetensors").items()
        }
        config = self._config
        head_dim = getattr(config, "head_dim", None)
        self._head_dim = head_dim or config.hidden_size // config.num_attention_heads

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logits [len(token_ids), V] that follow each token."""
        config, is_gemma = self._config, self._family == "gemma3_text"
        x = self._tensors["model.embed_tokens.weight"][list(token_ids)]
        if is_gemma:
            x = x * math.sqrt(config.hidden_size)
        for i in range(config.num_hidden_layers):
            layer = f"model.layers.{i}"
            attended = self._attend(self._norm(x, f"{layer}.input_layernorm"), layer, i)
            mlp_norm = "post_attention_layernorm"
            if is_gemma:
                attended = self._norm(attended, f"{layer}.post_attention_layernorm")
                mlp_norm = "pre_feedforward_layernorm"
            elif self._family == "glm4":
                attended = self._norm(attended, f"{layer}.post_self_attn_layernorm")
            x = x + attended
            out = self._mlp(self._norm(x, f"{layer}.{mlp_norm}"), f"{layer}.mlp")
            if is_gemma:
                out = self._norm(out, f"{layer}.post_feedforward_layernorm")
            elif self._family == "glm4":
                out = self._norm(out, f"{layer}.post_mlp_layernorm")
            x = x + out
        head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        logits = self._linear(self._norm(x, "model.norm"), head)
        cap = getattr(config, "final_logit_softcapping", None)
        return logits if cap is None else cap * np.tanh(logits / cap)

    def _mlp(self, x: np.ndarray, prefix: str) -> np.ndarray:
        if self._family in ("glm4", "phi3"):
            gate, up = np.split(self._linear(x, f"{prefix}.gate_up_proj"), 2, axis=1)
        else:
            gate, up = (self._linear(x, f"{prefix}.{name}_proj") for name in ("gate", "up"))
        key = "hidden_activation" if self._family == "gemma3_text" else "hidden_act"
        return self._linear(activate(gate, getattr(self._config, key)) * up, f"{prefix}.down_proj")

    def _attend(self, x: np.ndarray, layer: str, index: int) -> np.ndarray:
        config, prefix, dim = self._config, f"{layer}.self_attn", self._head_dim
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        sizes = [num_heads * dim, num_kv_heads * dim, num_kv_heads * dim]
        if self._family == "phi3":
            qkv = self._linear(x, f"{prefix}.qkv_proj")
        else:
            qkv = np.concatenate([self._linear(x, f"{prefix}.{n}_proj") for n in "qkv"], axis=1)
        q, k, v = (
            part.reshape(len(x), -1, dim) for part in np.split(qkv, np.cumsum(sizes)[:2], axis=1)
        )
        if f"{prefix}.q_norm.weight" in self._tensors:
            q, k = self._norm(q, f"{prefix}.q_norm"), self._norm(k, f"{prefix}.k_norm")
        q, k = self._rotate(q, index), self._rotate(k, index)
        k, v = (np.repeat(part, num_heads // num_kv_heads, axis=1) for part in (k, v))
        scale = dim**-0.5
        if self._family == "gemma3_text":
            scale = config.query_pre_attn_scalar**-0.5
        distance = np.arange(len(x))[:, None] - np.arange(len(x))[None, :]
        window = self._window(index)
        is_seen = (distance >= 0) & (distance < (len(x) if window is None else window))
        scores = np.where(is_seen[None], np.einsum("qhd,khd->hqk", q, k) * scale, -np.inf)
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        return self._linear(
            np.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1), f"{prefix}.o_proj"
        )

    def _window(self, index: int) -> int | None:
        if self._family in ("llama", "glm4"):
            return None
        layer_types = getattr(self._config, "layer_types", None)
        is_by_layer = self._family in ("qwen2", "qwen3", "gemma3_text")
        if is_by_layer and layer_types[index] == "full_attention":
            return None
        return self._config.sliding_window

    def _rotate(self, x: np.ndarray, index: int) -> np.ndarray:
        stated: Mapping[str, Any] = self._config.rope_parameters
        if self._family == "gemma3_text":
            stated = stated[self._config.layer_types[index]]
        dim = int(self._head_dim * stated.get("partial_rotary_factor", 1.0))
        raw = {
            "rope_parameters": stated,
            "max_position_embeddings": self._config.max_position_embeddings,
        }
        original = getattr(self._config, "original_max_position_embeddings", None)
        if original is not None:
            raw["original_max_position_embeddings"] = original
        frequencies, factor = naive_rope(raw, rotary_dim=dim, length=len(x))
        turns = factor * np.exp(1j * np.outer(np.arange(len(x)), frequencies))[:, None, :]
        turned, rest = x[..., :dim], x[..., dim:]
        if self._family == "glm4":
            pairs = (turned[..., 0::2] + 1j * turned[..., 1::2]) * turns
            out = np.stack([pairs.real, pairs.imag], axis=-1).reshape(turned.shape)
        else:
            pairs = (turned[..., : dim // 2] + 1j * turned[..., dim // 2 :]) * turns
            out = np.concatenate([pairs.real, pairs.imag], axis=-1)
        return np.concatenate([out, rest], axis=-1)

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self._tensors[f"{name}.weight"].T + self._tensors.get(f"{name}.bias", 0.0)

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        mean_square = np.square(x).mean(axis=-1, keepdims=True)
        weight = self._tensors[f"{name}.weight"] + (self._family == "gemma3_text")
        return x / np.sqrt(mean_square + self._config.rms_norm_eps) * weight


def activate(x: np.ndarray, name: str) -> np.ndarray:
    if name in ("silu", "swish"):
        return x / (1 + np.exp(-x))
    if name == "relu":
        return np.maximum(x, 0)
    if name == "gelu":
        return x * 0.5 * (1 + _erf(x / math.sqrt(2)))
    assert name in ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), name
    return x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
