"""Sends thousands of requests that schemathesis makes from /openapi.json; none may fail with a 500.

    .venv/bin/python -m tests.clients.fuzz [--cases 20000] [--seed 0] [--limit-minutes 60]

Serves a small random model as `make serve` would: with a real engine, router and grammars, and with
short answers, so that the time goes into requests. Prints what each route answered. Ends with
status 1 if any answer was 500 or more, none came in time, or the service is not as it was before.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import report
from bench.server_process import ServerFailed, running
from bench.top import Scrape, parse
from tests.checkpoints import TINY_LLAMA, write_checkpoint
from tests.clients import service, tools
from tests.clients.tools import ROOT, ToolError
from tests.tiny_tokenizer import write_model_dir

CASES = Path(__file__).parent / "fuzz_cases.py"
IDLE_LIMIT_S = 30.0
_MAX_MODEL_LEN = 96
_HELD = (
    "systole_engine_running",
    "systole_engine_waiting",
    "systole_router_queued_requests",
    "systole_router_inflight_requests",
    "systole_token_sink_entries",
)
"""What an idle service has none of."""
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-minutes", type=float, default=60.0, help="to send cases in")
    parser.add_argument("--output", type=Path, help="write the counts and failures as JSON")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="systole-fuzz-") as name:
        directory = Path(name)
        try:
            python = tools.python_tool("schemathesis", "python")
            command = service.command(directory, _tiny_model(directory))
            with running(command, log=directory / "serve.log", directory=ROOT):
                routes = _fuzz(python, command.url, options, directory)
                problems = _left_behind(command.url)
        except (ToolError, ServerFailed, subprocess.CalledProcessError, OSError) as error:
            print(f"cannot fuzz: {error}", file=sys.stderr)
            return 1
    for route in routes:
        print(_describe(route))
        problems += [f"{route['route']}: {failure}" for failure in route["failures"]]
    total = sum(sum(route["statuses"].values()) for route in routes)
    if total < options.cases:
        problems.append(f"only {total} cases were sent")
    for problem in problems:
        print(problem, file=sys.stderr)
    took = time.monotonic() - began
    version = tools.version_of("schemathesis")
    verdict = f"{len(problems)} problems" if problems else "no 500"
    print(f"schemathesis {version}: {total} cases, {verdict} ({took:.0f} s)", flush=True)
    if options.output is not None:
        report.write_json(options.output, {"stamp": report.stamp(), "routes": routes})
    return int(bool(problems))


def _tiny_model(directory: Path) -> dict[str, Any]:
    """Write a random model, and return the arguments that serve it."""
    model = write_model_dir(directory / "tiny")
    write_checkpoint(model, TINY_LLAMA | {"vocab_size": 640, "eos_token_id": 1})
    return {
        "model": str(model),
        "engine": {
            "platform": "cpu",
            "dtype": "float32",
            "num_pages": 512,
            "max_num_seqs": 8,
            "max_model_len": _MAX_MODEL_LEN,
            "max_num_batched_tokens": 32,
            "max_mixed_tokens": 32,
            "program_store": str(ROOT / ".cache" / "programs"),
        },
        "replicas": {"num_replicas": 1},
    }


def _fuzz(
    python: Path, url: str, options: argparse.Namespace, directory: Path
) -> list[dict[str, Any]]:
    """Send the cases from schemathesis' own environment; returns a row for each route."""
    output = directory / "cases.json"
    command = [str(python), str(CASES), url, service.KEY, str(options.cases), str(options.seed)]
    command += [str(60 * options.limit_minutes), str(output)]
    subprocess.run(command, check=True, cwd=directory)
    return json.loads(output.read_text(encoding="utf-8"))


def _left_behind(url: str) -> list[str]:
    """Wait until nothing is held any more; return what still is, in words."""
    deadline = time.monotonic() + IDLE_LIMIT_S
    while True:
        scrape = _scrape(url)
        left = [f"{name} is {scrape.total(name):.0f}" for name in _HELD if scrape.total(name)]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    if compiles := scrape.total("systole_engine_compiles_after_warmup_total"):
        left.append(f"{compiles:.0f} programs were compiled")
    return left


def _scrape(url: str) -> Scrape:
    headers = {"Authorization": f"Bearer {service.KEY}"}
    request = urllib.request.Request(f"{url}/metrics", headers=headers)
    with _OPENER.open(request, timeout=30) as response:
        return parse(response.read().decode(), at_s=time.monotonic())


def _describe(route: dict[str, Any]) -> str:
    counts = ", ".join(f"{count} x {status}" for status, count in route["statuses"].items())
    return f"{route['route']:45} {counts}"


if __name__ == "__main__":
    sys.exit(main())
