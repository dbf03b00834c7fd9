"""Random checkpoints of every family against `tests.naive_dense` and `tests.naive_moe`.

    python -m tests.fuzz_models [--seeds 0:40] [--families llama,phi3]

Each seed draws a family's sizes, head counts and options, in either spelling, writes the checkpoint
and compares the logits of a text. Prints each case that differs, with its config.json, and ends
with status 1 if there is one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from bench.arguments import integer_range
from bench.paged_forward import PagedForward
from replicas.models.param_spec import ParamSpec
from replicas.models.registry import get_family, load_model_config
from tests.draws import ACTIVATIONS, Draw, draw_scaling
from tests.moe_draws import draw_moe_config
from tests.naive_dense import FAMILIES as DENSE_FAMILIES
from tests.naive_dense import NaiveDense
from tests.naive_moe import FAMILIES as MOE_FAMILIES
from tests.naive_moe import NaiveMoE

_ARCHITECTURES = {"gemma3_text": "Gemma3ForCausalLM", "glm4": "Glm4ForCausalLM"}
_MAX_LEN = 96
FAMILIES = (*DENSE_FAMILIES, *MOE_FAMILIES)


def draw_config(family: str, seed: int) -> dict[str, Any]:
    """Return a random config.json of a family; each key is one that its class reads."""
    draw = Draw(family, seed)
    if family in MOE_FAMILIES:
        return draw_moe_config(family, draw)
    num_kv_heads = draw.one(1, 2, 3, 4)
    num_heads = num_kv_heads * draw.one(1, 1, 2, 3)
    num_layers = draw.one(1, 2, 3)
    is_sized = family != "phi3" and draw.chance(0.6)
    head_dim = draw.one(8, 12, 16, 24)
    raw: dict[str, Any] = {
        "model_type": family,
        "architectures": [_ARCHITECTURES.get(family, f"{family.capitalize()}ForCausalLM")],
        "vocab_size": draw.one(64, 97, 130),
        # transformers asks for a multiple of the heads, whatever their size.
        "hidden_size": num_heads * (draw.one(6, 10, 16) if is_sized else head_dim),
        "intermediate_size": draw.one(32, 45, 72),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": 128,
        "rms_norm_eps": draw.one(1e-6, 1e-5, 1e-2),
        "tie_word_embeddings": draw.chance(0.4),
        draw.one("dtype", "torch_dtype"): "float32",
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": draw.one(2, [2, 3]),
    }
    if is_sized or family in ("qwen3", "glm4", "gemma3_text"):  # these have a default of their own
        raw["head_dim"] = head_dim
    if num_kv_heads == num_heads and family in ("llama", "phi3") and draw.chance(0.5):
        raw["num_key_value_heads"] = None
    key = "hidden_activation" if family == "gemma3_text" else "hidden_act"
    if draw.chance(0.6):
        raw[key] = draw.one(*ACTIVATIONS)
    if family in ("llama", "qwen3", "gemma3_text", "glm4"):
        raw["attention_bias"] = draw.chance(0.5)
    if family == "llama":
        raw["mlp_bias"] = draw.chance(0.4)
    _draw_windows(raw, family, draw)
    if family == "gemma3_text":
        raw["query_pre_attn_scalar"] = draw.one(16, 64, 256)
        if draw.chance(0.4):
            raw["final_logit_softcapping"] = draw.number(2, 20)
        _draw_gemma_ropes(raw, draw)
    else:
        _draw_rope(raw, family, draw)
    return raw


def _draw_windows(raw: dict[str, Any], family: str, draw: Draw) -> None:
    window, num_layers = draw.one(4, 7, 16), raw["num_hidden_layers"]
    if family in ("mistral", "phi3"):
        raw["sliding_window"] = draw.one(None, window)
    elif family in ("qwen2", "qwen3"):
        raw["use_sliding_window"] = draw.chance(0.6)
        raw["sliding_window"] = window
        raw["max_window_layers"] = draw.one(0, 1, 2)
        if raw["use_sliding_window"] and draw.chance(0.4):
            raw["layer_types"] = _draw_layer_types(num_layers, draw)
    elif family == "gemma3_text":
        raw["sliding_window"] = window
        if draw.chance(0.5):
            raw["layer_types"] = _draw_layer_types(num_layers, draw)
        elif draw.chance(0.5):
            raw["sliding_window_pattern"] = draw.one(1, 2, 3)


def _draw_layer_types(num_layers: int, draw: Draw) -> list[str]:
    return [draw.one("full_attention", "sliding_attention") for _ in range(num_layers)]


def _draw_rope(raw: dict[str, Any], family: str, draw: Draw) -> None:
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    partial = draw.one(0.5, 1.0) if family in ("glm4", "phi3") else 1.0
    theta = draw.one(100.0, 10_000.0, 500_000.0)
    kinds = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
    kind = draw.one("default", "longrope") if family == "phi3" else draw.one(*kinds)
    scaling = draw_scaling(kind, int(head_dim * partial) // 2, draw)
    if family == "phi3" and kind == "longrope":
        raw["original_max_position_embeddings"] = scaling.pop("original_max_position_embeddings")
    if family in ("glm4", "phi3") and partial != 1.0:
        if draw.chance(0.5):
            raw["partial_rotary_factor"] = partial
        else:
            scaling["partial_rotary_factor"] = partial
    elif family == "glm4":
        raw["partial_rotary_factor"] = partial
    if draw.chance(0.5) or "partial_rotary_factor" in scaling:
        raw["rope_parameters"] = {"rope_theta": theta, **scaling}
    else:
        raw["rope_theta"] = theta
        if kind != "default":
            raw["rope_scaling"] = scaling


def _draw_gemma_ropes(raw: dict[str, Any], draw: Draw) -> None:
    theta, local = draw.one(10_000.0, 1e6), draw.one(1_000.0, 10_000.0)
    full: dict[str, Any] = draw.one(
        {"rope_type": "default"}, {"rope_type": "linear", "factor": 8.0}
    )
    if draw.chance(0.5):
        raw["rope_parameters"] = {
            "full_attention": {"rope_theta": theta, **full},
            "sliding_attention": {"rope_theta": local, "rope_type": "default"},
        }
    else:
        raw |= {"rope_theta": theta, "rope_local_base_freq": local}
        if full["rope_type"] != "default":
            raw["rope_scaling"] = full


def write_random(path: Path, raw: dict[str, Any], *, seed: int) -> Path:
    """Write the config and random tensors of it."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw))
    config = load_model_config(path)
    specs = jax.tree.leaves(
        get_family(config).param_specs(config), is_leaf=lambda node: isinstance(node, ParamSpec)
    )
    shapes = {source.name: source.shape for spec in specs for source in spec.sources}
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        scale = 0.2 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5
        is_plain_norm = name.endswith("norm.weight") and raw["model_type"] != "gemma3_text"
        mean = 1.0 if is_plain_norm else 0.0
        tensors[name] = (mean + scale * rng.standard_normal(shape)).astype(np.float32)
    save_file(tensors, path / "model.safetensors")
    return path


