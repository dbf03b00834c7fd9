"""Autoscaling for real, small: a load brings a TPU host, its end releases it, no request fails.

In a process of its own: a test session has one Ray cluster, and this needs one whose hosts come and
go. `make scale` is the same with a longer wave, and measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ray
ROOT = Path(__file__).resolve().parents[2]


def test_a_wave_brings_a_host_and_releases_it_and_no_request_fails(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    run = subprocess.run(
        [sys.executable, "-m", "bench.scale_wave", "--short", "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    report = json.loads(out.read_text())
    wave, pinning = report["wave"], report["pinning"]
    assert wave["num_requests"] > 100
    assert (wave["errors"], wave["wrong"]) == ([], 0)
    assert max(wave["replicas"]) == 2
    assert wave["replicas"][-1] == wave["hosts"][-1] == 1
    assert all(run["are_disjoint"] for run in pinning)
    assert [run["chips_per_replica"] for run in pinning] == [2]
