"""Import of GGUF models: faithful content, and a directory that appears whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

from replicas.models.gguf import GgufError
from replicas.models.gguf_architectures import llama3_divisors
from replicas.models.import_gguf import import_gguf
from replicas.models.registry import load_model_config
from tests.gguf_files import (
    CHAT_TEMPLATE,
    HEAD_DIM,
    MODEL_DIM,
    NUM_HEADS,
    NUM_KV_HEADS,
    GgufSpec,
    gemma3_spec,
    llama_spec,
    patched,
)

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "smollm2_135m.json"
DEFAULT_MODEL = ROOT / "models" / "smollm2-135m-instruct"


def imported(spec: GgufSpec, directory: Path) -> Path:
    target = directory / "model"
    assert import_gguf(spec.write(directory / "source.gguf"), target, dtype="float32")
    return target


def load_weights(directory: Path) -> dict[str, np.ndarray]:
    with safe_open(directory / "model.safetensors", framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def rotate_neighbours(heads: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """llama.cpp's RoPE: elements 2i and 2i+1 of [heads, D] are one complex number."""
    pairs = heads[:, 0::2] + 1j * heads[:, 1::2]
    turned = pairs * np.exp(1j * angles)
    return np.stack([turned.real, turned.imag], axis=-1).reshape(heads.shape)


