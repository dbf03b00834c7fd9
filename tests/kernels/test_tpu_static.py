"""The static gate of the TPU kernels: what it calls a miss and a regression, and that it passes."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.tpu_kernels import KernelRow
from bench.tpu_static import BASELINE, exit_status, judge_kernels

ROW = KernelRow(
    loop="decode: MiB of KV",
    chip="v6e",
    bundles=300.0,
    all_bundles=330.0,
    limit="VALU 200",
    spills=20.0,
    dma_bundles=1119,
    compile_s=3.0,
    reference_s=1.5,
    compile_ratio=2.0,
)
GATE = ("--gate", "--small", "--counts-only", "--only=v6e")
SMALL_STORE = "v6e: small store: page of 128 tokens"
RECORD = {"bundles": 300.0, "spills": 20.0, "compile_s": 3.0, "compile_ratio": 2.0}


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [
        ({"bundles": 290.0}, []),
        ({"bundles": 280.0}, ["300.0 bundles, baseline 280.0"]),
        ({"spills": 0.0}, ["20.0 spills, baseline 0.0"]),
        ({"compile_ratio": 1.95}, []),
        ({"compile_ratio": 1.9}, ["2.0 times a fixed program's time to compile, baseline 1.9"]),
    ],
)
def test_what_is_worse_than_the_baseline_is_a_regression(
    recorded: dict[str, float], expected: list[str]
) -> None:
    known, regressions = judge_kernels([ROW], {ROW.key: RECORD | recorded})
    assert known == []
    assert regressions == [f"{ROW.key}: {sentence}" for sentence in expected]


@pytest.mark.parametrize("field", ["bundles", "spills", "compile_ratio"])
@pytest.mark.parametrize(("growth", "status"), [(1.0, 0), (1.04, 0), (1.06, 1)])
def test_the_gate_fails_on_5_percent_more(field: str, growth: float, status: int) -> None:
    record = RECORD | {"bundles": 290.0, "spills": 1000.0}
    row = dataclasses.replace(ROW, **(record | {field: growth * record[field]}))
    known, regressions = judge_kernels([row], {row.key: record})
    assert (len(known), len(regressions)) == (0, status)
    assert exit_status(regressions, is_gate=True) == status
    assert exit_status(regressions, is_gate=False) == 0


def test_a_loop_must_be_measured_and_recorded() -> None:
    _, [regression] = judge_kernels([ROW], {})
    assert "not in the baseline" in regression
    _, [regression] = judge_kernels([], {ROW.key: RECORD})
    assert "no longer measured" in regression


def test_a_target_that_the_baseline_misses_is_known_and_a_new_miss_is_a_regression() -> None:
    slow = dataclasses.replace(ROW, bundles=1200.0, compile_s=11.0)
    recorded = {"bundles": 1200.0, "compile_s": 11.0}
    known, regressions = judge_kernels([slow], {slow.key: RECORD | recorded})
    assert [miss.split(": ")[-1] for miss in known] == [
        "1200.0 bundles, target 310",
        "1200.0 bundles, its DMA takes 1119",
        "compiled in 11.0 s, target 10.0",
    ]
    assert regressions == []
    over = dataclasses.replace(ROW, bundles=311.0)
    known, regressions = judge_kernels([over], {over.key: RECORD})
    assert known == []
    assert regressions == [f"{over.key}: 311.0 bundles, target 310"]


def run_gate(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The gate on small kernels of v6e; a process of its own: libtpu takes flags when it loads."""
    return subprocess.run(
        [sys.executable, "-m", "bench.tpu_static", "kernels", *GATE, *arguments],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_small_kernels_of_v6e_pass_the_gate() -> None:
    gate = run_gate()
    assert gate.returncode == 0, gate.stdout + gate.stderr
    assert "tpu_static kernels: " in gate.stdout.splitlines()[-1]


def test_the_gate_exits_with_1_and_names_the_kernel_that_became_worse(tmp_path: Path) -> None:
    baseline = json.loads(BASELINE.read_text())
    before = round(baseline[SMALL_STORE]["bundles"] / 1.1, 1)
    baseline[SMALL_STORE]["bundles"] = before
    path = tmp_path / "baseline.json"
    path.write_text(json.dumps(baseline))
    gate = run_gate("--kernel=small store", f"--baseline={path}")
    assert gate.returncode == 1, gate.stdout + gate.stderr
    regression, summary = gate.stdout.splitlines()[-2:]
    assert regression.startswith(f"regression: {SMALL_STORE}: ")
    assert regression.endswith(f" bundles, baseline {before}")
    assert summary.startswith("tpu_static kernels: 1 rows, 1 regressions, 0 known misses")


def test_the_gate_refuses_a_kernel_that_there_is_not() -> None:
    gate = run_gate("--kernel=smal store")
    assert gate.returncode == 2
    assert "none of ['small decode'" in gate.stderr
