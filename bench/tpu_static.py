"""What can be known of the TPU path without a TPU: `python -m bench.tpu_static kernels|programs`.

`kernels` counts bundles of the attention kernels' inner loops; `programs` predicts steps of models
on slices and, with `--compile`, compiles the engine's own programs for them. `kernels --small`
takes a quarter of the heads and fewer variants, `--kernel` those of a name. The last line is a
summary.

With `--gate`, exits with 1 on what is worse than the committed baseline: a loop with 5% more
bundles or spills, a kernel that takes 5% longer to compile, a target that the baseline met, a loop
that only one of the two has; and where a program copies pages or takes too much memory. Targets
that the baseline misses, too, are listed and counted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import jax

from bench import llo
from bench.report import format_table, result_path, stamp, write_json
from bench.tpu_kernels import (
    REGRESSION,
    Baseline,
    KernelRow,
    kernel_names,
    measure_kernels,
)
from bench.tpu_programs import (
    WORKLOADS,
    ProgramRow,
    find_failures,
    find_misses,
    measure_workload,
)
from replicas.engine import tpu_topology

BASELINE = Path(__file__).with_name("tpu_static_baseline.json")
GENERATIONS = ("v5e", "v6e", "tpu7x")
"""That the baseline has; `--only v5p` counts one more."""
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
    parser.add_argument(
        "--kernel", default="", help="kernels: those whose name contains this, e.g. 'int8 pages'"
    )
    parser.add_argument(
        "--baseline", type=Path, default=BASELINE, help="kernels: compare with this file"
    )
    parser.add_argument("--write-baseline", action="store_true", help="keep these counts in it")
    parser.add_argument(
        "--counts-only", action="store_true", help="kernels: no gate on how long compiling takes"
    )
    parser.add_argument(
        "--only", action="append", help="a generation, or what a workload's name contains"
    )
    parser.add_argument("--compile", action="store_true", help="programs: compile them, too")
    args = parser.parse_args()
    if args.counts_only and args.write_baseline:
        parser.error("--write-baseline keeps compile times as well: not with --counts-only")
    names = kernel_names(is_small=args.small, containing=args.kernel)
    if not names:
        parser.error(f"--kernel {args.kernel}: none of {kernel_names(is_small=args.small)}")
    jax.config.update("jax_platforms", "cpu")
    rows, misses, regressions = (
        _kernels(
            args.only or GENERATIONS,
            names,
            path=args.baseline,
            write_baseline=args.write_baseline,
            counts_only=args.counts_only,
        )
        if args.what == "kernels"
        else _programs(args.only or [""], compiles=args.compile)
    )
    records = [asdict(row) for row in rows]
    path = result_path(f"tpu-static-{args.what}")
    found = {"known_misses": misses, "regressions": regressions}
    write_json(path, {"stamp": stamp(), "rows": records, **found})
    print(format_table(records))
    for sentence in misses:
        print(f"known miss: {sentence}")
    for sentence in regressions:
        print(f"regression: {sentence}")
    print(
        f"tpu_static {args.what}: {len(rows)} rows, {len(regressions)} regressions, "
        f"{len(misses)} known misses; {path.name}"
    )
    sys.stdout.flush()
    os._exit(exit_status(regressions, is_gate=args.gate))  # libtpu keeps threads that do not end


def exit_status(regressions: Sequence[str], *, is_gate: bool) -> int:
    """What a run exits with."""
    return 1 if is_gate and regressions else 0


def _kernels(
    generations: Sequence[str],
    names: Sequence[str],
    *,
    path: Path,
    write_baseline: bool,
    counts_only: bool,
) -> tuple[Sequence[KernelRow], list[str], list[str]]:
    baseline: Baseline = json.loads(path.read_text())
    if counts_only:
        baseline = {key: {**record, "compile_ratio": math.inf} for key, record in baseline.items()}
    with tempfile.TemporaryDirectory() as directory:
        os.environ["LIBTPU_INIT_ARGS"] = llo.dump_flags(Path(directory))
        tpu_topology.prepare_libtpu()
        rows = [
            row
            for generation in generations
            for row in measure_kernels(
                Path(directory), generation, {} if write_baseline else baseline, names
            )
        ]
    if write_baseline:
        baseline = {
            key: record
            for key, record in baseline.items()
            if not _is_of_run(key, generations, names)
        }
        baseline |= {row.key: _record(row) for row in rows}
        path.write_text(json.dumps(baseline, indent=1, sort_keys=True) + "\n")
    expected = {
        key: record for key, record in baseline.items() if _is_of_run(key, generations, names)
    }
    known, regressions = judge_kernels(rows, expected)
    return rows, known, regressions


def _record(row: KernelRow) -> dict[str, float]:
    """What the baseline keeps of a loop."""
    return {
        "bundles": row.bundles,
        "spills": row.spills,
        "compile_s": row.compile_s,
        "compile_ratio": row.compile_ratio,
    }


def _is_of_run(key: str, generations: Sequence[str], names: Sequence[str]) -> bool:
    """Whether a loop of the baseline is one of those that a run measures."""
    generation, _, loop = key.partition(": ")
    return generation in generations and loop.startswith(tuple(names))


def judge_kernels(rows: Sequence[KernelRow], baseline: Baseline) -> tuple[list[str], list[str]]:
    """Compare loops with those of the baseline.

    Returns:
        Targets that the baseline misses as well, and what is worse than it, as sentences.
    """
    known, regressions = [], []
    for row in rows:
        recorded = baseline.get(row.key)
        if recorded is None:
            regressions.append(f"{row.key}: not in the baseline; record it with --write-baseline")
            continue
        before = kernel_misses(replace(row, **recorded))
        for target, sentence in kernel_misses(row).items():
            (known if target in before else regressions).append(sentence)
        regressions += kernel_regressions(row, recorded)
    measured = {row.key for row in rows}
    regressions += [f"{key}: no longer measured" for key in baseline if key not in measured]
    return known, regressions


def kernel_misses(row: KernelRow) -> dict[str, str]:
    """What a loop fails of its targets: which target, and a sentence."""
    misses = {}
    target = TARGETS.get(row.key)
    if target is not None and row.bundles > target:
        misses["bundles"] = f"{row.key}: {row.bundles} bundles, target {target}"
    is_decode = "decode" in row.loop
    if is_decode and row.dma_bundles is not None and row.bundles > row.dma_bundles:
        misses["DMA"] = f"{row.key}: {row.bundles} bundles, its DMA takes {row.dma_bundles}"
    if row.compile_s > COMPILE_TARGET_S:
        misses["compile"] = f"{row.key}: compiled in {row.compile_s} s, target {COMPILE_TARGET_S}"
    return misses


def kernel_regressions(row: KernelRow, recorded: Mapping[str, float]) -> list[str]:
    """Where a loop is worse than it was recorded, as sentences; older records lack some figures."""
    limits = {field: REGRESSION * figure for field, figure in recorded.items()}
    if "spills" in recorded:
        limits["spills"] = max(limits["spills"], recorded["spills"] + _FREE_SPILLS)
    limits.pop("compile_s", None)  # of another machine, perhaps
    names = {"compile_ratio": "times a fixed program's time to compile"}
    return [
        f"{row.key}: {getattr(row, field)} {names.get(field, field)}, baseline {recorded[field]}"
        for field, limit in limits.items()
        if getattr(row, field) > limit
    ]


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
