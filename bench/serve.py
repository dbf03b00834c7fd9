"""Load test of an OpenAI-compatible server: `python -m bench.serve [URL] [--model NAME]`.

Modes, any of them in one run (`--mode sweep,burst,...`):
  sweep      closed loop at each --concurrency; marks the knee
  poisson    open loop at --rate requests/s
  trace      open loop, replays --trace
  burst      --burst requests at once
  staggered  --streams requests, started evenly over --stagger-s
  beside     a --long-prompt beside --beside-streams running streams: the longest gap that they see

Prints a table; writes JSON with every request, and a plot of the sweep. Loopback addresses only,
unless --allow-remote. Bounded: --max-requests per run, --max-seconds per run.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import processes, report, workloads
from bench.arguments import integer_range, integers
from bench.client import LoadClient, check_address
from bench.measurement import (
    Objective,
    RequestRecord,
    find_knee,
    longest_stall,
    summarise,
)
from bench.workloads import RequestSpec, Shape, Vocabulary

MODES = ("sweep", "poisson", "trace", "burst", "staggered", "beside")
SETTLE_EVENTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One invocation: where to send, what, and how to account for it."""

    client: LoadClient
    arguments: argparse.Namespace
    processes: list[processes.Process]
    idle_share: dict[str, float]
    objective: Objective
    vocabulary: Vocabulary

    @property
    def shape(self) -> Shape:
        """Lengths of synthetic requests."""
        a = self.arguments
        return Shape(
            prompt_tokens=a.prompt_tokens, max_tokens=a.max_tokens, shared_prefix=a.shared_prefix
        )

    def fixed(self, count: int, *, seed: int, interval_s: float = 0.0) -> tuple[RequestSpec, ...]:
        """Equal requests, no more than allowed."""
        count = min(count, self.arguments.max_requests)
        return workloads.fixed(
            count, self.shape, seed=seed, interval_s=interval_s, vocabulary=self.vocabulary
        )

    async def measure(
        self, labels: dict[str, Any], run: Callable[[], Awaitable[list[RequestRecord]]]
    ) -> dict[str, Any]:
        """Run once with CPU accounting around it."""
        meter = processes.CpuMeter(self.processes)
        meter.start()
        begin_s = time.perf_counter()
        records = await run()
        cpu, wall_s = meter.stop(), time.perf_counter() - begin_s
        summary = summarise(records, self.objective)
        tokens = summary["output_tokens"]
        summary["cpu_s"] = cpu
        summary["client_cpu_us_per_token"] = (
            round(cpu["client"] / tokens * 1e6, 2) if tokens else None
        )
        summary["cpu_outside_engine_us_per_token"] = processes.outside_engine_us_per_token(
            cpu, tokens, engine=self.arguments.engine_match
        )
        summary["cpu_outside_engine_above_idle_us_per_token"] = (
            processes.outside_engine_us_per_token(
                cpu,
                tokens,
                engine=self.arguments.engine_match,
                idle_share=self.idle_share,
                wall_s=wall_s,
            )
        )
        return {**labels, "summary": summary, "requests": [r.to_json() for r in records]}


async def sweep(bench: Bench) -> list[dict[str, Any]]:
    a = bench.arguments
    runs: list[dict[str, Any]] = []
    for repeat in range(a.repeats):
        for level in a.concurrency:
            # A seed of its own: no level finds the prompts of another in the prefix cache.
            specs = bench.fixed(
                max(level * a.requests_per_stream, a.min_requests),
                seed=a.seed + 1000 * repeat + level,
            )
            runs.append(
                await bench.measure(
                    {"mode": "sweep", "concurrency": level, "repeat": repeat},
                    lambda specs=specs, level=level: bench.client.run_closed(
                        specs, concurrency=level, limit_s=a.max_seconds
                    ),
                )
            )
            _progress(runs[-1])
    return runs


async def poisson(bench: Bench) -> list[dict[str, Any]]:
    a = bench.arguments
    specs = workloads.poisson(
        min(a.requests, a.max_requests),
        bench.shape,
        rate=a.rate,
        seed=a.seed + 100_001,
        vocabulary=bench.vocabulary,
    )
    return [await _open_run(bench, {"mode": "poisson", "rate": a.rate}, specs)]


