"""Rotary embeddings of every kind against formulas in plain Python, from config.json on."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replicas.models.registry import UnsupportedModelError, load_model_config
from replicas.models.rope import rope_frequencies
from tests.checkpoints import TINY_LLAMA
from tests.naive_rope import naive_rope

HEAD_DIM = 32
BASE = {
    **{key: value for key, value in TINY_LLAMA.items() if key != "rope_theta"},
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 4096,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 16 for i in range(HEAD_DIM // 2)],
    "long_factor": [2.0 + i / 4 for i in range(HEAD_DIM // 2)],
    "original_max_position_embeddings": 1024,
}
CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": YARN,
    "yarn, not truncated": {**YARN, "truncate": False, "beta_fast": 16, "beta_slow": 2},
    "yarn, mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn, one mscale": {**YARN, "mscale": 0.5},
    "yarn, attention factor": {**YARN, "attention_factor": 1.3},
    "yarn, factor implied": {**YARN, "factor": None},
    "yarn, no extension": {**YARN, "factor": 1.0},
    "yarn, all between": {**YARN, "original_max_position_embeddings": 8},
    "longrope": LONGROPE,
    "longrope, factor": {**LONGROPE, "factor": 32.0},
    "longrope, attention factor": {**LONGROPE, "attention_factor": 1.19},
}


def load(path: Path, raw: dict[str, Any]) -> Any:
    (path / "config.json").write_text(json.dumps(raw))
    return load_model_config(path)


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("case", list(CASES))
def test_frequencies_and_factors_are_those_of_the_formulas(
    tmp_path: Path, case: str, spelling: str
) -> None:
    parameters = CASES[case]
    if spelling == "rope_parameters":
        raw = {**BASE, "rope_parameters": {"rope_theta": 5e5, **parameters}}
    else:
        older = {"type" if key == "rope_type" else key: v for key, v in parameters.items()}
        raw = {**BASE, "rope_theta": 5e5, "rope_scaling": older}
    config = load(tmp_path, raw)
    for length in (16, 4096):
        rope = config.for_length(length).rope
        frequencies, factor = naive_rope(raw, rotary_dim=HEAD_DIM, length=length)
        np.testing.assert_allclose(rope_frequencies(rope, HEAD_DIM), frequencies, rtol=1e-6)
        assert rope.attention_factor == pytest.approx(factor, rel=1e-12)


def test_longrope_switches_with_the_longest_sequence_that_an_engine_admits(tmp_path: Path) -> None:
    config = load(tmp_path, {**BASE, "rope_theta": 1e4, "rope_scaling": LONGROPE})
    assert config.for_length(1024).rope.is_long is False
    assert config.for_length(1025).rope.is_long is True


@pytest.mark.parametrize(
    ("family", "keys", "expected"),
    [
        ("glm4", {}, 16),
        ("glm4", {"partial_rotary_factor": 0.25}, 8),
        ("glm4", {"rope_parameters": {"partial_rotary_factor": 1.0, "rope_theta": 1e4}}, None),
        ("phi3", {"partial_rotary_factor": 0.75}, 24),
        ("phi3", {}, None),
        ("gpt_neox", {"rotary_pct": 0.5}, 16),
        ("gpt_neox", {"rope_parameters": {"partial_rotary_factor": 0.5}}, 16),
        ("gpt_neox", {}, 8),
    ],
)
def test_the_share_of_a_head_that_is_rotated(
    tmp_path: Path, family: str, keys: dict[str, Any], expected: int | None
) -> None:
    raw = {
        "model_type": family,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": None if family != "glm4" else 4,
        "head_dim": HEAD_DIM,
        **keys,
    }
    config = load(tmp_path, raw)
    assert config.rope.rotary_dim == expected
    assert config.rope.is_interleaved == (family == "glm4")
    if expected is not None:
        frequencies, _ = naive_rope(raw, rotary_dim=expected, length=1)
        np.testing.assert_allclose(rope_frequencies(config.rope, HEAD_DIM), frequencies, rtol=1e-6)


def test_phi3_reads_the_names_and_the_length_that_its_checkpoints_use(tmp_path: Path) -> None:
    raw = {
        "model_type": "phi3",
        "hidden_size": 128,
        "num_attention_heads": 4,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {
            "type": "su",
            "short_factor": LONGROPE["short_factor"],
            "long_factor": LONGROPE["long_factor"],
        },
    }
    config = load(tmp_path, raw)
    _, factor = naive_rope(raw, rotary_dim=HEAD_DIM, length=1)
    assert config.rope.attention_factor == pytest.approx(factor, rel=1e-12)
    assert config.rope.original_max_position_embeddings == 4096


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({**LONGROPE, "short_factor": [1.0]}, "rope_scaling.short_factor = [1.0]"),
        ({**LONGROPE, "long_factor": None}, "rope_scaling.long_factor = None"),
        ({**YARN, "beta_fast": "fast"}, "beta_fast = 'fast'"),
        ({**YARN, "low_freq_factor": 1.0}, "rope_scaling.low_freq_factor = 1.0"),
        ({"rope_type": "mrope", "mrope_section": [4, 6, 6]}, "rope_type = 'mrope'"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(
    tmp_path: Path, parameters: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModelError) as refusal:
        load(tmp_path, {**BASE, "rope_theta": 1e4, "rope_scaling": parameters})
    assert named in str(refusal.value)
