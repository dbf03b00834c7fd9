"""Drives one running service with the clients that its users have.

    .venv/bin/python -m tests.clients [--only NAME,...] [--keep DIRECTORY]

Installs the clients below .cache/clients/ (about 2 GB, the first time), serves the default model as
`make serve` does, on a port and with a key of its own, and prints one line for each suite. Ends
with status 1 if any of them failed.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.server_process import ServerFailed, running
from tests.clients import service
from tests.clients.suites import SUITES, SuiteFailed, Target
from tests.clients.tools import ROOT, ToolError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("--only", help="names of suites, with commas between them")
    parser.add_argument("--keep", type=Path, help="directory for logs and results")
    options = parser.parse_args(arguments)
    names = options.only.split(",") if options.only else [suite.name for suite in SUITES]
    if unknown := set(names) - {suite.name for suite in SUITES}:
        parser.error(f"no such suite: {', '.join(sorted(unknown))}")
    chosen = [suite for suite in SUITES if suite.name in names]
    with ExitStack() as stack:
        directory = options.keep
        if directory is None:
            temporary = tempfile.TemporaryDirectory(prefix="systole-clients-")
            directory = Path(stack.enter_context(temporary))
        directory = directory.resolve()
        directory.mkdir(parents=True, exist_ok=True)
        try:
            for suite in chosen:
                suite.install()
            served = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            model_dir = service.with_tools(service.read_model(), served)
            command = service.command(directory, {"model": str(model_dir)})
            print(f"Serving {model_dir.name} at {command.url}", flush=True)
            stack.enter_context(running(command, log=directory / "serve.log", directory=ROOT))
        except (ToolError, ServerFailed) as error:
            print(f"cannot run the suites: {error}", file=sys.stderr)
            return 1
        target = Target(command.url, service.KEY, model_dir.name, model_dir, directory)
        failed = 0
        for suite in chosen:
            began = time.monotonic()
            try:
                line, word = suite.run(target), "ok"
            except SuiteFailed as error:
                line, word = str(error), "FAILED"
                failed += 1
            print(f"{word:6} {suite.name:8} {line} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} suites passed", flush=True)
    return int(failed > 0)


def _end(signal_number: int, _frame: object) -> None:
    """Leave as by Ctrl-C, so that the service is stopped."""
    signal.signal(signal_number, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # the service has been stopped on the way here
        sys.exit(130)
