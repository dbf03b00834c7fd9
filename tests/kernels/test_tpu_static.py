"""What the static gate of the TPU kernels calls a miss, and what a regression."""

import dataclasses

import pytest

from bench.tpu_kernels import KernelRow
from bench.tpu_static import kernel_misses, kernel_regressions

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
