"""Finds and ends the processes that one launcher started, and no others.

Ray starts some twenty processes, and HAProxy's survive a killed parent. On Linux the launcher
therefore adopts its orphaned descendants (PR_SET_CHILD_SUBREAPER), so that everything it started
stays below it; elsewhere the process group of its child stands in. Nothing is found by name.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_POLL_S = 0.05
_KILL_S = 2.0  # a killed process frees its memory before it is gone


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """One row of the process table: ids of the process, its parent and its group."""

    pid: int
    parent: int
    group: int


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent dies; does nothing but on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def find_members(launcher: int, group: int) -> set[int]:
    """Find the live processes below `launcher` or in process group `group`, without `launcher`."""
    return select_members(read_process_table(), launcher=launcher, group=group)


def select_members(table: Iterable[ProcessEntry], *, launcher: int, group: int) -> set[int]:
    """Select from a process table what `find_members` describes. Linear in the table's size."""
    entries = list(table)
    children: dict[int, list[int]] = {}
    for entry in entries:
        children.setdefault(entry.parent, []).append(entry.pid)
    members = {entry.pid for entry in entries if entry.group == group}
    pending = [launcher, *members]
    while pending:
        for pid in children.get(pending.pop(), []):
            if pid not in members:
                members.add(pid)
                pending.append(pid)
    return members - {launcher}


def end_processes(launcher: int, group: int, *, grace_s: float) -> int:
    """Ask all members to end, and kill those that are left after `grace_s` seconds.

    Returns:
        How many had to be killed.
    """
    _signal_all(find_members(launcher, group), signal.SIGTERM)
    if not (members := _wait_for_end(launcher, group, timeout_s=grace_s)):
        return 0
    _signal_all(members, signal.SIGKILL)
    _wait_for_end(launcher, group, timeout_s=_KILL_S)
    return len(members)


def _wait_for_end(launcher: int, group: int, *, timeout_s: float) -> set[int]:
    """Wait until no member is left, at most `timeout_s` seconds; return those that are."""
    deadline = time.monotonic() + timeout_s
    while (members := find_members(launcher, group)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return members


def _signal_all(pids: Iterable[int], signal_number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal_number)
        except ProcessLookupError:
            continue


def read_process_table() -> list[ProcessEntry]:
    """List all live processes; those that have ended and wait for their parent are left out."""
    if sys.platform == "linux":
        return [entry for path in Path("/proc").glob("[0-9]*") if (entry := _read_stat(path))]
    columns = ["ps", "-axo", "pid=,ppid=,pgid=,stat="]
    rows = subprocess.run(columns, capture_output=True, text=True, check=True).stdout.splitlines()
    fields = [row.split() for row in rows]
    return [
        ProcessEntry(int(pid), int(parent), int(group))
        for pid, parent, group, state in fields
        if not state.startswith("Z")
    ]


def _read_stat(directory: Path) -> ProcessEntry | None:
    try:
        stat = (directory / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None  # it ended meanwhile
    # The second field, the name in parentheses, may itself hold spaces and parentheses.
    state, parent, group = stat.rpartition(")")[2].split()[:3]
    if state in "ZX":
        return None
    return ProcessEntry(int(directory.name), int(parent), int(group))


def is_waiting(pid: int) -> bool:
    """Tell whether `make`, process `pid`, still waits for us in earnest.

    GNU make passes SIGTERM on to its children but not SIGINT (a terminal sends that to the whole
    group): after `kill -INT` it only waits on, with the signal's handler reset. On Linux that
    reset can be seen, so the interrupt reaches us all the same.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True  # no such file system
    masks = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    interrupt_bit = 1 << (signal.SIGINT - 1)
    handled = int(masks.get("SigCgt", "0"), 16) | int(masks.get("SigIgn", "0"), 16)
    return bool(handled & interrupt_bit)
