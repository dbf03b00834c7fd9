"""Starts a Serve config on this machine for a person at a terminal, and stops it again.

    python -m app.launch --config serve_config.yaml [--port N]

Does what `serve run` does and what a newcomer misses there: it checks the ports, keeps Ray's own
lines in a file, shows how far the start is, says when and where the service answers, and turns
SIGINT and SIGTERM into a drain that ends in time. Invariant: when it has ended, so has everything
that it started. Knows nothing of models; whatever serves /ready can be launched.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import yaml

from app.errors import ConfigError
from app.launch_config import (
    check_host,
    choose_ports,
    find_free,
    http_address,
    is_free,
    make_effective_config,
    read_config,
)
from app.process_tree import adopt_orphans, end_processes, is_waiting
from app.readiness import Progress, StartFailed, read_progress, token_path

# A stop takes at most the sum of the two: what has not drained by then is cut off.
DRAIN_S = 11.0
KILL_GRACE_S = 1.0
POLL_S = 0.3
STOP_POLL_S = 0.05
LOG_TAIL_LINES = 15
BYTES_FROM = 1_000_000  # no stage but one that counts bytes has so many units
ALL_INTERFACES = ("0.0.0.0", "::")


class Interrupt:
    """Remembers that the user wants to stop; a second request means at once."""

    def __init__(self) -> None:
        self.count = 0

    def install(self) -> None:
        """Take SIGINT, SIGTERM and SIGHUP over."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._handle)

    def _handle(self, _signal_number: int, _frame: FrameType | None) -> None:
        self.count += 1


class StatusLine:
    """The start's progress: one line that is rewritten on a terminal, else a line per stage."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._last = ""

    def show(self, progress: Progress, elapsed_s: float) -> None:
        """Show the progress made after `elapsed_s` seconds.

        Where nothing answers, the line stays as it is: the server may just be busy.
        """
        if not progress.stage:
            if self._last:
                return
            progress = Progress(is_ready=False, stage="starting Ray")
        if self._is_terminal:
            print(f"\r\x1b[K{describe(progress)} ({elapsed_s:.0f} s)", end="", flush=True)
        elif progress.stage != self._last:
            print(f"{describe(progress)} ({elapsed_s:.0f} s)", flush=True)
        self._last = progress.stage

    def close(self) -> None:
        """Leave the terminal at the start of an empty line."""
        if self._is_terminal and self._last:
            print("\r\x1b[K", end="", flush=True)
        self._last = ""


def describe(progress: Progress) -> str:
    """Put a progress into words: the stage, and how much of it is done where that is known."""
    text = progress.stage[:1].upper() + progress.stage[1:]
    if progress.total <= 0:
        return f"{text} ..."
    filled = 20 * min(progress.done, progress.total) // progress.total
    bar = "#" * filled + "-" * (20 - filled)
    if progress.total < BYTES_FROM:
        return f"{text} [{bar}] {progress.done}/{progress.total}"
    return f"{text} [{bar}] {progress.done / 1e6:.0f}/{progress.total / 1e6:.0f} MB"


@dataclass(frozen=True, slots=True)
class Launch:
    """What is launched, and where people find it.

    Attributes:
        config_path: the Serve config that is deployed.
        log_path: where the lines of Ray and Serve go.
        service_url: root of the HTTP API, as seen from this machine.
        dashboard_port: port of Ray's dashboard.
        needs_key: clients must send an API key.
        watch_pid: process whose end or interruption stops the service, or None.
    """

    config_path: Path
    log_path: Path
    service_url: str
    dashboard_port: int
    needs_key: bool
    watch_pid: int | None

    @property
    def dashboard_url(self) -> str:
        """Root of Ray's dashboard and REST API."""
        return f"http://127.0.0.1:{self.dashboard_port}"


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Serve a config file on this machine.")
    parser.add_argument("--config", type=Path, default=Path("serve_config.yaml"))
    parser.add_argument("--port", type=int, help="HTTP port, instead of the config file's")
    parser.add_argument("--watch-pid", type=int, help="stop when this process (make) is stopped")
    arguments = parser.parse_args()
    interrupt = Interrupt()
    interrupt.install()
    try:
        launch = prepare(arguments.config, port=arguments.port, watch_pid=arguments.watch_pid)
    except ConfigError as error:
        print(f"cannot serve: {error}", file=sys.stderr)
        return 2
    return serve(launch, interrupt)


def prepare(path: Path, *, port: int | None, watch_pid: int | None) -> Launch:
    """Check the config file and the ports, and write the config that is deployed to run/PORT/.

    Raises:
        ConfigError: the file cannot be served here.
    """
    config = read_config(path)
    host, http_port = http_address(config, port)
    needs_key = check_host(config, host)
    if not is_free(http_port, "" if host in ALL_INTERFACES else host):
        raise ConfigError(
            f"port {http_port} on {host} is in use by another program; stop that one, or choose "
            "another port, as in: make serve PORT=8001"
        )
    ports = choose_ports(http_port, is_free, find_free)
    effective = make_effective_config(
        config,
        host=host,
        ports=ports,
        is_moved=port is not None,
        # Ray bundles HAProxy for Linux only; elsewhere its Python proxy answers, more slowly.
        extra={} if sys.platform == "linux" else {"RAY_SERVE_ENABLE_HA_PROXY": "0"},
    )
    directory = Path("run") / str(http_port)
    directory.mkdir(parents=True, exist_ok=True)
    config_path = directory / "serve_config.yaml"
    config_path.write_text(yaml.safe_dump(effective, sort_keys=False), encoding="utf-8")
    local_host = "127.0.0.1" if host in ALL_INTERFACES else host
    bracketed = f"[{local_host}]" if ":" in local_host else local_host
    return Launch(
        config_path=config_path,
        log_path=directory / "serve.log",
        service_url=f"http://{bracketed}:{http_port}",
        dashboard_port=ports.dashboard,
        needs_key=needs_key,
        watch_pid=watch_pid,
    )


