"""The chaos suite's own tools, without a cluster: the jumping clock, what is compared, the page."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos import page
from tests.chaos.faults import FAULTS
from tests.chaos.traffic import Answer, Traffic

CHAOS = Path(page.__file__).parent


def test_the_wall_clock_of_a_process_jumps(tmp_path: Path) -> None:
    offset = tmp_path / "clock"
    offset.write_bytes(struct.pack("d", 3600.0))
    now = subprocess.run(
        [sys.executable, "-c", "import time; print(time.time(), time.time_ns())"],
        env=os.environ
        | {"PYTHONPATH": str(CHAOS / "fake_clock"), "SYSTOLE_CHAOS_CLOCK": str(offset)},
        capture_output=True,
        check=True,
        text=True,
    ).stdout.split()
    assert float(now[0]) - time.time() == pytest.approx(3600, abs=60)
    assert int(now[1]) / 1e9 - time.time() == pytest.approx(3600, abs=60)


def test_a_missing_doubled_or_other_token_is_seen() -> None:
    traffic = Traffic("", [[1, 2, 3]])
    for tokens, error in (
        ([1, 2, 3], None),
        ([1, 2], "stream cut"),
        ([1, 2], None),
        ([1, 2, 2, 3], None),
        ([1, 3], "stream cut"),
    ):
        answer = Answer(sent_at=0.0, ended_at=5.0, tokens=tokens, error=error)
        traffic.answers.append((0, answer))
    assert traffic.num_wrong() == 3
    assert traffic.errors() == {"stream cut": 2}
    assert traffic.recovery_s(1.0) == 4.0


def test_a_run_replaces_its_own_rows_of_the_table() -> None:
    outcome = {
        "what": "kill -9",
        "num_requests": 9,
        "errors": {"HTTP 503": 2},
        "num_wrong": 0,
        "recovery_s": 1.25,
        "stall_s": 0.5,
        "whole_s": 3.0,
        "leaks": ["1 pages"],
    }
    stamp = {"utc": "2026-01-01T00:00:00", "commit": "abc"}
    text = page.PAGE.read_text()
    assert page.BEGIN in text
    assert page.END in text
    order = ["first", "kill -9"]
    empty = f"head\n{page.BEGIN}{page.END}tail\n"
    once = page.merge(empty, [outcome, outcome | {"what": "first"}], stamp, order)
    twice = page.merge(once, [outcome | {"errors": {}}], stamp, order)
    row = "| 9 | {} | 0 | {} | 0.5 s | 3.0 s | 1 pages | 2026-01-01, abc |"
    assert once.index("| first |") < once.index("| kill -9 |")
    assert "| kill -9 " + row.format("2 x HTTP 503", "1.2 s") in once
    assert "| kill -9 " + row.format("0", "-") in twice
    assert "| first " + row.format("2 x HTTP 503", "1.2 s") in twice
    assert twice.startswith("head\n")
    assert twice.endswith("tail\n")
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
