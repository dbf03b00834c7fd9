"""A few of the random checkpoints of `tests.fuzz_models`; the command draws any number."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz_models import FAMILIES, draw_config, largest_error


@pytest.mark.parametrize("family", FAMILIES)
def test_random_options_equal_the_naive_model(tmp_path: Path, family: str) -> None:
    assert largest_error(family, 3, tmp_path) < 1e-4


def test_seeds_draw_what_families_differ_in() -> None:
    drawn = [draw_config(family, seed) for family in FAMILIES for seed in range(40)]
    kinds = {
        (raw.get("rope_parameters") or raw.get("rope_scaling") or {}).get("rope_type")
        for raw in drawn
    }
    assert kinds >= {"default", "linear", "dynamic", "llama3", "yarn", "longrope"}
    keys = {key for raw in drawn for key in raw}
    assert keys >= {"sliding_window", "layer_types", "mlp_bias", "partial_rotary_factor"}
    assert any(raw["num_key_value_heads"] is None for raw in drawn)
    assert keys >= {"num_experts", "num_local_experts", "mlp_only_layers", "swiglu_limit"}
    assert any(raw.get("n_group", 1) > 1 and raw["q_lora_rank"] is None for raw in drawn)
