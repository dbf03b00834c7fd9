"""What the importer knows of each model architecture that a GGUF file can hold.

One `Architecture` per value of `general.architecture`: how its metadata becomes a Hugging Face
config and how its tensors are named and laid out there. A new family is one more entry of
`ARCHITECTURES`. The containers on either side (GGUF, safetensors) are not its business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from replicas.models.gguf import GgufError, GgufFile

type HfConfig = dict[str, object]
type Transform = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class TensorTarget:
    """Where one tensor of a GGUF file goes.

    Attributes:
        name: Hugging Face's name.
        shape: the shape that the config demands.
        transform: changes llama.cpp's element order into Hugging Face's; None: the same order.
    """

    name: str
    shape: tuple[int, ...]
    transform: Transform | None = None


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one model architecture is converted.

    Attributes:
        convert_config: file to the content of config.json, without token ids and dtype.
        map_tensors: config to {GGUF tensor name: target}; every one of them must be in the file.
        ignored_tensors: tensors of the file whose content the config already expresses.
    """

    convert_config: Callable[[GgufFile], HfConfig]
    map_tensors: Callable[[HfConfig], Mapping[str, TensorTarget]]
    ignored_tensors: frozenset[str] = frozenset()


def get_architecture(file: GgufFile) -> Architecture:
    """Find the architecture of a file.

    Raises:
        GgufError: it is not one of ours.
    """
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise GgufError(
            f"{file.path} holds a model of architecture {name!r}; supported: "
            + ", ".join(sorted(ARCHITECTURES))
        )
    return ARCHITECTURES[name]


def _number(file: GgufFile, key: str, default: float | None = None) -> float:
    value = file.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        found = "no number" if key in file.metadata else "nothing"
        raise GgufError(f"{file.path} has {found} under {key}, which its architecture needs")
    return value


def _integer(file: GgufFile, key: str, default: int | None = None) -> int:
    value = _number(file, key, default)
    if not isinstance(value, int) or value < 1:
        raise GgufError(f"{file.path} has {value!r} under {key}, expected a positive integer")
    return value


