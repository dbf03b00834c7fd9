"""What can be known of the TPU path without a TPU: `python -m bench.tpu_static kernels|programs`.

`kernels` counts bundles of the attention kernels' inner loops; `programs` predicts steps of models
on slices and, with `--compile`, compiles the engine's own programs for them. With `--gate` a missed
target, or a count more than 5% above the committed baseline, exits with 1. The last line is a
summary.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import jax

from bench import llo
from bench.report import format_table, result_path, stamp, write_json
from bench.tpu_kernels import TOPOLOGIES, KernelRow, measure_kernels
from bench.tpu_programs import WORKLOADS, ProgramRow, find_misses, measure_workload
from replicas.engine import tpu_topology

BASELINE = Path(__file__).with_name("tpu_static_baseline.json")
REGRESSION = 1.05
TARGETS = {
    "v6e: decode: MiB of KV": 310,
    "v6e: decode, head_dim 64: MiB of KV": 360,
    "v6e: decode, int8 pages: MiB of KV": 560,
    "v6e: prefill interior: 32 queries x 512 keys x 8 heads": 1400,
}
COMPILE_TARGET_S = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("kernels", "programs"))
    parser.add_argument("--gate", action="store_true", help="exit with 1 on a miss")
    parser.add_argument("--write-baseline", action="store_true", help="keep these counts")
    parser.add_argument(
        "--only", action="append", help="a generation, or what a workload's name contains"
    )
    parser.add_argument("--compile", action="store_true", help="programs: compile them, too")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    rows, misses = (
        _kernels(args.only, write_baseline=args.write_baseline)
        if args.what == "kernels"
        else _programs(args.only or [""], compiles=args.compile)
    )
    records = [asdict(row) for row in rows]
    path = result_path(f"tpu-static-{args.what}")
    write_json(path, {"stamp": stamp(), "rows": records, "misses": misses})
    print(format_table(records))
    for miss in misses:
        print(f"miss: {miss}")
    print(f"tpu_static {args.what}: {len(rows)} rows, {len(misses)} misses; {path.name}")
    sys.stdout.flush()
    os._exit(1 if args.gate and misses else 0)  # libtpu keeps threads that do not end


def _kernels(
    only: list[str] | None, *, write_baseline: bool
) -> tuple[Sequence[KernelRow], list[str]]:
    with tempfile.TemporaryDirectory() as directory:
        os.environ["LIBTPU_INIT_ARGS"] = llo.dump_flags(Path(directory))
        tpu_topology.prepare_libtpu()
        rows = [
            row
            for generation in only or TOPOLOGIES
            for row in measure_kernels(Path(directory), generation)
        ]
    if write_baseline:
        BASELINE.write_text(json.dumps({row.key: row.bundles for row in rows}, indent=1) + "\n")
    baseline = json.loads(BASELINE.read_text())
    return rows, [miss for row in rows for miss in kernel_misses(row, baseline)]


def kernel_misses(row: KernelRow, baseline: dict[str, float]) -> list[str]:
    """What a loop fails of its bars, as sentences."""
    misses = []
    target = TARGETS.get(row.key)
    if target is not None and row.bundles > target:
        misses.append(f"{row.key}: {row.bundles} bundles, target {target}")
    if row.bundles > REGRESSION * baseline.get(row.key, row.bundles):
        misses.append(f"{row.key}: {row.bundles} bundles, baseline {baseline[row.key]}")
    is_decode = row.loop.startswith("decode")
    if is_decode and row.dma_bundles is not None and row.bundles > row.dma_bundles:
        misses.append(f"{row.key}: {row.bundles} bundles, its DMA takes {row.dma_bundles}")
    if row.compile_s > COMPILE_TARGET_S:
        misses.append(f"{row.key}: compiled in {row.compile_s} s, target {COMPILE_TARGET_S}")
    return misses


def _programs(only: list[str], *, compiles: bool) -> tuple[Sequence[ProgramRow], list[str]]:
    rows, misses = [], []
    for workload in WORKLOADS:
        if any(part in workload.name for part in only):
            row = measure_workload(workload, compiles=compiles)
            print(f"{row.name}: {row.step_ms} ms", file=sys.stderr, flush=True)
            rows.append(row)
            misses += find_misses(workload, row)
    return rows, misses


if __name__ == "__main__":
    main()
