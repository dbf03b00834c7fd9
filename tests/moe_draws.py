"""Random config.json of the families with experts, for `tests.fuzz_models`."""

from __future__ import annotations

from typing import Any

from tests.draws import ACTIVATIONS, Draw, draw_scaling

_ARCHITECTURES = {
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
}


def draw_moe_config(family: str, draw: Draw) -> dict[str, Any]:
    """Return a random config.json of a family; each key is one that its class reads."""
    num_kv_heads = draw.one(1, 2, 3, 4)
    num_heads = num_kv_heads * draw.one(1, 1, 2, 3)
    head_dim = draw.one(8, 12, 16, 24)
    raw: dict[str, Any] = {
        "model_type": family,
        "architectures": [_ARCHITECTURES[family]],
        "vocab_size": draw.one(64, 97, 130),
        "hidden_size": num_heads * draw.one(6, 10, 16),
        "intermediate_size": draw.one(32, 45, 72),
        "num_hidden_layers": draw.one(1, 2, 3),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 128,
        "rms_norm_eps": draw.one(1e-6, 1e-5, 1e-2),
        "tie_word_embeddings": draw.chance(0.4),
        draw.one("dtype", "torch_dtype"): "float32",
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": draw.one(2, [2, 3]),
    }
    if family != "gpt_oss" and draw.chance(0.6):
        raw["hidden_act"] = draw.one(*ACTIVATIONS)
    if family == "mixtral":
        _draw_mixtral(raw, draw)
    elif family == "qwen3_moe":
        _draw_qwen3(raw, draw)
    elif family == "gpt_oss":
        _draw_gpt_oss(raw, draw)
    else:
        head_dim = _draw_deepseek(raw, draw)
    _draw_rope(raw, draw, head_dim=head_dim)
    return raw


def _draw_mixtral(raw: dict[str, Any], draw: Draw) -> None:
    _draw_experts(raw, draw, draw.one("num_local_experts", "num_experts"))
    raw["sliding_window"] = draw.one(None, 4, 7, 16)
    if raw["hidden_size"] % raw["num_attention_heads"] == 0 and draw.chance(0.4):
        size = raw["hidden_size"] // raw["num_attention_heads"]
        raw["head_dim"] = None if size % 2 == 0 else raw["head_dim"]


def _draw_qwen3(raw: dict[str, Any], draw: Draw) -> None:
    _draw_experts(raw, draw, draw.one("num_experts", "num_local_experts"))
    raw["moe_intermediate_size"] = draw.one(16, 24, 45)
    raw["attention_bias"] = draw.chance(0.5)
    raw["use_sliding_window"] = draw.chance(0.5)
    raw["sliding_window"] = draw.one(4, 7, 16)
    if draw.chance(0.7):
        raw["norm_topk_prob"] = draw.chance(0.5)
    if draw.chance(0.5):
        raw["decoder_sparse_step"] = draw.one(1, 2)
    if draw.chance(0.5):
        raw["mlp_only_layers"] = draw.one(None, [], [0])


def _draw_gpt_oss(raw: dict[str, Any], draw: Draw) -> None:
    _draw_experts(raw, draw, draw.one("num_local_experts", "num_experts"))
    raw["attention_bias"] = draw.chance(0.5)
    raw["sliding_window"] = draw.one(4, 7, 16)
    if draw.chance(0.5):
        kinds = ("full_attention", "sliding_attention")
        raw["layer_types"] = [draw.one(*kinds) for _ in range(raw["num_hidden_layers"])]
    if draw.chance(0.5):
        raw |= {"swiglu_limit": draw.number(0.3, 3), "swiglu_alpha": draw.number(0.8, 2)}


def _draw_deepseek(raw: dict[str, Any], draw: Draw) -> int:
    """Draw latents and routing; return the number of dimensions that are rotated."""
    num_groups, num_rotated = draw.one(1, 2, 4), draw.one(4, 8, 12)
    num_experts = num_groups * draw.one(2, 3, 4)
    per_token_groups = draw.one(*range(1, num_groups + 1))
    num_in_reach = per_token_groups * (num_experts // num_groups)
    del raw["head_dim"]
    raw |= {
        "num_key_value_heads": raw["num_attention_heads"],
        "n_routed_experts": num_experts,
        "n_group": num_groups,
        "topk_group": per_token_groups,
        "num_experts_per_tok": draw.one(*range(1, num_in_reach + 1)),
        "n_shared_experts": draw.one(1, 2),
        "first_k_dense_replace": draw.one(0, 1, 2),
        "moe_intermediate_size": draw.one(16, 24, 45),
        "q_lora_rank": draw.one(None, 12, 24),
        "kv_lora_rank": draw.one(16, 24, 32),
        "qk_nope_head_dim": draw.one(8, 12, 16),
        "qk_rope_head_dim": num_rotated,
        "v_head_dim": draw.one(8, 16, 20),
        "attention_bias": draw.chance(0.4),
    }
    if draw.chance(0.5):
        raw["norm_topk_prob"] = draw.chance(0.5)
    if draw.chance(0.5):
        raw["rope_interleave"] = draw.chance(0.5)
    if draw.chance(0.5):
        raw["routed_scaling_factor"] = draw.number(0.5, 3)
    return num_rotated


def _draw_experts(raw: dict[str, Any], draw: Draw, key: str) -> None:
    raw[key] = draw.one(2, 3, 5, 8)
    raw["num_experts_per_tok"] = draw.one(*range(1, min(raw[key], 4) + 1))


def _draw_rope(raw: dict[str, Any], draw: Draw, *, head_dim: int) -> None:
    head_dim = (
        head_dim
        if raw.get("head_dim", 0) is not None
        else (raw["hidden_size"] // raw["num_attention_heads"])
    )
    kinds = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
    if raw["model_type"] not in ("mixtral", "qwen3_moe"):
        kinds = ("default", "yarn")
    kind = draw.one(*kinds)
    theta = draw.one(100.0, 10_000.0, 500_000.0)
    scaling = draw_scaling(kind, head_dim // 2, draw)
    # gpt-oss without either has a scaling by default, of a longer context than these have.
    if draw.chance(0.5) or raw["model_type"] == "gpt_oss":
        raw["rope_parameters"] = {"rope_theta": theta, **scaling}
    else:
        raw["rope_theta"] = theta
        if kind != "default":
            raw["rope_scaling"] = scaling
