"""The table of docs/reliability.md."""

from __future__ import annotations

from typing import Any

from bench import report

PAGE = report.ROOT / "docs" / "reliability.md"
BEGIN = '<a id="chaos-table"></a>\n'
END = '<a id="chaos-table-end"></a>\n'


def render(outcomes: list[dict[str, Any]], stamp: dict[str, Any]) -> str:
    """Return the table in Markdown."""
    lines = [
        f"Run of {stamp['utc'][:10]} by `make chaos`: {stamp['num_cpus']} cores, shared with other "
        "work.",
        "",
        "| fault | requests | failed | wrong streams | last failure after | longest stall "
        "| whole after | left behind |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for o in outcomes:
        failed = "; ".join(f"{n} x {what}" for what, n in sorted(o["errors"].items())) or "0"
        recovery = f"{o['recovery_s']:.1f} s" if o["errors"] else "-"
        left = ", ".join(o["leaks"]) or "nothing"
        lines.append(
            f"| {o['what']} | {o['num_requests']} | {failed} | {o['num_wrong']} | {recovery} "
            f"| {o['stall_s']:.1f} s | {o['whole_s']:.1f} s | {left} |"
        )
    return "\n".join(lines) + "\n"


def write_page(outcomes: list[dict[str, Any]], stamp: dict[str, Any]) -> None:
    """Put the table in its place."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + "\n" + render(outcomes, stamp) + "\n" + END + after)