async def trace(bench: Bench) -> list[dict[str, Any]]:
    a = bench.arguments
    specs = workloads.trace(
        a.trace,
        count=min(a.requests, a.max_requests),
        seed=a.seed + 100_002,
        speed=a.speed,
        length_scale=a.length_scale,
        max_prompt_tokens=a.max_prompt_tokens,
        max_output_tokens=a.max_output_tokens,
        vocabulary=bench.vocabulary,
    )
    labels = {"mode": "trace", "trace": a.trace, "speed": a.speed, "length_scale": a.length_scale}
    return [await _open_run(bench, labels, specs)]


async def burst(bench: Bench) -> list[dict[str, Any]]:
    specs = bench.fixed(bench.arguments.burst, seed=bench.arguments.seed + 100_003)
    return [await _open_run(bench, {"mode": "burst", "burst": len(specs)}, specs)]


async def staggered(bench: Bench) -> list[dict[str, Any]]:
    a = bench.arguments
    specs = bench.fixed(a.streams, seed=a.seed + 100_004, interval_s=a.stagger_s / a.streams)
    labels = {"mode": "staggered", "streams": len(specs), "stagger_s": a.stagger_s}
    return [await _open_run(bench, labels, specs)]


async def beside(bench: Bench) -> list[dict[str, Any]]:
    a = bench.arguments
    streams = workloads.fixed(
        a.beside_streams,
        Shape(prompt_tokens=a.prompt_tokens, max_tokens=a.beside_max_tokens),
        seed=a.seed + 100_005,
        vocabulary=bench.vocabulary,
    )
    (intruder,) = workloads.fixed(
        1,
        Shape(prompt_tokens=a.long_prompt, max_tokens=8),
        seed=a.seed + 100_006,
        vocabulary=bench.vocabulary,
    )
    late: RequestRecord | None = None

    async def run() -> list[RequestRecord]:
        nonlocal late
        records, late = await bench.client.run_beside(
            streams, intruder, settle_events=SETTLE_EVENTS, limit_s=a.max_seconds
        )
        return records

    result = await bench.measure(
        {"mode": "beside", "streams": a.beside_streams, "long_prompt": a.long_prompt}, run
    )
    assert late is not None
    result["intruder"] = late.to_json()
    if late.is_ok:
        first_s = late.event_times_s[0]
        records = [_record(request) for request in result["requests"]]
        result["stall"] = longest_stall(records, start_s=late.sent_s, end_s=first_s)
        result["intruder_ttft_ms"] = round(late.ttft_s * 1e3, 3)
        # Streams that ended early saw only part of the prefill: ask for more --beside-max-tokens.
        result["streams_running_at_first_token"] = sum(
            bool(r.event_times_s) and r.event_times_s[-1] > first_s for r in records
        )
    _progress(result)
    return [result]


