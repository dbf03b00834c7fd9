"""What every bench writes: a stamp of the machine and versions, JSON, a table, a plot.

matplotlib is imported only when a plot is drawn. The stamp holds no host name and no path.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
PACKAGES = ("ray", "jax", "jaxlib", "libtpu", "numpy", "transformers", "aiohttp")


def stamp() -> dict[str, Any]:
    """When and on what a bench ran."""
    return {
        "utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "cpu": _cpu_model(),
        "num_cpus": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }


def result_path(kind: str) -> Path:
    """A fresh file name for a report of `kind`; its directory is created."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    return RESULTS / f"{kind}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Write a report in one piece."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(report, indent=1) + "\n")
    partial.replace(path)


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows under the keys of the first one, right-aligned; missing values are "-"."""
    if not rows:
        return ""
    header = list(rows[0])
    cells = [header, *([_cell(row.get(key)) for key in header] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    )


def plot_sweep(path: Path, runs: Sequence[dict[str, Any]], knee: int | None) -> None:
    """Throughput, TTFT and TPOT over concurrency, and the distribution of token gaps.

    Args:
        path: PNG to write.
        runs: sweep runs of a `bench.serve` report, by concurrency.
        knee: concurrency to mark, or None.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = sorted(runs, key=lambda run: run["concurrency"])
    levels = [run["concurrency"] for run in runs]
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7.5))
    try:
        throughput, ttft, tpot, itl = axes.flat
        throughput.plot(levels, [run["summary"]["output_tokens_per_s"] for run in runs], "o-")
        throughput.set_title("output tokens/s")
        for axis, key in ((ttft, "ttft_ms"), (tpot, "tpot_ms")):
            for quantile, style in (("p50", "o-"), ("p90", "s--"), ("p99", "^:")):
                points = [(run["summary"][key] or {}).get(quantile) for run in runs]
                axis.plot(levels, [float("nan") if p is None else p for p in points], style)
            axis.legend(["p50", "p90", "p99"])
            axis.set_title(key.replace("_ms", "").upper() + ", ms")
        for axis in (throughput, ttft, tpot):
            axis.set_xscale("log", base=2)
            axis.set_xticks(levels, [str(level) for level in levels])
            axis.set_xlabel("concurrent requests")
            axis.set_ylim(bottom=0)
            if knee is not None:
                axis.axvline(knee, color="grey", linestyle="--")
                axis.annotate(
                    f" knee {knee}", (knee, 0.02), xycoords=("data", "axes fraction"), color="grey"
                )
        _plot_gaps(itl, runs)
        figure.tight_layout()
        figure.savefig(path, dpi=120)
    finally:
        pyplot.close(figure)


def plot_peers(path: Path, rows: Sequence[dict[str, Any]], names: tuple[str, str]) -> None:
    """Throughput and TTFT of two servers over concurrency, with the range over the rounds.

    Args:
        path: PNG to write.
        rows: of `bench.peers.compare`.
        names: of the servers.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4))
    try:
        titles = {"output_tokens_per_s": "output tokens/s", "ttft_p50_ms": "TTFT p50, ms"}
        for axis, (key, title) in zip(axes, titles.items(), strict=True):
            for name in names:
                points = [(row["concurrency"], row[key][name]) for row in rows if key in row]
                medians = [value["median"] for _, value in points]
                spread = [
                    [value["median"] - value["low"] for _, value in points],
                    [value["high"] - value["median"] for _, value in points],
                ]
                axis.errorbar([c for c, _ in points], medians, spread, fmt="o-", label=name)
            axis.set_title(title)
            axis.set_xscale("log", base=2)
            levels = [row["concurrency"] for row in rows]
            axis.set_xticks(levels, [str(level) for level in levels])
            axis.set_xlabel("concurrent requests")
            axis.set_ylim(bottom=0)
            axis.legend()
        figure.tight_layout()
        figure.savefig(path, dpi=120)
    finally:
        pyplot.close(figure)


def _plot_gaps(axis: Any, runs: Sequence[dict[str, Any]]) -> None:
    for run in runs:
        times = [request["event_times_s"] for request in run["requests"]]
        gaps = sorted((b - a) * 1e3 for t in times for a, b in itertools.pairwise(t))
        if gaps:
            share = [(i + 1) / len(gaps) for i in range(len(gaps))]
            axis.plot(gaps, share, label=str(run["concurrency"]))
    axis.set_title("gap between tokens, ms (share below)")
    axis.set_ylim(0, 1)
    axis.set_xlim(left=0)
    if axis.lines:
        axis.legend(title="concurrency", fontsize="small")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.1f}" if isinstance(value, float) else str(value)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Revision of the checkout, with "+" when files differ from it."""
    try:
        revision = _git("rev-parse", "--short", "HEAD")
        return revision + ("+" if _git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=10
    ).stdout.strip()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