def _decimal(file: GgufFile, key: str, default: float | None = None) -> float:
    """Read an f32 as the shortest decimal that rounds to it: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(_number(file, key, default))))


def convert_llama_config(file: GgufFile) -> HfConfig:
    """Make the config of a Llama-family model (also Mistral and SmolLM2, which share its code)."""
    hidden_size = _integer(file, "llama.embedding_length")
    num_heads = _integer(file, "llama.attention.head_count")
    head_dim = _integer(file, "llama.attention.key_length", hidden_size // num_heads)
    rotary_dim = _integer(file, "llama.rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        raise GgufError(
            f"{file.path} rotates {rotary_dim} of {head_dim} head dimensions "
            "(llama.rope.dimension_count); only whole heads are supported"
        )
    context_length = _integer(file, "llama.context_length")
    rope_theta = _decimal(file, "llama.rope.freq_base", 10000.0)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": _integer(file, "llama.feed_forward_length"),
        "max_position_embeddings": context_length,
        "mlp_bias": False,
        "num_attention_heads": num_heads,
        "num_hidden_layers": _integer(file, "llama.block_count"),
        "num_key_value_heads": _integer(file, "llama.attention.head_count_kv", num_heads),
        "rms_norm_eps": _decimal(file, "llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": _llama_rope(
            file, head_dim=head_dim, context_length=context_length, rope_theta=rope_theta
        ),
        "rope_theta": rope_theta,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "vocab_size": file.tensors["token_embd.weight"].shape[0]
        if "token_embd.weight" in file.tensors
        else _integer(file, "llama.vocab_size"),
    }


def _llama_rope(
    file: GgufFile, *, head_dim: int, context_length: int, rope_theta: float
) -> dict[str, object]:
    scaling = file.metadata.get("llama.rope.scaling.type", "none")
    if scaling == "linear":
        factor = _decimal(file, "llama.rope.scaling.factor")
        return {"rope_type": "linear", "rope_theta": rope_theta, "factor": factor}
    if scaling != "none":
        raise GgufError(
            f"{file.path} scales RoPE by {scaling!r} (llama.rope.scaling.type); supported: none, "
            "linear, and llama3 as a rope_freqs.weight tensor"
        )
    if "rope_freqs.weight" not in file.tensors:
        return {"rope_type": "default", "rope_theta": rope_theta}
    return _recognise_llama3_rope(
        file, head_dim=head_dim, context_length=context_length, rope_theta=rope_theta
    )


def _recognise_llama3_rope(
    file: GgufFile, *, head_dim: int, context_length: int, rope_theta: float
) -> dict[str, object]:
    """Recover Llama 3.1's scaling rule from the per-frequency divisors that the file stores.

    llama.cpp keeps only the divisors. All published models use low/high factors 1 and 4 over 8,192
    original positions; the rule is accepted only if it reproduces the stored divisors.
    """
    stored = file.tensors["rope_freqs.weight"].to_float32().reshape(-1)
    rule = {
        "rope_type": "llama3",
        "rope_theta": rope_theta,
        "factor": float(str(stored.max())),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": min(8192, context_length),
    }
    expected = llama3_divisors(rule, head_dim)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-4):
        raise GgufError(
            f"{file.path} scales RoPE by a rope_freqs.weight that is not Llama 3's rule; "
            "supported: none, linear, llama3"
        )
    return rule


def llama3_divisors(rule: Mapping[str, object], head_dim: int) -> np.ndarray:
    """Compute the factor that each RoPE frequency is divided by, f32 [head_dim / 2].

    Source: the Llama 3.1 reference code, `apply_scaling`: long waves are divided by `factor`, short
    ones are kept, those between are interpolated in frequency.
    """
    theta, factor, low, high, original = (
        float(str(rule[key]))
        for key in (
            "rope_theta",
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        )
    )
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    kept = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    return (1.0 / (kept + (1.0 - kept) / factor)).astype(np.float32)


def _split_rotary_halves(num_heads: int) -> Transform:
    """Undo llama.cpp's row order of q and k.

    Its RoPE rotates neighbouring rows (2i, 2i+1) of a head, Hugging Face's rotates (i, i + D/2).
    Input and output: [num_heads * D, M].
    """

    def transform(weight: np.ndarray) -> np.ndarray:
        rows, columns = weight.shape
        pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
        return pairs.swapaxes(1, 2).reshape(rows, columns)

    return transform


def map_llama_tensors(config: HfConfig) -> Mapping[str, TensorTarget]:
    """Name every tensor of a Llama-family model; weights are [out, in] on both sides."""

    def size(key: str) -> int:
        value = config[key]
        assert isinstance(value, int), key
        return value

    model, ffn, vocab = size("hidden_size"), size("intermediate_size"), size("vocab_size")
    num_heads, num_kv_heads = size("num_attention_heads"), size("num_key_value_heads")
    q_rows, kv_rows = num_heads * size("head_dim"), num_kv_heads * size("head_dim")
    targets = {
        "token_embd.weight": TensorTarget("model.embed_tokens.weight", (vocab, model)),
        "output_norm.weight": TensorTarget("model.norm.weight", (model,)),
    }
    if not config["tie_word_embeddings"]:
        targets["output.weight"] = TensorTarget("lm_head.weight", (vocab, model))
    for layer in range(size("num_hidden_layers")):
        layer_targets = {
            "attn_norm": TensorTarget("input_layernorm", (model,)),
            "attn_q": TensorTarget(
                "self_attn.q_proj", (q_rows, model), _split_rotary_halves(num_heads)
            ),
            "attn_k": TensorTarget(
                "self_attn.k_proj", (kv_rows, model), _split_rotary_halves(num_kv_heads)
            ),
            "attn_v": TensorTarget("self_attn.v_proj", (kv_rows, model)),
            "attn_output": TensorTarget("self_attn.o_proj", (model, q_rows)),
            "ffn_norm": TensorTarget("post_attention_layernorm", (model,)),
            "ffn_gate": TensorTarget("mlp.gate_proj", (ffn, model)),
            "ffn_up": TensorTarget("mlp.up_proj", (ffn, model)),
            "ffn_down": TensorTarget("mlp.down_proj", (model, ffn)),
        }
        for name, target in layer_targets.items():
            targets[f"blk.{layer}.{name}.weight"] = TensorTarget(
                f"model.layers.{layer}.{target.name}.weight", target.shape, target.transform
            )
    return targets


def convert_gemma3_config(file: GgufFile) -> HfConfig:
    """Make the config of a Gemma 3 text model.

    llama.cpp has constants in its code for what the file does not say: every 6th layer sees the
    whole context, windowed layers rotate by base 10,000, and scores are divided by sqrt(head_dim),
    or by sqrt(hidden_size / heads) in the model of 62 layers.
    """
    head_dim = _integer(file, "gemma3.attention.key_length")
    if (value_dim := _integer(file, "gemma3.attention.value_length", head_dim)) != head_dim:
        raise GgufError(
            f"{file.path} has values of {value_dim} dimensions (gemma3.attention.value_length) but "
            f"keys of {head_dim}; they must be equal"
        )
    if (cap := file.metadata.get("gemma3.final_logit_softcapping")) is not None:
        raise GgufError(f"{file.path} caps logits at {cap!r}, which is not supported")
    num_layers = _integer(file, "gemma3.block_count")
    hidden_size = _integer(file, "gemma3.embedding_length")
    num_heads = _integer(file, "gemma3.attention.head_count")
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attention_bias": False,
        "head_dim": head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": hidden_size,
        "intermediate_size": _integer(file, "gemma3.feed_forward_length"),
        "layer_types": [
            "sliding_attention" if (layer + 1) % 6 else "full_attention"
            for layer in range(num_layers)
        ],
        "max_position_embeddings": _integer(file, "gemma3.context_length"),
        "num_attention_heads": num_heads,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": _integer(file, "gemma3.attention.head_count_kv"),
        "query_pre_attn_scalar": hidden_size // num_heads if num_layers == 62 else head_dim,
        "rms_norm_eps": _decimal(file, "gemma3.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {
            "full_attention": _gemma3_rope(file),
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "sliding_window": _integer(file, "gemma3.attention.sliding_window"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "vocab_size": file.tensors["token_embd.weight"].shape[0]
        if "token_embd.weight" in file.tensors
        else _integer(file, "gemma3.vocab_size"),
    }


def _gemma3_rope(file: GgufFile) -> dict[str, object]:
    """Read the rotary embedding of the layers that see the whole context."""
    rope_theta = _decimal(file, "gemma3.rope.freq_base", 1e6)
    scaling = file.metadata.get("gemma3.rope.scaling.type", "none")
    if scaling == "none":
        return {"rope_type": "default", "rope_theta": rope_theta}
    if scaling != "linear":
        raise GgufError(
            f"{file.path} scales RoPE by {scaling!r} (gemma3.rope.scaling.type); supported: none, "
            "linear"
        )
    factor = _decimal(file, "gemma3.rope.scaling.factor")
    return {"rope_type": "linear", "rope_theta": rope_theta, "factor": factor}


def _subtract_one(weight: np.ndarray) -> np.ndarray:
    """Undo what llama.cpp adds to a norm's weight, which Hugging Face's code adds itself."""
    return weight - np.float32(1)


def map_gemma3_tensors(config: HfConfig) -> Mapping[str, TensorTarget]:
    """Name every tensor of a Gemma 3 text model; q and k are in Hugging Face's order."""

    def size(key: str) -> int:
        value = config[key]
        assert isinstance(value, int), key
        return value

    def norm(name: str, num_elements: int) -> TensorTarget:
        return TensorTarget(name, (num_elements,), _subtract_one)

    model, ffn, vocab = size("hidden_size"), size("intermediate_size"), size("vocab_size")
    head_dim = size("head_dim")
    q_rows = size("num_attention_heads") * head_dim
    kv_rows = size("num_key_value_heads") * head_dim
    targets = {
        "token_embd.weight": TensorTarget("model.embed_tokens.weight", (vocab, model)),
        "output_norm.weight": norm("model.norm.weight", model),
    }
    if not config["tie_word_embeddings"]:
        targets["output.weight"] = TensorTarget("lm_head.weight", (vocab, model))
    for layer in range(size("num_hidden_layers")):
        layer_targets = {
            "attn_norm": norm("input_layernorm", model),
            "attn_q": TensorTarget("self_attn.q_proj", (q_rows, model)),
            "attn_k": TensorTarget("self_attn.k_proj", (kv_rows, model)),
            "attn_v": TensorTarget("self_attn.v_proj", (kv_rows, model)),
            "attn_q_norm": norm("self_attn.q_norm", head_dim),
            "attn_k_norm": norm("self_attn.k_norm", head_dim),
            "attn_output": TensorTarget("self_attn.o_proj", (model, q_rows)),
            "post_attention_norm": norm("post_attention_layernorm", model),
            "ffn_norm": norm("pre_feedforward_layernorm", model),
            "ffn_gate": TensorTarget("mlp.gate_proj", (ffn, model)),
            "ffn_up": TensorTarget("mlp.up_proj", (ffn, model)),
            "ffn_down": TensorTarget("mlp.down_proj", (model, ffn)),
            "post_ffw_norm": norm("post_feedforward_layernorm", model),
        }
        for name, target in layer_targets.items():
            targets[f"blk.{layer}.{name}.weight"] = TensorTarget(
                f"model.layers.{layer}.{target.name}.weight", target.shape, target.transform
            )
    return targets


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        convert_llama_config, map_llama_tensors, ignored_tensors=frozenset({"rope_freqs.weight"})
    ),
    "gemma3": Architecture(convert_gemma3_config, map_gemma3_tensors),
}
