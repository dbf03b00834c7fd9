"""The table of docs/reliability.md. Rows of faults that a run left out stay as they were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench import report

PAGE = report.ROOT / "docs" / "reliability.md"
BEGIN = '<a id="chaos-table"></a>\n'
END = '<a id="chaos-table-end"></a>\n'
_HEADER = """
| fault | requests | failed | wrong streams | last failure after | longest stall | whole after | \
left behind | run |
|---|---|---|---|---|---|---|---|---|
"""


def render_row(outcome: dict[str, Any], stamp: dict[str, Any]) -> str:
    """Return one fault's line."""
    errors = sorted(outcome["errors"].items())
    failed = "; ".join(f"{count} x {what}" for what, count in errors) or "0"
    recovery = f"{outcome['recovery_s']:.1f} s" if errors else "-"
    left = ", ".join(outcome["leaks"]) or "nothing"
    return (
        f"| {outcome['what']} | {outcome['num_requests']} | {failed} | {outcome['num_wrong']} "
        f"| {recovery} | {outcome['stall_s']:.1f} s | {outcome['whole_s']:.1f} s | {left} "
        f"| {stamp['utc'][:10]}, {stamp['commit']} |"
    )


def merge(
    page: str, outcomes: Sequence[dict[str, Any]], stamp: dict[str, Any], order: Sequence[str]
) -> str:
    """Return the page with the rows of a run in it.

    Args:
        page: as it was.
        outcomes: of the run.
        stamp: of the run.
        order: all faults in words; rows of others are dropped.
    """
    before, _, rest = page.partition(BEGIN)
    table, _, after = rest.partition(END)
    rows = {
        line.split("|")[1].strip(): line for line in table.splitlines() if line.startswith("| ")
    }
    rows |= {outcome["what"]: render_row(outcome, stamp) for outcome in outcomes}
    lines = "".join(f"{rows[what]}\n" for what in order if what in rows)
    return f"{before}{BEGIN}{_HEADER}{lines}\n{END}{after}"


def write_page(
    outcomes: Sequence[dict[str, Any]], stamp: dict[str, Any], order: Sequence[str]
) -> None:
    """Put a run's rows into the page."""
    PAGE.write_text(merge(PAGE.read_text(), outcomes, stamp, order))
