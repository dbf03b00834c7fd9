"""`bench.determinism`, reduced: it passes on the engine, and it would notice if it should not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import determinism
from bench.determinism import Row, compare, setting_values, variants
from tests.checkpoints import write_checkpoint

CONDITIONS = {
    "alone",
    "other neighbours, cold",
    "prefix-cache hit",
    "preempted",
    "chunks of 16",
    "restarted",
}


def arguments(tmp_path: Path, *more: str) -> list[str]:
    model = write_checkpoint(tmp_path / "model")
    return [
        *("--model", str(model), "--weights", "float32", "--prompts", "12", "--tokens", "24"),
        *("--concurrency", "8", "--alone", "2", "--chunks", "16", "--max-model-len", "128"),
        *("--program-store", str(tmp_path / "programs"), "--out", str(tmp_path / "out.json")),
        *more,
    ]


def test_every_condition_gives_the_reference_s_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert determinism.main(arguments(tmp_path)) == 0
    assert "100.0%" in capsys.readouterr().out
    rows: list[dict[str, Any]] = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert {row["condition"] for row in rows} >= CONDITIONS
    for row in rows:
        assert row["is_ok"], row
        if row["condition"] in CONDITIONS:
            assert (row["share"], row["problem"]) == (1.0, None)


def test_a_difference_fails_the_bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def restarted(suite: determinism.Suite) -> determinism.Tokens:
        tokens = dict(suite._reference)
        tokens["greedy-0"] = (*tokens["greedy-0"][:3], -1, *tokens["greedy-0"][4:])
        return tokens

    monkeypatch.setattr(determinism.Suite, "_restarted", restarted)
    assert determinism.main(arguments(tmp_path, "--prompts", "9", "--tokens", "6")) == 1
    out = capsys.readouterr().out
    assert "8/9" in out
    assert "greedy-0 @ 3" in out


def test_differences_are_counted_and_the_earliest_is_named() -> None:
    row = Row(weights="float32", condition="x")
    reference = {"a": (1, 2, 3), "b": (1, 2, 3), "c": (4,), "d": (5, 6)}
    compare(row, reference, {"a": (1, 2, 3), "b": (1, 9, 3), "d": (5,)})
    assert (row.num_compared, row.num_identical) == (3, 1)
    assert row.first_difference == ("b", 1)
    assert not row.is_ok


def test_a_condition_that_did_not_come_about_fails_and_a_missing_feature_does_not() -> None:
    row = Row(weights="float32", condition="x", num_compared=2, num_identical=2)
    assert row.is_ok
    row.problem = "nobody was preempted"
    assert not row.is_ok
    row.problem = "not built"
    assert row.is_ok
    assert not Row(weights="float32", condition="nothing compared").is_ok


def test_variants_follow_the_engine_s_settings() -> None:
    assert list(variants([]))[:2] == ["float32", "bfloat16"]
    assert setting_values("quantization") == ("int8",)
    assert setting_values("no_such_setting") is None
    with pytest.raises(ValueError, match="unknown weights 'int3'"):
        variants(["int3"])


def test_half_of_the_requests_are_sampled_each_with_a_seed_of_its_own() -> None:
    workload = determinism.Workload(
        num_prompts=8, num_tokens=4, max_prompt_tokens=50, has_both_modes=False
    )
    requests = workload.requests(128, salt="x")
    sampled = [r.sampling for r in requests if r.sampling.temperature > 0]
    assert len(sampled) == len({s.seed for s in sampled}) == 4
    assert {s.top_k for s in sampled} == {0, 40}
    assert requests == workload.requests(128, salt="x")
