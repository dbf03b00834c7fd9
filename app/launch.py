"""Starts a Serve config on this machine for a person at a terminal, and stops it again.

    python -m app.launch --config serve_config.yaml [--port N]

Does what `serve run` does and what a newcomer misses there: it checks the ports, keeps Ray's own
lines in a file, shows how far the start is, says when and where the service answers, and turns
SIGINT and SIGTERM into a drain that ends in time. Invariant: when it has ended, so has everything
that it started. Knows nothing of models; whatever serves /ready can be launched.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from types import FrameType

import yaml

from app.errors import ConfigError
from app.launch_config import (
    Ports,
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
LOG_TAIL_LINES = 15


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
        """Show the progress made after `elapsed_s` seconds."""
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
    return f"{text} [{bar}] {progress.done}/{progress.total}"


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
        config = read_config(arguments.config)
        host, port = http_address(config, arguments.port)
        check_host(config, host)
        check_port_free(host, port)
    except ConfigError as error:
        print(f"cannot serve: {error}", file=sys.stderr)
        return 2
    ports = choose_ports(port, is_free, find_free)
    effective = make_effective_config(
        config,
        host=host,
        ports=ports,
        is_moved=arguments.port is not None,
        # Ray bundles HAProxy for Linux only; elsewhere its Python proxy answers, more slowly.
        extra={} if sys.platform == "linux" else {"RAY_SERVE_ENABLE_HA_PROXY": "0"},
    )
    directory = Path("run") / str(port)
    directory.mkdir(parents=True, exist_ok=True)
    config_path = directory / "serve_config.yaml"
    config_path.write_text(yaml.safe_dump(effective, sort_keys=False), encoding="utf-8")
    return serve(
        config_path,
        host=host,
        ports=ports,
        log_path=directory / "serve.log",
        interrupt=interrupt,
        watch_pid=arguments.watch_pid,
    )


def check_port_free(host: str, port: int) -> None:
    """Refuse a port that something listens on.

    Raises:
        ConfigError: it is taken.
    """
    if not is_free(port, "" if host in ("0.0.0.0", "::") else host):
        raise ConfigError(
            f"port {port} on {host} is in use by another program; stop that one, or choose another "
            "port, as in: make serve PORT=8001"
        )


def serve(
    config_path: Path,
    *,
    host: str,
    ports: Ports,
    log_path: Path,
    interrupt: Interrupt,
    watch_pid: int | None,
) -> int:
    """Run the cluster process until it ends or the user wants to stop; returns the exit status."""
    adopt_orphans()
    command = [sys.executable, "-m", "app.local_cluster", str(config_path), str(ports.dashboard)]
    # Flags of Serve go into the config file, never here: they would break Serve's client.
    environment = os.environ | {
        "RAY_USAGE_STATS_ENABLED": "0",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    with log_path.open("wb") as log:
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
        return _supervise(
            cluster,
            host=host,
            ports=ports,
            log_path=log_path,
            interrupt=interrupt,
            watch_pid=watch_pid,
        )
    finally:
        stop(cluster, interrupt)


def _supervise(
    cluster: subprocess.Popen[bytes],
    *,
    host: str,
    ports: Ports,
    log_path: Path,
    interrupt: Interrupt,
    watch_pid: int | None,
) -> int:
    local_host = "127.0.0.1" if host in ("0.0.0.0", "::", "localhost") else host
    service_url = f"http://{f'[{local_host}]' if ':' in local_host else local_host}:{ports.http}"
    dashboard_url = f"http://127.0.0.1:{ports.dashboard}"
    start = time.monotonic()
    status_line = StatusLine()
    is_ready = False
    while not interrupt.count:
        if watch_pid is not None and not is_waiting(watch_pid):
            break
        if cluster.poll() is not None:
            status_line.close()
            print(f"Ray Serve has ended unexpectedly. {_tail(log_path)}", file=sys.stderr)
            return 1
        if not is_ready:
            try:
                progress = read_progress(service_url, dashboard_url)
            except StartFailed as error:
                status_line.close()
                print(f"The service cannot start: {error}", file=sys.stderr)
                print(f"Ray's log is in {log_path}", file=sys.stderr)
                return 1
            status_line.show(progress, time.monotonic() - start)
            if is_ready := progress.is_ready:
                status_line.close()
                _announce(service_url, dashboard_url, log_path, time.monotonic() - start)
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
        time.sleep(0.05)
    if cluster.poll() is None:
        cluster.kill()
    end_processes(os.getpid(), cluster.pid, grace_s=KILL_GRACE_S)
    cluster.wait()


def _announce(service_url: str, dashboard_url: str, log_path: Path, elapsed_s: float) -> None:
    serve_command = Path(sys.executable).parent / "serve"
    if serve_command.is_relative_to(Path.cwd()):
        serve_command = serve_command.relative_to(Path.cwd())
    print(f"Ready after {elapsed_s:.0f} s. Ctrl-C stops. Ray's log: {log_path}")
    print(f"  Service    {service_url}/v1")
    print(f"  Dashboard  {dashboard_url}  (token: cat {token_path()})")
    print(f"  Status     RAY_AUTH_MODE=token {serve_command} status -a {dashboard_url}", flush=True)


def _tail(log_path: Path) -> str:
    with log_path.open(encoding="utf-8", errors="replace") as log:
        lines = deque(log, maxlen=LOG_TAIL_LINES)
    return f"The end of {log_path}:\n{''.join(lines).rstrip()}"


if __name__ == "__main__":
    sys.exit(main())