def largest_error(family: str, seed: int, path: Path) -> float:
    """Write a random checkpoint and return its largest logit error, relative to the largest logit.

    An error of float32 is near 1e-6.
    """
    raw = draw_config(family, seed)
    write_random(path, raw, seed=seed)
    prompt = np.random.default_rng(seed).integers(4, raw["vocab_size"], 40).tolist()
    naive = NaiveMoE(path) if family in MOE_FAMILIES else NaiveDense(path)
    expected = naive.logits(prompt)
    # longrope: an engine takes the frequencies by its longest text, the reference by each text.
    rope = load_model_config(path).rope
    original = rope.original_max_position_embeddings
    max_len = _MAX_LEN
    if rope.kind == "longrope" and len(prompt) <= original:
        max_len = min(original, _MAX_LEN)
    logits = PagedForward(path, dtype="float32", page_size=8, max_len=max_len).logits(prompt)
    return float(np.abs(logits - expected).max() / max(1.0, np.abs(expected).max()))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=integer_range, default=(0, 40), help="half open, LOW:HIGH")
    parser.add_argument("--families", default=",".join(FAMILIES))
    options = parser.parse_args(arguments)
    num_cases, worst, num_failed = 0, 0.0, 0
    for seed in range(*options.seeds):
        for family in options.families.split(","):
            with tempfile.TemporaryDirectory() as directory:
                try:
                    error = largest_error(family, seed, Path(directory))
                except ValueError as refusal:
                    print(f"{family} {seed}: {refusal}\n  {draw_config(family, seed)}", flush=True)
                    num_failed += 1
                    continue
            num_cases += 1
            worst = max(worst, error)
            if not error < 1e-4:
                num_failed += 1
                print(f"{family} {seed}: {error:.1e}\n  {draw_config(family, seed)}", flush=True)
    print(f"{num_cases} cases compared, {num_failed} failed, largest relative error {worst:.1e}")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