async def _open_run(
    bench: Bench, labels: dict[str, Any], specs: Sequence[RequestSpec]
) -> dict[str, Any]:
    limit_s = bench.arguments.max_seconds
    result = await bench.measure(labels, lambda: bench.client.run_open(specs, limit_s=limit_s))
    _progress(result)
    return result


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All modes asked for, one after the other; the report."""
    base_url = check_address(arguments.url, allow_remote=arguments.allow_remote)
    key = arguments.api_key_file.read_text().strip() if arguments.api_key_file else None
    stamp = report.stamp()
    async with LoadClient(
        base_url, arguments.model, api_key=key, timeout_s=arguments.max_seconds
    ) as client:
        server_processes = _server_processes(arguments, base_url)
        bench = Bench(
            client=client,
            arguments=arguments,
            processes=server_processes,
            idle_share=await _idle_share(server_processes, arguments.idle_s),
            objective=Objective(
                ttft_s=arguments.slo_ttft_ms / 1e3, tpot_s=arguments.slo_tpot_ms / 1e3
            ),
            vocabulary=Vocabulary(low=arguments.token_ids[0], high=arguments.token_ids[1]),
        )
        await _warm_up(bench)
        runs: list[dict[str, Any]] = []
        for mode in arguments.mode:
            runs.extend(await _MODE_FUNCTIONS[mode](bench))
        server = {
            "version": await client.get_json("/version"),
            "models": await client.get_json("/v1/models"),
            "compiles_after_warmup": _compiles(await client.get_text("/metrics")),
        }
        model = client.model
    shown = {k: v for k, v in vars(arguments).items() if k not in ("api_key_file", "url", "out")}
    return {
        "kind": "bench.serve",
        "stamp": stamp,
        "model": model,
        "arguments": shown,
        "server": server,
        "server_processes": sorted({process.group for process in bench.processes}),
        "server_idle_cpu_share": bench.idle_share,
        "knee": find_knee(_points(runs)),
        "runs": runs,
    }


_MODE_FUNCTIONS: dict[str, Callable[[Bench], Awaitable[list[dict[str, Any]]]]] = {
    "sweep": sweep,
    "poisson": poisson,
    "trace": trace,
    "burst": burst,
    "staggered": staggered,
    "beside": beside,
}


async def _warm_up(bench: Bench) -> None:
    """A few requests outside the measurement; the first failure ends the bench with its reason."""
    a = bench.arguments
    specs = bench.fixed(a.warmup, seed=a.seed + 100_007)
    records = await bench.client.run_closed(specs, concurrency=1, limit_s=a.max_seconds)
    for record in records:
        if not record.is_ok:
            raise SystemExit(f"the server does not answer as it should: {record.error}")


def _server_processes(arguments: argparse.Namespace, base_url: str) -> list[processes.Process]:
    if arguments.server_pids:
        return processes.by_pid(arguments.server_pids)
    if arguments.server_match:
        return processes.match_processes(arguments.server_match)
    authority = base_url.split("://", 1)[1].split("/", 1)[0]
    port = authority.rpartition(":")[2]
    return processes.find_server(int(port)) if port.isdecimal() else []


async def _idle_share(server: list[processes.Process], seconds: float) -> dict[str, float]:
    """CPU seconds per second of each group while nobody asks: Ray's own background work."""
    if not server or seconds <= 0:
        return {}
    meter = processes.CpuMeter(server)
    meter.start()
    await asyncio.sleep(seconds)
    return {group: round(used / seconds, 5) for group, used in meter.stop().items()}


def _compiles(metrics: str) -> float | None:
    """Sum of the counter of compiles after warm-up, None when the server does not expose it."""
    values = [
        float(line.rsplit(" ", 1)[1])
        for line in metrics.splitlines()
        if "compiles_after_warmup" in line and not line.startswith("#")
    ]
    return sum(values) if values else None


