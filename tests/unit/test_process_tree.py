"""The launcher's processes: all of them are found and ended, and no others."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from app.process_tree import ProcessEntry, is_waiting, read_process_table, select_members

ROOT = Path(__file__).parents[2]

# A launcher with a child that has left an orphan behind, which ignores SIGTERM.
LAUNCHER = """
import json, os, subprocess, sys, time
from app.process_tree import adopt_orphans, end_processes, find_members
adopt_orphans()
script = "trap '' TERM; (trap '' TERM; while :; do sleep 0.1; done) & echo $!; exit 0"
child = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True)
orphan = int(child.stdout.readline())
child.wait()
sleeper = subprocess.Popen(["sleep", "60"], start_new_session=True)
members = find_members(os.getpid(), child.pid)
killed = end_processes(os.getpid(), child.pid, grace_s=0.5)
print(json.dumps({
    "found": {orphan, sleeper.pid} <= members,
    "killed": killed >= 1,
    "left": sorted(find_members(os.getpid(), child.pid)),
}))
"""


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in 10 s"
        time.sleep(0.02)


def test_orphans_and_stubborn_processes_are_ended_and_others_live() -> None:
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        result = subprocess.run(
            [sys.executable, "-c", LAUNCHER], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert json.loads(result.stdout) == {"found": True, "killed": True, "left": []}
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@given(st.data())
def test_members_are_the_descendants_and_the_group(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 30))
    # Process i's parent is an earlier one; 0 is the init process.
    parents = [data.draw(st.integers(0, pid - 1)) for pid in range(1, size + 1)]
    groups = [data.draw(st.integers(1, size)) for _ in range(size)]
    table = [ProcessEntry(pid, parents[pid - 1], groups[pid - 1]) for pid in range(1, size + 1)]
    launcher, group = data.draw(st.integers(1, size)), data.draw(st.integers(1, size))

    def is_below(pid: int) -> bool:
        while pid:
            if pid == launcher or groups[pid - 1] == group:
                return True
            pid = parents[pid - 1]
        return False

    expected = {pid for pid in range(1, size + 1) if is_below(pid) and pid != launcher}
    assert select_members(table, launcher=launcher, group=group) == expected


def test_the_process_table_has_this_process_and_its_child() -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as child:
        table = {entry.pid: entry for entry in read_process_table()}
        child.kill()
    assert table[os.getpid()].parent == os.getppid()
    assert table[child.pid] == ProcessEntry(child.pid, os.getpid(), child.pid)


def test_a_make_that_took_an_interrupt_no_longer_waits(tmp_path: Path) -> None:
    make = shutil.which("make")
    assert make is not None
    (tmp_path / "Makefile").write_text("all:\n\t@touch started; exec sleep 30\n")
    # Shells start what runs in the background with SIGINT ignored, and that is inherited; a signal
    # with a handler is not.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    # A session of its own: the test's end kills all of it.
    process = subprocess.Popen([make, "--silent"], cwd=tmp_path, start_new_session=True)
    signal.signal(signal.SIGINT, inherited)
    is_seen = sys.platform == "linux"  # elsewhere only the end of make is noticed
    try:
        wait_for((tmp_path / "started").exists)
        assert is_waiting(process.pid)
        process.send_signal(signal.SIGINT)
        wait_for(lambda: is_waiting(process.pid) != is_seen)
        assert process.poll() is None, "make still waits for its child, which was told nothing"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not is_waiting(process.pid)
