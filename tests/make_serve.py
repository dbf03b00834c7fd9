"""`make serve` in a process of its own, as a user starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
START_TIMEOUT_S = 240


class MakeServe:
    """A running `make serve PORT=...` and what it printed."""

    def __init__(self, *arguments: str, port: int) -> None:
        # As at a user's terminal: without what a make that runs these tests passes on.
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
        self.port = port
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            ["make", "serve", f"PORT={port}", *arguments],
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not any(line.startswith("  Status") for line in self.lines):
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.1)

    def wait_until_refused(self) -> None:
        """Wait until make has failed by itself."""
        try:
            assert self.process.wait(timeout=START_TIMEOUT_S) != 0
        finally:
            self.end()

    def stop(self, signal_number: signal.Signals) -> float:
        """Send make (only) a signal; return the seconds until it ended."""
        start = time.monotonic()
        self.process.send_signal(signal_number)
        self.process.wait(timeout=60)
        self._reader.join()
        return time.monotonic() - start

    def end(self) -> None:
        if self.process.poll() is None:
            self.stop(signal.SIGTERM)
        self._reader.join()

    def printed(self, label: str) -> str:
        """What the start's last lines say after a label."""
        matches = [line for line in self.lines if line.startswith(f"  {label}")]
        assert len(matches) == 1, self.output
        return matches[0].removeprefix(f"  {label}").strip()

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a printed command in a second terminal."""
        environment = self.environment | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        return subprocess.run(
            command,
            shell=True,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