_RAY_DEFAULTS = {
    # Ray's own niceness of 15 would make the service wait for everything else on the machine.
    "RAY_worker_niceness": "0",
    # What follows saves 3% of a core that an idle cluster would spend: spare workers for tasks that
    # nobody runs, and a look at every log file twice a second.
    "RAY_num_workers_soft_limit": "0",
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",
    "LOG_NAME_UPDATE_INTERVAL_S": "5",
}


def serve(launch: Launch, interrupt: Interrupt) -> int:
    """Run the cluster process until it ends or the user wants to stop; returns the exit status."""
    adopt_orphans()
    command = [sys.executable, "-m", "app.local_cluster"]
    command += [str(launch.config_path), str(launch.dashboard_port)]
    # Flags of Serve go into the config file, never here: they would break Serve's client.
    environment = (
        _RAY_DEFAULTS
        | os.environ
        | {
            "RAY_USAGE_STATS_ENABLED": "0",
            "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
            "PYTHONUNBUFFERED": "1",
        }
    )
    with launch.log_path.open("wb") as log:
        # A session of its own: Ctrl-C must reach this process only, which then drains that one.
        cluster = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        return _supervise(cluster, launch, interrupt)
    finally:
        stop(cluster, interrupt)


def _supervise(cluster: subprocess.Popen[bytes], launch: Launch, interrupt: Interrupt) -> int:
    start = time.monotonic()
    status_line = StatusLine()
    is_ready = False
    while not interrupt.count:
        if launch.watch_pid is not None and not is_waiting(launch.watch_pid):
            break
        if cluster.poll() is not None:
            status_line.close()
            print(f"Ray Serve has ended unexpectedly. {_tail(launch.log_path)}", file=sys.stderr)
            return 1
        if not is_ready:
            try:
                progress = read_progress(launch.service_url, launch.dashboard_url)
            except StartFailed as error:
                status_line.close()
                print(f"The service cannot start: {error}", file=sys.stderr)
                print(f"Ray's log is in {launch.log_path}", file=sys.stderr)
                return 1
            elapsed_s = time.monotonic() - start
            status_line.show(progress, elapsed_s)
            if is_ready := progress.is_ready:
                status_line.close()
                print(f"Ready after {elapsed_s:.0f} s. Ctrl-C stops. Ray's log: {launch.log_path}")
                print(describe_access(launch, progress.model), flush=True)
        time.sleep(POLL_S)
    status_line.close()
    print("Stopping: waiting for running requests (again to stop at once)", flush=True)
    return 0


def stop(cluster: subprocess.Popen[bytes], interrupt: Interrupt) -> None:
    """Drain the cluster process, then end whatever is left of all that was started."""
    num_requests = max(interrupt.count, 1)
    deadline = time.monotonic() + DRAIN_S
    if cluster.poll() is None:
        cluster.send_signal(signal.SIGINT)
    while cluster.poll() is None and time.monotonic() < deadline:
        if interrupt.count > num_requests:
            break
        time.sleep(STOP_POLL_S)
    if cluster.poll() is None:
        cluster.kill()
    end_processes(os.getpid(), cluster.pid, grace_s=KILL_GRACE_S)
    cluster.wait()


def describe_access(launch: Launch, model: str) -> str:
    """Say where the service is, with a command to try it, and how to look at the cluster."""
    key = ' -H "Authorization: Bearer $API_KEY"' if launch.needs_key else ""
    body = json.dumps({"model": model, "prompt": "The capital of France is", "max_tokens": 16})
    status_command = Path(sys.executable).parent / "serve"
    if status_command.is_relative_to(Path.cwd()):
        status_command = status_command.relative_to(Path.cwd())
    lines = [f"  URL        {launch.service_url}/v1"]
    if model:
        url = f"{launch.service_url}/v1/completions"
        lines.append(
            f"  Try        curl {url} -H 'Content-Type: application/json'{key} -d '{body}'"
        )
    lines += [
        f"  Dashboard  {launch.dashboard_url}  (token: cat {token_path()})",
        f"  Status     RAY_AUTH_MODE=token {status_command} status -a {launch.dashboard_url}",
    ]
    return "\n".join(lines)


def _tail(log_path: Path) -> str:
    with log_path.open(encoding="utf-8", errors="replace") as log:
        lines = deque(log, maxlen=LOG_TAIL_LINES)
    return f"The end of {log_path}:\n{''.join(lines).rstrip()}"


if __name__ == "__main__":
    sys.exit(main())
