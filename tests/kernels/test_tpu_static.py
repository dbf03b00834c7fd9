"""The reduced gate of CI: each TPU kernel compiled, its bundles against the recorded ones."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.tpu_kernels import KernelRow
from bench.tpu_static import kernel_misses, kernel_regressions

ROOT = Path(__file__).resolve().parents[2]
ROW = KernelRow(
    loop="decode: MiB of KV",
    chip="v6e",
    bundles=300.0,
    all_bundles=330.0,
    limit="VALU 200",
    spills=20.0,
    dma_bundles=1119,
    compile_s=3.0,
)


def test_kernels_take_no_more_bundles_and_spills_than_recorded() -> None:
    """In a process of its own: libtpu reads where to write bundles when it is loaded."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.tpu_static", "kernels", "--small", "--gate"],
        cwd=ROOT,
        env=os.environ | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    summary = done.stdout.splitlines()[-1]
    assert "0 regressions" in summary
    assert "not in the baseline" not in done.stdout
    for chip in ("v5e", "v6e", "tpu7x"):
        for loop in ("decode", "decode, int8 pages", "prefill interior", "store", "latents"):
            assert any(loop in line for line in done.stdout.splitlines() if chip in line)


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [
        ({"bundles": 290.0, "spills": 20.0}, []),
        ({"bundles": 280.0, "spills": 20.0}, ["300.0 bundles, baseline 280.0"]),
        ({"bundles": 300.0, "spills": 0.0}, ["20.0 spills, baseline 0.0"]),
        (None, []),
    ],
)
def test_what_is_5_percent_worse_is_a_regression(recorded, expected) -> None:
    baseline = {} if recorded is None else {ROW.key: recorded}
    found = kernel_regressions(ROW, baseline)
    assert len(found) == len(expected)
    for sentence, part in zip(found, expected, strict=True):
        assert part in sentence


def test_a_target_that_is_missed_is_listed() -> None:
    assert kernel_misses(ROW) == []
    slow = dataclasses.replace(ROW, bundles=1200.0, compile_s=11.0)
    for part, miss in zip(("target 310", "DMA", "compiled"), kernel_misses(slow), strict=True):
        assert part in miss
