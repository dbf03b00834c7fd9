"""Writes small GGUF files for tests, valid ones and damaged ones, byte by byte."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from gguf.constants import GGMLQuantizationType as Quantization
from gguf.quants import quantize
from safetensors.numpy import load_file

from replicas.models.gguf import GgufFile
from replicas.models.gguf_architectures import ARCHITECTURES

NUM_LAYERS, MODEL_DIM, FFN_DIM, NUM_HEADS, NUM_KV_HEADS = 2, 64, 96, 4, 2
HEAD_DIM = MODEL_DIM // NUM_HEADS
CHAT_TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content }}{% endfor %}"


@dataclass
class GgufSpec:
    """What a test puts into a file; `write` lays it out as llama.cpp does.

    Attributes:
        metadata: values in the file's order; int is u32, float f32, list of str or int.
        tensors: name to row-major f32 values.
        quantizations: tensors that are not stored as f32.
    """

    metadata: dict[str, object]
    tensors: dict[str, np.ndarray]
    quantizations: dict[str, Quantization] = field(default_factory=dict)
    version: int = 3
    alignment: int = 32

    def write(self, path: Path) -> Path:
        header = b"GGUF" + struct.pack("<IQQ", self.version, len(self.tensors), len(self.metadata))
        for key, value in self.metadata.items():
            header += _string(key) + _value(value)
        data = b""
        for name, values in self.tensors.items():
            quantization = self.quantizations.get(name, Quantization.F32)
            header += _string(name) + struct.pack("<I", values.ndim)
            header += struct.pack(f"<{values.ndim}Q", *reversed(values.shape))
            header += struct.pack("<IQ", quantization, len(data))
            data += quantize(values, quantization).tobytes()
            data += b"\0" * (-len(data) % self.alignment)
        header += b"\0" * (-len(header) % self.alignment)
        path.write_bytes(header + data)
        return path


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: object) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _string(value)
        case [str(), *_]:
            items = b"".join(_string(item) for item in value)
            return struct.pack("<IIQ", 9, 8, len(value)) + items
        case [float(), *_]:
            return struct.pack(f"<IIQ{len(value)}f", 9, 6, len(value), *value)
        case [int(), *_]:
            return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    raise AssertionError(value)


def byte_tokens() -> list[str]:
    """The 256 tokens of a byte-level vocabulary, in GPT-2's spelling of bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    spelling = {byte: chr(byte) for byte in printable}
    spelling |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [spelling[byte] for byte in range(256)]


def llama_spec(seed: int = 0) -> GgufSpec:
    """A two-layer Llama with tied embeddings and a byte-level vocabulary."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_tokens(), "he", "ll"]
    metadata: dict[str, object] = {
        "general.architecture": "llama",
        "llama.block_count": NUM_LAYERS,
        "llama.context_length": 512,
        "llama.embedding_length": MODEL_DIM,
        "llama.feed_forward_length": FFN_DIM,
        "llama.attention.head_count": NUM_HEADS,
        "llama.attention.head_count_kv": NUM_KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 100000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["h e", "l l"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    config = ARCHITECTURES["llama"].convert_config(
        GgufFile(Path("spec"), metadata | {"llama.vocab_size": len(tokens)}, {})
    )
    config["vocab_size"] = len(tokens)
    config["tie_word_embeddings"] = True
    rng = np.random.default_rng(seed)
    tensors = {
        name: rng.standard_normal(target.shape, dtype=np.float32)
        for name, target in ARCHITECTURES["llama"].map_tensors(config).items()
    }
    return GgufSpec(metadata, tensors)


def gemma3_spec(checkpoint: Path) -> GgufSpec:
    """A file of a Gemma 3 checkpoint with 256 tokens, as llama.cpp's converter would write it."""
    raw = json.loads((checkpoint / "config.json").read_text())
    tokens = ["<pad>", "<bos>", "<eos>", "<unk>", "▁", "h", "e", "l", "he", "▁he"]
    tokens += ["  ", *(f"<0x{byte:02X}>" for byte in range(245))]
    kinds = [3] * 4 + [1] * 7 + [6] * 245
    metadata: dict[str, object] = {
        "general.architecture": "gemma3",
        "gemma3.block_count": raw["num_hidden_layers"],
        "gemma3.context_length": raw["max_position_embeddings"],
        "gemma3.embedding_length": raw["hidden_size"],
        "gemma3.feed_forward_length": raw["intermediate_size"],
        "gemma3.attention.head_count": raw["num_attention_heads"],
        "gemma3.attention.head_count_kv": raw["num_key_value_heads"],
        "gemma3.attention.key_length": raw["head_dim"],
        "gemma3.attention.layer_norm_rms_epsilon": raw["rms_norm_eps"],
        "gemma3.attention.sliding_window": raw["sliding_window"],
        "gemma3.rope.freq_base": 1e6,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
    }
    stored = {
        name: tensor.astype(np.float32)
        for name, tensor in load_file(checkpoint / "model.safetensors").items()
    }
    architecture = ARCHITECTURES["gemma3"]
    vocab_size = {"gemma3.vocab_size": len(tokens)}
    config = architecture.convert_config(GgufFile(Path("spec"), metadata | vocab_size, {}))
    config["tie_word_embeddings"] = True
    tensors = {
        name: stored[target.name] + ("norm" in name)
        for name, target in architecture.map_tensors(config).items()
    }
    return GgufSpec(metadata, tensors)


def patched(spec: GgufSpec, metadata: Mapping[str, object]) -> GgufSpec:
    """The spec with some metadata replaced; None removes an entry."""
    merged = {key: value for key, value in (spec.metadata | metadata).items() if value is not None}
    return GgufSpec(merged, spec.tensors, spec.quantizations, spec.version, spec.alignment)
