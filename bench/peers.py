"""Two servers, measured in turn on one machine: ours and a peer, or any two.

    python -m bench.peers --peer-command "vllm serve ..." --peer-url http://127.0.0.1:8100

Each round starts a server, warms it up, loads it at every concurrency and stops it again, first
one, then the other; both get the same requests. Prints medians over the rounds and their ratios,
and writes JSON and a plot. Only processes that it started are ever signalled.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import report, workloads
from bench.arguments import integer_range, integers
from bench.client import LoadClient, check_address
from bench.measurement import Objective, summarise
from bench.server_process import ServerCommand, ServerFailed, running
from bench.workloads import RequestSpec, Shape, Vocabulary

_WARMUP_SEED = 10**6
_FIGURES = ("output_tokens_per_s", "total_tokens_per_s", "ttft_p50_ms", "tpot_p50_ms")


def make_specs(a: argparse.Namespace, *, seed: int, count: int) -> tuple[RequestSpec, ...]:
    """Requests of one level; the same for the same seed, whatever the server."""
    shape = Shape(
        prompt_tokens=a.prompt_tokens, max_tokens=a.max_tokens, shared_prefix=a.shared_prefix
    )
    if a.text:
        return workloads.fixed_text(count, shape, seed=seed)
    vocabulary = Vocabulary(low=a.token_ids[0], high=a.token_ids[1])
    return workloads.fixed(count, shape, seed=seed, vocabulary=vocabulary)


async def load(a: argparse.Namespace, server: ServerCommand, *, round_index: int) -> list[Any]:
    """Warm a running server up, and measure it at every concurrency."""
    model = getattr(a, f"{server.name}_model", None) or a.model
    runs: list[dict[str, Any]] = []
    async with LoadClient(server.url, model, timeout_s=a.max_seconds) as client:
        warm = make_specs(a, seed=_WARMUP_SEED, count=max(a.concurrency) if a.warm else 1)
        await client.run_closed(warm, concurrency=len(warm), limit_s=a.max_seconds)
        for level in a.concurrency:
            count = max(a.min_requests, level * a.requests_per_stream)
            specs = make_specs(a, seed=1000 * round_index + level, count=count)
            records = await client.run_closed(specs, concurrency=level, limit_s=a.max_seconds)
            summary = summarise(records, Objective())
            runs.append({"concurrency": level, "figures": _figures(summary), "summary": summary})
    return runs


def load_by_command(
    a: argparse.Namespace, server: ServerCommand, *, round_index: int
) -> list[dict[str, Any]]:
    """Measure with another client: a command per concurrency that ends with a line of JSON.

    Raises:
        ServerFailed: the command failed, or its last line is not such an object.
    """
    model = getattr(a, f"{server.name}_model", None) or a.model or ""
    runs: list[dict[str, Any]] = []
    for level in a.concurrency:
        fields = {"url": server.url, "model": model, "concurrency": level, "round": round_index}
        words = [word.format(**fields) for word in shlex.split(a.load_command)]
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=a.max_seconds, check=False
        )
        try:
            figures = json.loads(done.stdout.strip().splitlines()[-1])
            measured = {name: float(figures[name]) for name in _FIGURES if name in figures}
            measured["output_tokens_per_s"]
        except (IndexError, ValueError, KeyError, TypeError):
            raise ServerFailed(
                f"{a.load_command!r} (status {done.returncode}) must end with a JSON object that "
                f"has output_tokens_per_s:\n{(done.stdout + done.stderr)[-500:]}"
            ) from None
        runs.append({"concurrency": level, "figures": measured})
    return runs


def measure(a: argparse.Namespace, servers: Sequence[ServerCommand], log: Path) -> list[Any]:
    """All rounds, one server at a time; a run per round, server and concurrency."""
    runs: list[dict[str, Any]] = []
    for round_index in range(a.rounds):
        for server in servers:
            print(f"round {round_index + 1}/{a.rounds}: {server.name}", file=sys.stderr, flush=True)
            with running(server, log=log, directory=report.ROOT):
                if a.load_command:
                    measured = load_by_command(a, server, round_index=round_index)
                else:
                    measured = asyncio.run(load(a, server, round_index=round_index))
            for entry in measured:
                runs.append({"round": round_index, "server": server.name, **entry})
                print(json.dumps(entry["figures"]), file=sys.stderr, flush=True)
    return runs


def _figures(summary: dict[str, Any]) -> dict[str, float]:
    """What servers are compared by, of `measurement.summarise`."""
    wall_s = summary["wall_s"]
    tokens = summary["output_tokens"] + summary["prompt_tokens"]
    figures = {
        "output_tokens_per_s": summary["output_tokens_per_s"],
        "total_tokens_per_s": round(tokens / wall_s, 3) if wall_s else 0.0,
        "failed": summary["num_failed"],
    }
    for name in ("ttft", "tpot"):
        if summary[f"{name}_ms"]:
            figures[f"{name}_p50_ms"] = summary[f"{name}_ms"]["p50"]
    return figures


def compare(runs: Sequence[dict[str, Any]], names: tuple[str, str]) -> list[dict[str, Any]]:
    """Medians over the rounds and their ratios, ours over the peer's, by concurrency.

    Returns:
        Per concurrency: {"concurrency", "failed", and per figure {name: {"median", "low", "high"}
        of each server, "ratio"}}. A figure that one of them lacks is left out.
    """
    rows: list[dict[str, Any]] = []
    for level in sorted({run["concurrency"] for run in runs}):
        at_level = [run for run in runs if run["concurrency"] == level]
        row: dict[str, Any] = {"concurrency": level}
        row["failed"] = {
            name: sum(r["figures"].get("failed", 0) for r in at_level if r["server"] == name)
            for name in names
        }
        for figure in _FIGURES:
            values = {
                name: [
                    run["figures"][figure]
                    for run in at_level
                    if run["server"] == name and figure in run["figures"]
                ]
                for name in names
            }
            if not all(values.values()):
                continue
            medians = {name: statistics.median(v) for name, v in values.items()}
            row[figure] = {
                name: {"median": medians[name], "low": min(v), "high": max(v)}
                for name, v in values.items()
            }
            first, second = (medians[name] for name in names)
            row[figure]["ratio"] = first / second if second else None
        rows.append(row)
    return rows


def table_row(row: dict[str, Any], names: tuple[str, str]) -> dict[str, Any]:
    """One line of the printed table."""
    cells: dict[str, Any] = {"conc": row["concurrency"]}
    short = {"output_tokens_per_s": "tok/s", "total_tokens_per_s": "total/s", "ttft_p50_ms": "ttft"}
    for figure, title in short.items():
        values = row.get(figure)
        for name in names:
            cells[f"{title} {name}"] = values and values[name]["median"]
        ratio = values and values["ratio"]
        cells[f"{title} ratio"] = None if ratio is None else f"{ratio:.2f}"
    cells["failed"] = sum(row["failed"].values())
    return cells


def make_servers(a: argparse.Namespace) -> tuple[ServerCommand, ServerCommand]:
    """The two servers that the arguments describe.

    Raises:
        ValueError: a command or URL is not one, or the names are equal.
    """
    servers: list[ServerCommand] = []
    for role in ("ours", "peer"):
        url = check_address(getattr(a, f"{role}_url"), allow_remote=False)
        ready = getattr(a, f"{role}_ready") or "/v1/models"
        server = ServerCommand(
            name=role,
            command=getattr(a, f"{role}_command"),
            url=url,
            ready_url=ready if "://" in ready else url + ready,
            start_limit_s=a.start_limit_s,
            stop_limit_s=a.stop_limit_s,
        )
        server.parse()
        servers.append(server)
    return servers[0], servers[1]


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--peer-command", required=True, help="starts it; NAME=VALUE words before are environment")
    add("--peer-url", default="http://127.0.0.1:8100")
    add("--peer-ready", help="URL or path that answers 200 when it is ready; default /v1/models")
    add("--peer-model", help="default: the first that it lists")
    add("--ours-command", default=f"{sys.executable} -m app.launch --port 8200")
    add("--ours-url", default="http://127.0.0.1:8200")
    add("--ours-ready", default="/ready")
    add("--ours-model", help="default: the first that it lists")
    add("--model", help="the name of both")
    add("--rounds", type=int, default=3)
    add("--concurrency", type=integers, default=[1, 4, 16, 32])
    add("--requests-per-stream", type=int, default=3)
    add("--min-requests", type=int, default=4, help="of each level")
    add("--prompt-tokens", type=int, default=100, help="words, with --text")
    add("--max-tokens", type=int, default=128)
    add("--shared-prefix", type=float, default=0.0, help="fraction of the prompt shared by all")
    add("--text", action="store_true", help="prompts of words, for servers that take no token ids")
    add(
        "--token-ids",
        type=integer_range,
        default=(1000, 30000),
        help="LOW:HIGH of prompt token ids",
    )
    add("--no-warm", dest="warm", action="store_false", help="one request of warm-up, not a batch")
    add("--load-command", help="another client; {url} {model} {concurrency} {round} are replaced")
    add("--max-seconds", type=float, default=600.0, help="per level")
    add("--start-limit-s", type=float, default=300.0)
    add("--stop-limit-s", type=float, default=60.0)
    add("--out", type=Path, help="JSON file; default: a new one under bench/results/")
    add("--no-plot", action="store_true")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and write report, log and plot; 1 if a request failed."""
    a = parse_arguments(argv)
    stamp = report.stamp()
    path: Path = a.out or report.result_path("peers")
    path.parent.mkdir(parents=True, exist_ok=True)
    names = ("ours", "peer")
    try:
        runs = measure(a, make_servers(a), path.with_suffix(".log"))
    except (ServerFailed, ValueError) as error:
        raise SystemExit(f"bench.peers: {error}") from None
    rows = compare(runs, names)
    shown = {key: str(value) for key, value in vars(a).items() if key != "out"}
    content = {"kind": "bench.peers", "stamp": stamp, "arguments": shown}
    report.write_json(path, content | {"comparison": rows, "runs": runs})
    print(report.format_table([table_row(row, names) for row in rows]))
    print(f"medians of {a.rounds} alternated rounds; report: {path}")
    if not a.no_plot:
        report.plot_peers(path.with_suffix(".png"), rows, names)
    return 1 if any(sum(row["failed"].values()) for row in rows) else 0


def _exit(signal_number: int, frame: object) -> None:
    del frame
    raise SystemExit(128 + signal_number)


if __name__ == "__main__":
    # As Ctrl-C does: a bench that is told to end stops its servers first.
    signal.signal(signal.SIGTERM, _exit)
    raise SystemExit(main())
