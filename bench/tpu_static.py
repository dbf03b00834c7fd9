"""What can be known of the TPU path without a TPU: `python -m bench.tpu_static kernels|programs`.

`kernels` counts bundles of the attention kernels' inner loops; `programs` predicts steps of models
on slices and, with `--compile`, compiles the engine's own programs for them. Targets that are
missed are listed. With `--gate`, exits with 1 where a loop's bundles or spills are more than 5%
above the committed baseline, or a program copies pages or takes too much memory. `kernels --small`
takes a quarter of the heads and fewer variants. The last line is a summary.
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
from bench.tpu_programs import (
    WORKLOADS,
    ProgramRow,
    find_failures,
    find_misses,
    measure_workload,
)
from replicas.engine import tpu_topology

BASELINE = Path(__file__).with_name("tpu_static_baseline.json")
REGRESSION = 1.05
_FREE_SPILLS = 16
"""Spills per unit that are not told apart from none: 5% of few is less than one."""
TARGETS = {
    "v6e: decode: MiB of KV": 310,
    "v6e: decode, head_dim 64: MiB of KV": 360,
    "v6e: decode, int8 pages: MiB of KV": 560,
    "v6e: prefill interior: 32 queries x 512 keys x 8 heads": 1400,
    "v6e: prefill diagonal: 32 queries x 512 keys x 8 heads": 1400,
}
COMPILE_TARGET_S = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("kernels", "programs"))
    parser.add_argument("--gate", action="store_true", help="exit with 1 on a regression")
    parser.add_argument("--small", action="store_true", help="kernels: small ones")
    parser.add_argument("--write-baseline", action="store_true", help="keep these counts")
    parser.add_argument(
        "--only", action="append", help="a generation, or what a workload's name contains"
    )
    parser.add_argument("--compile", action="store_true", help="programs: compile them, too")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    rows, misses, regressions = (
        _kernels(args.only, is_small=args.small, write_baseline=args.write_baseline)
        if args.what == "kernels"
        else _programs(args.only or [""], compiles=args.compile)
    )
    records = [asdict(row) for row in rows]
    path = result_path(f"tpu-static-{args.what}")
    found = {"misses": misses, "regressions": regressions}
    write_json(path, {"stamp": stamp(), "rows": records, **found})
    print(format_table(records))
    for kind, sentences in found.items():
        for sentence in sentences:
            print(f"{kind[:-2] if kind == 'misses' else kind[:-1]}: {sentence}")
    print(
        f"tpu_static {args.what}: {len(rows)} rows, {len(misses)} misses, "
        f"{len(regressions)} regressions; {path.name}"
    )
    sys.stdout.flush()
    os._exit(1 if args.gate and regressions else 0)  # libtpu keeps threads that do not end


def _kernels(
    only: list[str] | None, *, is_small: bool, write_baseline: bool
) -> tuple[Sequence[KernelRow], list[str], list[str]]:
    with tempfile.TemporaryDirectory() as directory:
        os.environ["LIBTPU_INIT_ARGS"] = llo.dump_flags(Path(directory))
        tpu_topology.prepare_libtpu()
        rows = [
            row
            for generation in only or TOPOLOGIES
            for row in measure_kernels(Path(directory), generation, is_small=is_small)
        ]
    baseline = json.loads(BASELINE.read_text())
    if write_baseline:
        baseline |= {row.key: {"bundles": row.bundles, "spills": row.spills} for row in rows}
        BASELINE.write_text(json.dumps(baseline, indent=1) + "\n")
    misses = [miss for row in rows for miss in kernel_misses(row)]
    misses += [f"{row.key}: not in the baseline" for row in rows if row.key not in baseline]
    return rows, misses, [worse for row in rows for worse in kernel_regressions(row, baseline)]


def kernel_misses(row: KernelRow) -> list[str]:
    """What a loop fails of its targets, as sentences."""
    misses = []
    target = TARGETS.get(row.key)
    if target is not None and row.bundles > target:
        misses.append(f"{row.key}: {row.bundles} bundles, target {target}")
    is_decode = "decode" in row.loop
    if is_decode and row.dma_bundles is not None and row.bundles > row.dma_bundles:
        misses.append(f"{row.key}: {row.bundles} bundles, its DMA takes {row.dma_bundles}")
    if row.compile_s > COMPILE_TARGET_S:
        misses.append(f"{row.key}: compiled in {row.compile_s} s, target {COMPILE_TARGET_S}")
    return misses


def kernel_regressions(row: KernelRow, baseline: dict[str, dict[str, float]]) -> list[str]:
    """Where a loop is worse than the baseline, as sentences."""
    recorded = baseline.get(row.key)
    if recorded is None:
        return []
    regressions = []
    if row.bundles > REGRESSION * recorded["bundles"]:
        regressions.append(f"{row.key}: {row.bundles} bundles, baseline {recorded['bundles']}")
    spills = recorded.get("spills")  # left out by older records
    if spills is not None and row.spills > max(REGRESSION * spills, spills + _FREE_SPILLS):
        regressions.append(f"{row.key}: {row.spills} spills, baseline {spills}")
    return regressions


def _programs(
    only: list[str], *, compiles: bool
) -> tuple[Sequence[ProgramRow], list[str], list[str]]:
    rows, misses, failures = [], [], []
    for workload in WORKLOADS:
        if any(part in workload.name for part in only):
            row = measure_workload(workload, compiles=compiles)
            print(f"{row.name}: {row.step_ms} ms", file=sys.stderr, flush=True)
            rows.append(row)
            misses += find_misses(workload, row)
            failures += find_failures(workload, row)
    return rows, misses, failures


if __name__ == "__main__":
    main()
