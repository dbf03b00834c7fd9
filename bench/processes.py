"""CPU time of this process and of a server's processes, from /proc (Linux only).

Finds the server by the port that it listens on: the listener, its nearest `raylet` ancestor if it
has one (else its own process tree), all descendants, and, for Ray, the processes of its session.
Only processes of the same user are looked at, and none is touched.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LISTEN = "0A"
_ZOMBIE = "Z"
_SESSION = re.compile(r"session_[0-9]{4}-[0-9_-]+")
# Title of a Ray worker: "ray::ServeReplica:<application>:<deployment>", maybe with a method behind.
_REPLICA = re.compile(r"ray::ServeReplica:[^:]*:([^\s.:#()]+)")
_ACTOR = re.compile(r"ray::([A-Za-z_]+)")


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the server.

    Attributes:
        pid: process id.
        group: what it is for, see `group_of`.
    """

    pid: int
    group: str


def group_of(title: str) -> str:
    """The role of a process from its command line.

    "replica:<deployment>" for Serve replicas, "actor:<class>" for other Ray workers, otherwise the
    program's name ("raylet", "haproxy", "python").
    """
    if match := _REPLICA.search(title):
        return f"replica:{match[1]}"
    if match := _ACTOR.match(title):
        return f"actor:{match[1]}"
    words = title.split()
    if not words:
        return "unknown"
    name = Path(words[0]).name
    script = next((Path(word).name for word in words[1:] if word.endswith(".py")), None)
    return f"{name}:{script}" if script and name.startswith("python") else name


def cpu_s(pid: int) -> float | None:
    """User and system CPU seconds of a process since its start; None when it is gone."""
    return _stat_cpu_s(_PROC / str(pid) / "stat")


def thread_cpu_s(pid: int) -> dict[str, float]:
    """CPU seconds of a process by thread name; the main thread is "main"."""
    totals: dict[str, float] = {}
    for task in _entries(_PROC / str(pid) / "task"):
        used = _stat_cpu_s(task / "stat")
        if used is None:
            continue
        name = "main" if task.name == str(pid) else _read(task / "comm").strip()
        totals[name] = totals.get(name, 0.0) + used
    return totals


def find_server(port: int) -> list[Process]:
    """Processes behind the local TCP listener on `port`; empty when it is not ours or not there."""
    listener = _listener(port)
    if listener is None:
        return []
    parents = _parents()
    root = _raylet_above(listener, parents)
    pids = _descendants(listener if root is None else root, parents) | {listener}
    if root is not None and (session := _SESSION.search(_title(root))):
        pids |= {pid for pid in parents if session[0] in _title(pid)}
    pids.discard(os.getpid())
    return [Process(pid, group_of(_title(pid))) for pid in sorted(pids)]


def match_processes(pattern: str) -> list[Process]:
    """Processes of this user whose command line matches a regular expression, but for this one."""
    regex = re.compile(pattern)
    titles = {pid: _title(pid) for pid in _parents() if pid != os.getpid()}
    return [Process(pid, group_of(t)) for pid, t in sorted(titles.items()) if regex.search(t)]


def by_pid(pids: Iterable[int]) -> list[Process]:
    """Given processes."""
    return [Process(pid, group_of(_title(pid))) for pid in pids]


def in_group(group: int) -> list[int]:
    """Living processes of a process group; zombies, which nobody may reap, are not."""
    members: list[int] = []
    for pid in _parents():
        fields = _stat_fields(_PROC / str(pid) / "stat")
        if fields and int(fields[2]) == group and fields[0] != _ZOMBIE:
            members.append(pid)
    return members


class CpuMeter:
    """CPU seconds that the server's processes and this client spend between two moments.

    A process that ends in between counts as zero; one that starts in between is not seen.
    """

    def __init__(self, processes: Iterable[Process]) -> None:
        self._processes = tuple(processes)
        self._server: dict[int, float] = {}
        self._client_s = 0.0

    def start(self) -> None:
        """Begin an interval."""
        self._server = {p.pid: used for p in self._processes if (used := cpu_s(p.pid)) is not None}
        self._client_s = sum(os.times()[:2])

    def stop(self) -> dict[str, float]:
        """CPU seconds by group since `start`, and "client"."""
        used = {"client": sum(os.times()[:2]) - self._client_s}
        for process in self._processes:
            end = cpu_s(process.pid)
            if end is not None and process.pid in self._server:
                spent = end - self._server[process.pid]
                used[process.group] = used.get(process.group, 0.0) + spent
        return {group: round(seconds, 4) for group, seconds in used.items()}


def outside_engine_us_per_token(
    cpu: dict[str, float],
    output_tokens: int,
    *,
    engine: str,
    idle_share: dict[str, float] | None = None,
    wall_s: float = 0.0,
) -> float | None:
    """Microseconds of server CPU per output token in processes other than the engine's.

    Args:
        cpu: of `CpuMeter.stop`; the client's own share is left out.
        output_tokens: tokens of the interval.
        engine: regular expression for the groups that are the engine.
        idle_share: CPU seconds per second that each group spends without any request; what it
            would have spent anyway during `wall_s` is then left out. None: everything counts.
        wall_s: duration of the interval.

    Returns:
        None when no server process or no token was seen.
    """
    server = {group: used for group, used in cpu.items() if group != "client"}
    if not server or not output_tokens:
        return None
    idle = idle_share or {}
    outside_s = sum(
        max(0.0, used - idle.get(group, 0.0) * wall_s)
        for group, used in server.items()
        if not re.search(engine, group)
    )
    return round(outside_s / output_tokens * 1e6, 2)


def _listener(port: int) -> int | None:
    inodes = {
        fields[9]
        for table in ("tcp", "tcp6")
        for line in _read(_PROC / "net" / table).splitlines()[1:]
        if (fields := line.split())[3] == _LISTEN and int(fields[1].rsplit(":", 1)[1], 16) == port
    }
    targets = {f"socket:[{inode}]" for inode in inodes}
    for pid in sorted(_parents()):
        for descriptor in _entries(_PROC / str(pid) / "fd"):
            try:
                if os.readlink(descriptor) in targets:
                    return pid
            except OSError:  # closed in between
                continue
    return None


def _parents() -> dict[int, int]:
    """Parent of each process of this user."""
    parents: dict[int, int] = {}
    for entry in _entries(_PROC):
        if not entry.name.isdecimal():
            continue
        try:
            if entry.stat().st_uid != os.getuid():
                continue
        except OSError:  # ended in between
            continue
        fields = _stat_fields(entry / "stat")
        if fields:
            parents[int(entry.name)] = int(fields[1])
    return parents


def _raylet_above(pid: int, parents: dict[int, int]) -> int | None:
    while pid in parents:
        if _read(_PROC / str(pid) / "comm").strip() == "raylet":
            return pid
        pid = parents[pid]
    return None


def _descendants(root: int, parents: dict[int, int]) -> set[int]:
    found = {root}
    while True:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        if not more:
            return found
        found |= more


def _title(pid: int) -> str:
    return _read(_PROC / str(pid) / "cmdline").replace("\0", " ").strip()


def _stat_cpu_s(stat: Path) -> float | None:
    fields = _stat_fields(stat)
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S if fields else None


def _stat_fields(stat: Path) -> list[str]:
    """Fields of a stat file from the state on: the name before may contain spaces."""
    text = _read(stat)
    return text[text.rfind(")") + 2 :].split() if text else []


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # the process is gone, or not ours
        return ""


def _entries(path: Path) -> list[Path]:
    try:
        return list(path.iterdir())
    except OSError:
        return []
