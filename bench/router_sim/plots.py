"""Draws a comparison: the share of requests within their targets, over the rate.

matplotlib is imported only when something is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

TARGETS = {"good_5s_100ms": "within 5 s / 100 ms", "good_2s_50ms": "within 2 s / 50 ms"}


def plot_rates(path: Path, results: Sequence[dict[str, Any]]) -> None:
    """One row per trace, one column per pair of targets, one line per policy with its spread.

    Args:
        path: PNG to write.
        results: of `experiment.repeat`, of any traces, policies and rates.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    traces = sorted({result["experiment"]["trace"] for result in results})
    figure, axes = pyplot.subplots(
        len(traces), len(TARGETS), figsize=(11, 3.5 * len(traces)), squeeze=False
    )
    try:
        for trace, row in zip(traces, axes, strict=True):
            here = [result for result in results if result["experiment"]["trace"] == trace]
            policies = list(dict.fromkeys(result["experiment"]["policy"] for result in here))
            for (key, title), axis in zip(TARGETS.items(), row, strict=True):
                for policy in policies:
                    own = [r for r in here if r["experiment"]["policy"] == policy]
                    own.sort(key=lambda result: result["experiment"]["rate"])
                    means = [result["mean"][key] for result in own]
                    spread = [
                        [r["mean"][key] - r["range"][key][0] for r in own],
                        [r["range"][key][1] - r["mean"][key] for r in own],
                    ]
                    rates = [result["experiment"]["rate"] for result in own]
                    axis.errorbar(rates, means, spread, fmt="o-", label=policy, capsize=2)
                axis.set_title(f"{trace}: {title}")
                axis.set_xlabel("requests/s")
                axis.set_ylim(0, 1.02)
            row[0].legend(fontsize="small")
        figure.tight_layout()
        figure.savefig(path, dpi=120)
    finally:
        pyplot.close(figure)