def _points(runs: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    """(concurrency, best throughput of the repeats) of the sweep."""
    best: dict[int, float] = {}
    for entry in runs:
        if entry["mode"] == "sweep" and entry["summary"]["num_ok"]:
            level, rate = entry["concurrency"], entry["summary"]["output_tokens_per_s"]
            best[level] = max(rate, best.get(level, 0.0))
    return sorted(best.items())


def _record(data: dict[str, Any]) -> RequestRecord:
    return RequestRecord(**data)


def table_row(entry: dict[str, Any]) -> dict[str, Any]:
    """One line of the printed table."""
    summary = entry["summary"]

    def quantile(key: str, name: str) -> float | None:
        return (summary[key] or {}).get(name)

    return {
        "mode": entry["mode"],
        "conc": entry.get("concurrency") or entry.get("streams") or entry.get("burst"),
        "ok": summary["num_ok"],
        "err": summary["num_failed"],
        "tok/s": summary["output_tokens_per_s"],
        "req/s": summary["requests_per_s"],
        "ttft p50": quantile("ttft_ms", "p50"),
        "ttft p99": quantile("ttft_ms", "p99"),
        "tpot p50": quantile("tpot_ms", "p50"),
        "tpot p99": quantile("tpot_ms", "p99"),
        "itl p99": quantile("itl_ms", "p99"),
        "goodput": summary["goodput_requests_per_s"],
        "cached": summary["cached_prompt_tokens"],
        "outside us/tok": summary["cpu_outside_engine_us_per_token"],
        "above idle": summary["cpu_outside_engine_above_idle_us_per_token"],
        "client us/tok": summary["client_cpu_us_per_token"],
    }


def _progress(entry: dict[str, Any]) -> None:
    summary = entry["summary"]
    label = " ".join(f"{k}={v}" for k, v in entry.items() if isinstance(v, int | float | str))
    line = f"{label}: {summary['num_ok']} ok, {summary['num_failed']} failed, "
    print(f"{line}{summary['output_tokens_per_s']:.1f} tok/s", file=sys.stderr, flush=True)
    for error, count in summary["errors"].items():
        print(f"  {count} x {error}", file=sys.stderr, flush=True)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("url", nargs="?", default="http://127.0.0.1:8000", help="default: %(default)s")
    add("--model", help="default: the first that the server lists")
    add("--mode", type=_modes, default=["sweep"], help=f"comma-separated: {', '.join(MODES)}")
    add("--prompt-tokens", type=int, default=128)
    add("--max-tokens", type=int, default=128, help="output tokens of each request")
    add("--shared-prefix", type=float, default=0.0, help="fraction of the prompt shared by all")
    add(
        "--token-ids",
        type=integer_range,
        default=(1000, 30000),
        help="LOW:HIGH of prompt token ids",
    )
    add("--seed", type=int, default=0, help="a prompt sent before may hit the prefix cache")
    add("--concurrency", type=integers, default=[1, 2, 4, 8, 16, 32, 64])
    add("--requests-per-stream", type=int, default=4, help="sweep: requests = this x concurrency")
    add("--min-requests", type=int, default=8, help="sweep: at least as many per level")
    add("--repeats", type=int, default=1, help="sweep: times over all levels")
    add("--requests", type=int, default=64, help="poisson, trace")
    add("--rate", type=float, default=1.0, help="poisson: requests/s")
    add("--trace", choices=sorted(workloads.TRACE_FILES), default="azure-conv")
    add("--speed", type=float, default=1.0, help="trace: > 1 is faster")
    add("--length-scale", type=float, default=1.0, help="trace: multiplies all lengths")
    add("--max-prompt-tokens", type=int, default=4096, help="trace: longer prompts are cut")
    add("--max-output-tokens", type=int, default=512, help="trace: longer outputs are cut")
    add("--burst", type=int, default=128)
    add("--streams", type=int, default=32, help="staggered")
    add("--stagger-s", type=float, default=8.0, help="staggered: seconds over which they start")
    add("--long-prompt", type=int, default=4000, help="beside: tokens of the long prompt")
    add("--beside-streams", type=int, default=8)
    add("--beside-max-tokens", type=int, default=512)
    add("--slo-ttft-ms", type=float, default=1000.0, help="goodput")
    add("--slo-tpot-ms", type=float, default=100.0, help="goodput")
    add("--warmup", type=int, default=2, help="requests before the measurement")
    add("--max-requests", type=int, default=2000, help="per run")
    add("--max-seconds", type=float, default=600.0, help="per run; unfinished requests fail")
    add("--api-key-file", type=Path, help="file that holds the key (it is not shown by ps)")
    add("--allow-remote", action="store_true", help="allow an address that is not loopback")
    add("--server-pids", type=integers, default=[], help="account CPU to these processes")
    add("--server-match", default="", help="account CPU to processes whose command line matches")
    add("--engine-match", default="replica:Engine", help="groups of processes that are the engine")
    # Ray's processes report every 10 s: less than two of these periods would be a matter of luck.
    add("--idle-s", type=float, default=20.0, help="seconds to watch the idle server before")
    add("--out", type=Path, help="JSON file; default: a new one under bench/results/")
    add("--no-plot", action="store_true")
    return parser.parse_args(argv)


def _modes(text: str) -> list[str]:
    modes = text.split(",")
    if unknown := sorted(set(modes) - set(MODES)):
        raise argparse.ArgumentTypeError(f"unknown mode {unknown[0]!r}, have {', '.join(MODES)}")
    return modes


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    try:
        result = asyncio.run(run(arguments))
    except ValueError as error:
        raise SystemExit(f"bench.serve: {error}") from None
    path: Path = arguments.out or report.result_path("serve")
    report.write_json(path, result)
    print(report.format_table([table_row(entry) for entry in result["runs"]]))
    if result["knee"] is not None:
        print(f"knee: {result['knee']} concurrent requests")
    for entry in result["runs"]:
        if entry.get("stall"):
            print(f"beside a {entry['long_prompt']}-token prompt: {entry['stall']}")
    swept = [entry for entry in result["runs"] if entry["mode"] == "sweep"]
    if swept and not arguments.no_plot:
        report.plot_sweep(path.with_suffix(".png"), swept, result["knee"])
    print(f"report: {path}")


if __name__ == "__main__":
    main()
