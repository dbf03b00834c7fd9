"""The families with experts in numpy f64, their config.json read by transformers' own classes.

Like `tests.naive_dense`: no cache, no batch, no sorting of rows, keys and values of latent
attention expanded. Shares nothing with the product. For tiny checkpoints.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from transformers import CONFIG_MAPPING

from tests.naive_dense import activate
from tests.naive_rope import naive_rope

FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "kimi_k2")


class NaiveMoE:
    """The model of a checkpoint directory of one of `FAMILIES`."""

    def __init__(self, path: Path) -> None:
        stated = json.loads((path / "config.json").read_text())
        self._family: str = stated["model_type"]
        # Kimi-K2 has no class of its own there: its checkpoints come with a copy of DeepSeek-V3's.
        name = "deepseek_v3" if self._family == "kimi_k2" else self._family
        # Every key, absent ones as the reference reads them.
        self._raw: dict[str, Any] = CONFIG_MAPPING[name].from_dict(stated).to_dict()
        head_dim = self._raw.get("head_dim")
        self._head_dim: int = (
            head_dim or self._raw["hidden_size"] // self._raw["num_attention_heads"]
        )
        self._tensors = {
            name: tensor.astype(np.float64)
            for name, tensor in load_file(path / "model.safetensors").items()
        }

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logits [len(token_ids), V] that follow each token."""
        raw = self._raw
        attend = self._attend_latent if "kv_lora_rank" in raw else self._attend
        hidden = self._tensors["model.embed_tokens.weight"][list(token_ids)]
        for i in range(raw["num_hidden_layers"]):
            prefix = f"model.layers.{i}"
            normed = self._norm(hidden, f"{prefix}.input_layernorm", raw["rms_norm_eps"])
            hidden = hidden + attend(normed, f"{prefix}.self_attn", i)
            normed = self._norm(hidden, f"{prefix}.post_attention_layernorm", raw["rms_norm_eps"])
            hidden = hidden + self._mlp(normed, prefix)
        head = "model.embed_tokens" if raw["tie_word_embeddings"] else "lm_head"
        return self._linear(self._norm(hidden, "model.norm", raw["rms_norm_eps"]), head)

    def _mlp(self, x: np.ndarray, prefix: str) -> np.ndarray:
        if f"{prefix}.mlp.gate_proj.weight" in self._tensors:
            return self._gated(x, f"{prefix}.mlp", ("gate_proj", "up_proj", "down_proj"))
        names = ("gate_proj", "up_proj", "down_proj")
        block, gate = f"{prefix}.mlp", f"{prefix}.mlp.gate"
        if self._family == "mixtral":
            block, names = f"{prefix}.block_sparse_moe", ("w1", "w3", "w2")
            gate = f"{block}.gate"
        elif self._family == "gpt_oss":
            gate = f"{block}.router"
        out = np.zeros(x.shape)
        for row, (weights, experts) in enumerate(
            map(self._route, self._linear(x, gate), [gate] * len(x))
        ):
            for weight, expert in zip(weights, experts, strict=True):
                if self._family == "gpt_oss":
                    y = self._clamped(x[row], f"{block}.experts", expert)
                else:
                    y = self._gated(x[row], f"{block}.experts.{expert}", names)
                out[row] += weight * y
        if f"{block}.shared_experts.gate_proj.weight" in self._tensors:
            out += self._gated(x, f"{block}.shared_experts", names)
        return out

    def _route(self, logits: np.ndarray, gate: str) -> tuple[np.ndarray, np.ndarray]:
        raw, count = self._raw, self._raw["num_experts_per_tok"]
        if self._family not in ("deepseek_v3", "kimi_k2"):
            scores = np.exp(logits) / np.exp(logits).sum()
            experts = np.argsort(-scores, kind="stable")[:count]
            weights = scores[experts]
            normalizes = raw.get("norm_topk_prob", self._family != "qwen3_moe")
            return (weights / weights.sum() if normalizes else weights), experts
        scores = 1 / (1 + np.exp(-logits))
        choice = scores + self._tensors[f"{gate}.e_score_correction_bias"]
        groups = choice.reshape(raw["n_group"], -1)
        best = np.sort(groups, axis=1)[:, -2:].sum(axis=1)
        closed = np.argsort(-best, kind="stable")[raw["topk_group"] :]
        groups[closed] = -np.inf
        experts = np.argsort(-choice, kind="stable")[:count]
        weights = scores[experts]
        if raw["norm_topk_prob"]:
            weights = weights / weights.sum()
        return weights * raw["routed_scaling_factor"], experts

    def _gated(self, x: np.ndarray, prefix: str, names: Sequence[str]) -> np.ndarray:
        gate, up = (self._linear(x, f"{prefix}.{name}") for name in names[:2])
        gated = activate(gate, self._raw["hidden_act"]) * up
        return self._linear(gated, f"{prefix}.{names[2]}")

    def _clamped(self, x: np.ndarray, prefix: str, expert: int) -> np.ndarray:
        def project(x: np.ndarray, name: str) -> np.ndarray:
            weight = self._tensors[f"{prefix}.{name}"][expert]
            return x @ weight + self._tensors[f"{prefix}.{name}_bias"][expert]

        limit, alpha = self._raw["swiglu_limit"], self._raw["swiglu_alpha"]
        gate_up = project(x, "gate_up_proj")
        gate = np.minimum(gate_up[0::2], limit)
        up = np.clip(gate_up[1::2], -limit, limit)
        return project((up + 1) * gate / (1 + np.exp(-alpha * gate)), "down_proj")

    def _attend(self, x: np.ndarray, prefix: str, layer: int) -> np.ndarray:
        raw, length = self._raw, len(x)
        q, k, v = (
            self._linear(x, f"{prefix}.{name}_proj").reshape(length, -1, self._head_dim)
            for name in "qkv"
        )
        if f"{prefix}.q_norm.weight" in self._tensors:
            q = self._norm(q, f"{prefix}.q_norm", raw["rms_norm_eps"])
            k = self._norm(k, f"{prefix}.k_norm", raw["rms_norm_eps"])
        q, k = self._rotate(q), self._rotate(k)
        k, v = (np.repeat(part, q.shape[1] // k.shape[1], axis=1) for part in (k, v))
        window = raw.get("sliding_window")
        if self._family == "gpt_oss" and raw["layer_types"][layer] == "full_attention":
            window = None
        sinks = self._tensors.get(f"{prefix}.sinks")
        out = _attention(q, k, v, scale=self._head_dim**-0.5, window=window, sinks=sinks)
        return self._linear(out, f"{prefix}.o_proj")

    def _attend_latent(self, x: np.ndarray, prefix: str, layer: int) -> np.ndarray:
        del layer
        raw, length, num_heads = self._raw, len(x), self._raw["num_attention_heads"]
        plain, rotated, rank = raw["qk_nope_head_dim"], raw["qk_rope_head_dim"], raw["kv_lora_rank"]
        if raw.get("q_lora_rank") is None:
            q = self._linear(x, f"{prefix}.q_proj")
        else:
            latent = self._linear(x, f"{prefix}.q_a_proj")
            latent = self._norm(latent, f"{prefix}.q_a_layernorm", 1e-6)
            q = self._linear(latent, f"{prefix}.q_b_proj")
        q = q.reshape(length, num_heads, plain + rotated)
        row = self._linear(x, f"{prefix}.kv_a_proj_with_mqa")
        latent = self._norm(row[:, :rank], f"{prefix}.kv_a_layernorm", 1e-6)
        kv = self._linear(latent, f"{prefix}.kv_b_proj").reshape(length, num_heads, -1)
        interleaved = raw.get("rope_interleave", True)
        shared = self._rotate(row[:, None, rank:], is_interleaved=interleaved)
        shared = np.repeat(shared, num_heads, axis=1)
        k = np.concatenate([kv[..., :plain], shared], axis=2)
        turned = self._rotate(q[..., plain:], is_interleaved=interleaved)
        q = np.concatenate([q[..., :plain], turned], axis=2)
        scale = (plain + rotated) ** -0.5
        rope = raw["rope_parameters"]
        if rope.get("mscale_all_dim"):
            scale *= (0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1) ** 2
        return self._linear(_attention(q, k, kv[..., plain:], scale=scale), f"{prefix}.o_proj")

    def _rotate(self, x: np.ndarray, *, is_interleaved: bool = False) -> np.ndarray:
        frequencies, factor = naive_rope(self._raw, rotary_dim=x.shape[-1], length=len(x))
        angles = np.arange(len(x))[:, None, None] * np.asarray(frequencies)
        cos, sin = factor * np.cos(angles), factor * np.sin(angles)
        if is_interleaved:
            first, second = x[..., 0::2], x[..., 1::2]
        else:
            first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self._tensors[f"{name}.weight"].T + self._tensors.get(f"{name}.bias", 0.0)

    def _norm(self, x: np.ndarray, name: str, eps: float) -> np.ndarray:
        scaled = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + eps)
        return scaled * self._tensors[f"{name}.weight"]


def _attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float,
    window: int | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Causal attention of [T, H, D]; [T, H V]."""
    length = len(q)
    distance = np.arange(length)[:, None] - np.arange(length)[None, :]
    is_seen = (distance >= 0) & (distance < (window or length))
    scores = np.where(is_seen[None], np.einsum("qhd,khd->hqk", q, k) * scale, -np.inf)
    highest = scores.max(axis=2, keepdims=True)
    weights = np.exp(scores - highest)
    total = weights.sum(axis=2, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - highest)
    return np.einsum("hqk,khd->qhd", weights / total, v).reshape(length, -1)
