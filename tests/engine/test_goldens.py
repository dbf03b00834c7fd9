"""Tiny reference checkpoints through the paged cache and the engine."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench import golden
from bench.paged_forward import PagedForward
from replicas.config import Quantization
from tests.naive import NaiveLlama

LLAMA_NAMES = ("llama", "llama3_rope", "llama_hd64_kv3", "mistral_swa")
NAMES = (*LLAMA_NAMES, "qwen2", "qwen3", "gemma3", "glm4", "phi3", "gpt_neox")


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens_equal_the_reference(golden_dir: Path, name: str) -> None:
    result = golden.compare(golden_dir / name)
    assert result.max_abs_logit_err <= 1e-4  # the bar is 2e-3; f32 noise is near 1e-5
    assert result.greedy_match == result.total == 48
    assert result.argmax_match == 1.0
    assert result.passed


@pytest.mark.parametrize(("dtype", "quantization"), [("float32", "int8"), ("bfloat16", "none")])
@pytest.mark.parametrize("name", ["gemma3", "glm4", "gpt_neox"])
def test_packed_weights_stay_close_to_the_reference(
    golden_dir: Path, name: str, dtype: str, quantization: Quantization
) -> None:
    reference = np.load(golden_dir / name / "golden.npz")
    model = PagedForward(golden_dir / name, dtype=dtype, quantization=quantization)
    error = model.logits(reference["prompt_1"].tolist()) - reference["logits_1"]
    relative_error = np.linalg.norm(error) / np.linalg.norm(reference["logits_1"])
    assert 1e-4 < relative_error < 0.05


@pytest.mark.parametrize("name", LLAMA_NAMES)
def test_the_naive_model_is_a_valid_reference(golden_dir: Path, name: str) -> None:
    reference = np.load(golden_dir / name / "golden.npz")
    logits = NaiveLlama(golden_dir / name).logits(reference["prompt_0"])
    assert np.abs(logits - reference["logits_0"]).max() < 1e-4


def test_chunks_of_a_prompt_give_the_bits_of_the_whole(golden_dir: Path) -> None:
    path = golden_dir / "mistral_swa"
    prompt = np.load(path / "golden.npz")["prompt_0"].tolist()
    logits = [
        PagedForward(path, dtype=dtype, chunk_size=chunk_size, page_size=page_size).logits(prompt)
        for dtype in ("float32", "bfloat16")
        for chunk_size, page_size in ((8, 8), (16, 16), (64, 32))
    ]
    for chunked in logits[1:3]:
        np.testing.assert_array_equal(chunked, logits[0])
    for chunked in logits[4:]:
        np.testing.assert_array_equal(chunked, logits[3])


def test_greedy_comparison_ends_at_an_undecided_difference() -> None:
    margins = np.array([1.0, 0.001, 1.0])
    assert golden.count_equal([1, 2, 3], [1, 2, 3], margins) == (3, 3)
    assert golden.count_equal([1, 9, 9], [1, 2, 3], margins) == (1, 1)
    assert golden.count_equal([9, 2, 3], [1, 2, 3], margins) == (0, 3)


def test_an_unsupported_family_is_a_line_and_not_a_failure(
    golden_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    assert golden.main([str(foreign), str(golden_dir / "llama")]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["name"] for line in lines] == ["foreign", "llama"]
    assert lines[0]["status"].startswith("unsupported: config.json: model_type = 'mamba'")
    assert lines[1]["status"] == "passed"


def test_a_missed_bar_fails_the_run(golden_dir: Path, tmp_path: Path) -> None:
    source = golden_dir / "llama"
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    arrays = dict(np.load(source / "golden.npz"))
    arrays["logits_1"] = arrays["logits_1"] + np.float32(0.01)
    np.savez(tmp_path / "golden.npz", **arrays)
    assert golden.main([str(tmp_path)]) == 1