def rotate_halves(heads: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Hugging Face's RoPE: elements i and i + D/2 of [heads, D] are one complex number."""
    half = heads.shape[1] // 2
    turned = (heads[:, :half] + 1j * heads[:, half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def test_config_has_the_models_shape_and_token_ids(tmp_path: Path) -> None:
    config = json.loads((imported(llama_spec(), tmp_path) / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["head_dim"] == HEAD_DIM
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 100000.0}
    assert config["tie_word_embeddings"] is True
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    assert config["torch_dtype"] == "float32"


def test_a_second_end_token_is_kept(tmp_path: Path) -> None:
    spec = patched(llama_spec(), {"tokenizer.ggml.eot_token_id": 0})
    generation = json.loads((imported(spec, tmp_path) / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 0]


def test_an_output_projection_of_its_own_unties_the_embeddings(tmp_path: Path) -> None:
    spec = llama_spec()
    spec.tensors["output.weight"] = spec.tensors["token_embd.weight"] * 2
    target = imported(spec, tmp_path)
    assert json.loads((target / "config.json").read_text())["tie_word_embeddings"] is False
    weights = load_weights(target)
    np.testing.assert_array_equal(weights["lm_head.weight"], spec.tensors["output.weight"])


def test_attention_scores_are_those_of_the_source(tmp_path: Path) -> None:
    """The two rotations differ, and so does the row order; the scores q.k may not."""
    spec = llama_spec()
    weights = load_weights(imported(spec, tmp_path))
    x = np.random.default_rng(5).standard_normal((2, MODEL_DIM))
    frequencies = 100000.0 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)

    def scores(
        q_weight: np.ndarray,
        k_weight: np.ndarray,
        rotate: Callable[[np.ndarray, np.ndarray], np.ndarray],
    ) -> np.ndarray:
        q = rotate((q_weight @ x[0]).reshape(NUM_HEADS, HEAD_DIM), 7 * frequencies)
        k = rotate((k_weight @ x[1]).reshape(NUM_KV_HEADS, HEAD_DIM), 3 * frequencies)
        return np.einsum("kgd,kd->kg", q.reshape(NUM_KV_HEADS, -1, HEAD_DIM), k)

    source = scores(
        spec.tensors["blk.1.attn_q.weight"], spec.tensors["blk.1.attn_k.weight"], rotate_neighbours
    )
    prefix = "model.layers.1.self_attn."
    found = scores(
        weights[prefix + "q_proj.weight"], weights[prefix + "k_proj.weight"], rotate_halves
    )
    np.testing.assert_allclose(found, source, rtol=1e-6)


def test_weights_are_rounded_to_bfloat16_to_nearest(tmp_path: Path) -> None:
    spec = llama_spec()
    import_gguf(spec.write(tmp_path / "source.gguf"), tmp_path / "model")
    found = load_weights(tmp_path / "model")["model.layers.0.mlp.up_proj.weight"]
    assert found.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(
        found, spec.tensors["blk.0.ffn_up.weight"].astype(ml_dtypes.bfloat16)
    )


def test_llama3_rope_is_recognised_by_its_divisors(tmp_path: Path) -> None:
    rule = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    spec = patched(llama_spec(), {"llama.rope.freq_base": 500000.0, "llama.context_length": 131072})
    spec.tensors["rope_freqs.weight"] = llama3_divisors(rule, HEAD_DIM)
    config = json.loads((imported(spec, tmp_path) / "config.json").read_text())
    assert config["rope_parameters"] == rule


def test_the_tokenizer_splits_digits_and_keeps_special_tokens(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(imported(llama_spec(), tmp_path))
    assert tokenizer.tokenize("hello 12") == ["he", "ll", "o", "Ġ", "1", "2"]
    assert tokenizer.encode("<|im_start|>he<|im_end|>") == [1, 259, 2]
    assert tokenizer.decode(tokenizer.encode("naïve 三")) == "naïve 三"
    assert tokenizer.chat_template == CHAT_TEMPLATE


def test_bos_is_prepended_where_the_file_says_so(tmp_path: Path) -> None:
    spec = patched(llama_spec(), {"tokenizer.ggml.add_bos_token": True})
    assert AutoTokenizer.from_pretrained(imported(spec, tmp_path)).encode("he") == [1, 259]


def test_a_gemma3_file_becomes_the_checkpoint_that_it_was_made_of(
    golden_dir: Path, tmp_path: Path
) -> None:
    source = golden_dir / "gemma3"
    target = imported(gemma3_spec(source), tmp_path)
    assert dataclasses.replace(
        load_model_config(target), eos_token_ids=(2,), checkpoint_dtype="bfloat16"
    ) == load_model_config(source)
    weights, expected = load_weights(target), load_weights(source)
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        np.testing.assert_allclose(weight, expected[name].astype(np.float32), atol=1e-6)

    tokenizer = AutoTokenizer.from_pretrained(target)
    assert tokenizer.encode("he  ") == [1, 8, 10]
    assert tokenizer.encode(" he", add_special_tokens=False) == [9]
    assert tokenizer.decode(tokenizer.encode("hé", add_special_tokens=False)) == "hé"


def golden_items() -> list[dict[str, object]]:
    return json.loads(GOLDEN.read_text(encoding="utf-8"))["items"]


def test_default_model_tokenises_the_golden_prompts() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEFAULT_MODEL)
    items = golden_items()
    assert len(items) == 8
    for item in items:
        text = item["source"]
        if item["kind"] == "chat":
            text = tokenizer.apply_chat_template(text, add_generation_prompt=True, tokenize=False)
        assert tokenizer.encode(text) == item["prompt_token_ids"], text


def test_importing_the_same_file_again_does_nothing(tmp_path: Path) -> None:
    target = imported(llama_spec(), tmp_path)
    before = {path: path.stat().st_mtime_ns for path in target.iterdir()}
    assert not import_gguf(tmp_path / "source.gguf", target, dtype="float32")
    assert {path: path.stat().st_mtime_ns for path in target.iterdir()} == before


def test_another_file_replaces_an_import(tmp_path: Path) -> None:
    target = imported(llama_spec(seed=0), tmp_path)
    old = load_weights(target)["model.norm.weight"]
    assert imported(llama_spec(seed=1), tmp_path) == target
    assert not np.array_equal(load_weights(target)["model.norm.weight"], old)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "source.gguf"]


def test_a_directory_that_we_did_not_make_is_never_replaced(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "config.json").write_text("{}")
    with pytest.raises(FileExistsError, match="was not made by the importer"):
        import_gguf(llama_spec().write(tmp_path / "source.gguf"), target)
    assert [path.name for path in target.iterdir()] == ["config.json"]


def without_tensor(name: str) -> GgufSpec:
    spec = llama_spec()
    del spec.tensors[name]
    return spec


def with_tensor(name: str, *shape: int) -> GgufSpec:
    spec = llama_spec()
    spec.tensors[name] = np.full(shape, 3.0, np.float32)
    return spec


UNSUPPORTED = {
    "architecture": (
        patched(llama_spec(), {"general.architecture": "mamba"}),
        "architecture 'mamba'; supported: gemma3, llama",
    ),
    "no architecture": (patched(llama_spec(), {"general.architecture": None}), "None; supported"),
    "no layers": (patched(llama_spec(), {"llama.block_count": None}), "llama.block_count"),
    "layers as text": (patched(llama_spec(), {"llama.block_count": "two"}), "llama.block_count"),
    "missing tensor": (
        without_tensor("blk.1.ffn_up.weight"),
        "lacks 1 tensors, such as blk.1.ffn_up",
    ),
    "extra tensor": (with_tensor("blk.0.attn_q.bias", 64), "such as blk.0.attn_q.bias"),
    "wrong shape": (
        with_tensor("blk.0.ffn_up.weight", 95, 64),
        r"\(95, 64\), expected \(96, 64\)",
    ),
    "rope scaling": (patched(llama_spec(), {"llama.rope.scaling.type": "yarn"}), "'yarn'"),
    "partial rotation": (
        patched(llama_spec(), {"llama.rope.dimension_count": 8}),
        "rotates 8 of 16",
    ),
    "odd rope divisors": (with_tensor("rope_freqs.weight", 8), "not Llama 3's rule"),
    "no vocabulary": (patched(llama_spec(), {"tokenizer.ggml.tokens": None}), "no vocabulary"),
    "tokenizer kind": (patched(llama_spec(), {"tokenizer.ggml.model": "rwkv"}), "kind 'rwkv'"),
    "pre-tokenizer": (patched(llama_spec(), {"tokenizer.ggml.pre": "martian"}), "rule 'martian'"),
    "token out of range": (
        patched(llama_spec(), {"tokenizer.ggml.bos_token_id": 9999}),
        "its bos token has id 9999",
    ),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_what_is_unsupported_is_named_and_leaves_nothing(tmp_path: Path, kind: str) -> None:
    spec, message = UNSUPPORTED[kind]
    source = spec.write(tmp_path / "source.gguf")
    with pytest.raises(GgufError, match=message) as caught:
        import_gguf(source, tmp_path / "models" / "model")
    assert "source.gguf" in str(caught.value)
    assert not list((tmp_path / "models").glob("*"))
    assert not list((tmp_path / "models").glob(".*"))


def test_the_command_reports_a_truncated_file_without_a_trace(tmp_path: Path) -> None:
    source = llama_spec().write(tmp_path / "source.gguf")
    source.write_bytes(source.read_bytes()[:-5000])
    command = [
        sys.executable,
        "-m",
        "replicas.models.import_gguf",
        str(source),
        str(tmp_path / "m"),
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "source.gguf is truncated: tensor" in result.stderr
    assert "Traceback" not in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["source.gguf"]
