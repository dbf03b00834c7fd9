"""A server that a bench starts, waits for and stops.

Owns one process group: the command runs in a session of its own, and only that group is ever
signalled. Invariant: when `running` is left, for whatever reason, no process of the group lives.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from app.launch_config import find_free
from bench import processes
from bench.report import ROOT

_POLL_S = 0.1
_PROBE_TIMEOUT_S = 5.0
_GROUP_GRACE_S = 5.0
_LOG_LINES = 15


class ServerFailed(Exception):
    """A server did not start, did not become ready, or its port was taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """How to start a server, and how to tell that it is ready.

    Attributes:
        name: for tables.
        command: as in a shell, without its syntax; leading NAME=VALUE words are environment.
        url: base URL.
        ready_url: answers 200 once requests will be served.
        start_limit_s: how long it may take to become ready.
        stop_limit_s: how long it may take to end after SIGTERM.
    """

    name: str
    command: str
    url: str
    ready_url: str
    start_limit_s: float = 300.0
    stop_limit_s: float = 60.0

    def parse(self) -> tuple[list[str], dict[str, str]]:
        """Split into words and environment.

        Raises:
            ValueError: there is no program in it, or a quote is not closed.
        """
        words = shlex.split(self.command)
        environment: dict[str, str] = {}
        while words and "=" in words[0] and words[0].split("=", 1)[0].isidentifier():
            name, value = words.pop(0).split("=", 1)
            environment[name] = value
        if not words:
            raise ValueError(f"the command of {self.name} names no program: {self.command!r}")
        return words, environment


@contextmanager
def running(server: ServerCommand, *, log: Path, directory: Path) -> Iterator[None]:
    """Start a server, wait until it is ready, and stop it afterwards.

    Args:
        server: what to start.
        log: takes its output; appended to.
        directory: its working directory.

    Raises:
        ServerFailed: it ended or was silent for too long, or its port is taken; with its last
            lines.
        ValueError: the command is not one.
    """
    words, environment = server.parse()
    if _is_listening(server.url):
        raise ServerFailed(f"something listens at {server.url} already; stop it first")
    with log.open("ab") as output:
        try:
            process = subprocess.Popen(
                words,
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=directory,
                start_new_session=True,
            )
        except OSError as error:
            raise ServerFailed(f"{server.name} does not start: {error}") from error
    try:
        _wait_until_ready(server, process, log)
        yield
    finally:
        _stop(process, server)


@contextmanager
def serving(config: str, *, log: Path) -> Iterator[str]:
    """Serve a configuration of ours on a free port of this machine, as `make serve` does.

    Args:
        config: path, relative to the checkout.
        log: takes its output.

    Returns:
        A context manager that yields the root of its API.

    Raises:
        ServerFailed: see `running`.
    """
    port = find_free()
    url = f"http://127.0.0.1:{port}"
    command = (sys.executable, "-m", "app.launch", "--config", config, "--port", str(port))
    server = ServerCommand(
        name="service", command=shlex.join(command), url=url, ready_url=f"{url}/ready"
    )
    with running(server, log=log, directory=ROOT):
        yield url


def _wait_until_ready(server: ServerCommand, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + server.start_limit_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerFailed(
                f"{server.name} ended with status {process.returncode}:\n{_tail(log)}"
            )
        if _answers(server.ready_url):
            return
        time.sleep(_POLL_S)
    raise ServerFailed(
        f"{server.name} was not ready at {server.ready_url} after {server.start_limit_s:g} s:\n"
        f"{_tail(log)}"
    )


def _stop(process: subprocess.Popen[bytes], server: ServerCommand) -> None:
    """End the process as a user would, then whatever is left of its group."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=server.stop_limit_s)
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        if not processes.in_group(process.pid):
            break
        with contextlib.suppress(ProcessLookupError):  # ended meanwhile
            os.killpg(process.pid, signal_number)
        deadline = time.monotonic() + min(_GROUP_GRACE_S, server.stop_limit_s)
        while time.monotonic() < deadline and processes.in_group(process.pid):
            time.sleep(_POLL_S)
    process.wait()
    deadline = time.monotonic() + _GROUP_GRACE_S
    while _is_listening(server.url) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _is_listening(url: str) -> bool:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        with socket.create_connection((parts.hostname or "", port), timeout=_PROBE_TIMEOUT_S):
            return True
    except OSError:
        return False


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=_PROBE_TIMEOUT_S) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
