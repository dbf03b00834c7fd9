"""A service under steady load for an hour: nothing may grow, slow down or compile.

    python -m bench.soak [--config serve_config.yaml] [--minutes 60] [--share 0.7] [--url URL]

Finds what the service can do with a closed loop, then sends 70% of that as an open loop of mixed
requests: short and long prompts, long answers, shared prefixes, clients that leave. Every ten
seconds it notes memory, descriptors and threads of the server's processes and what /metrics says is
held. After the first sixth of the time it judges: memory within 2%, descriptors, threads and
entries flat, p99 TPOT of the last sixth within 10% of the second, no compilation. Ends with status
1 where one of these fails. Linux only.

Where this process is stopped for a while, as on a machine that is shared, the load pauses too, and
the requests that were in flight do not count for TPOT; the verdict says for how long.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench import processes, report, top
from bench.arguments import integer_range
from bench.client import LoadClient, check_address
from bench.measurement import RequestRecord, percentile
from bench.own_time import CLOCK, now
from bench.server_process import serving
from bench.workloads import RequestSpec, Vocabulary

LOAD_SHARE = 0.7
PROGRESS_S = 60.0
CALIBRATION_S = 60.0
CALIBRATION_CONCURRENCY = 16
SAMPLE_S = 10.0
LEAVING_SHARE = 0.05
"""Of the requests, whose clients leave in the middle."""
IDLE_LIMIT_S = 60.0
MAX_RSS_GROWTH = 0.02
MAX_TPOT_DRIFT = 0.10
MAX_COUNT_GROWTH = 0.05
"""Descriptors and threads follow the number of open connections."""
_HELD = {
    "sink entries": "systole_token_sink_entries",
    "router queue": "systole_router_queued_requests",
    "bookings": "systole_router_inflight_requests",
    "slots": "systole_engine_running",
    "waiting": "systole_engine_waiting",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The server at one time.

    Attributes:
        at_s: seconds since the load began.
        rss_bytes: resident memory of all its processes.
        rss_by_group: the same, by kind of process.
        num_descriptors: open files and sockets of all.
        num_threads: of all.
        held: what /metrics says is held, by name; "pages" are KV pages in use.
        num_compiles: after warm-up, all replicas.
    """

    at_s: float
    rss_bytes: int
    rss_by_group: dict[str, int]
    num_descriptors: int
    num_threads: int
    held: dict[str, float]
    num_compiles: int


def mixed_load(
    count: int, rate: float, *, seed: int, vocabulary: Vocabulary
) -> tuple[RequestSpec, ...]:
    """`count` requests with exponential gaps: what different users send.

    Half are short turns, a quarter begin with one of eight shared prefixes, the rest have a long
    prompt or a long answer.
    """
    rng = random.Random(f"soak-{seed}")
    prefixes = [vocabulary.draw(random.Random(f"prefix-{i}"), 256) for i in range(8)]
    arrival_s = 0.0
    specs: list[RequestSpec] = []
    for _ in range(count):
        arrival_s += rng.expovariate(rate)
        kind = rng.random()
        if kind < 0.5:
            prompt, max_tokens = vocabulary.draw(rng, rng.randint(16, 96)), rng.randint(16, 64)
        elif kind < 0.75:
            prompt = rng.choice(prefixes) + vocabulary.draw(rng, rng.randint(8, 64))
            max_tokens = rng.randint(16, 64)
        elif kind < 0.9:
            prompt, max_tokens = vocabulary.draw(rng, rng.randint(256, 768)), rng.randint(8, 32)
        else:
            prompt, max_tokens = vocabulary.draw(rng, rng.randint(16, 64)), rng.randint(128, 256)
        specs.append(
            RequestSpec(arrival_s=arrival_s, prompt_token_ids=prompt, max_tokens=max_tokens)
        )
    return tuple(specs)


def take_sample(port: int, scrape: top.Scrape, *, at_s: float) -> Sample:
    """Look at all processes of the server behind a port, and at its metrics."""
    by_group: dict[str, int] = {}
    num_descriptors = num_threads = 0
    for process in processes.find_server(port):
        directory = Path(f"/proc/{process.pid}")
        with contextlib.suppress(OSError):  # it has ended
            status = dict(
                line.split(":\t", 1)
                for line in (directory / "status").read_text().splitlines()
                if ":\t" in line
            )
            rss = int(status["VmRSS"].split()[0]) * 1024
            by_group[process.group] = by_group.get(process.group, 0) + rss
            num_threads += int(status["Threads"])
            num_descriptors += sum(1 for _ in (directory / "fd").iterdir())
    held = {name: scrape.total(metric) for name, metric in _HELD.items()}
    pages = scrape.total("systole_engine_pages") - scrape.total("systole_engine_free_pages")
    return Sample(
        at_s=round(at_s, 1),
        rss_bytes=sum(by_group.values()),
        rss_by_group=by_group,
        num_descriptors=num_descriptors,
        num_threads=num_threads,
        held=held | {"pages": pages},
        num_compiles=int(scrape.total("systole_engine_compiles_after_warmup_total")),
    )


def judge(
    samples: Sequence[Sample],
    idle: Sample,
    records: Sequence[RequestRecord],
    *,
    duration_s: float,
    disturbed: Collection[int] = (),
) -> dict[str, Any]:
    """Compare the end with the time after the first sixth.

    Args:
        samples: under load.
        idle: after the last request.
        records: of all requests.
        duration_s: of the load.
        disturbed: indices of requests across which this process was stopped.

    Returns:
        The figures, and under "problems" what fails, in words.
    """
    sixth = duration_s / 6
    early = [s for s in samples if sixth <= s.at_s < 2 * sixth]
    late = [s for s in samples if s.at_s >= 5 * sixth]
    tpots = [
        (r.sent_s, t)
        for r in records
        if r.is_ok and r.index not in disturbed and (t := r.tpot_s) is not None
    ]
    early_tpots = [t for at, t in tpots if sixth <= at < 2 * sixth]
    late_tpots = [t for at, t in tpots if at >= 5 * sixth]
    if not (early and late and early_tpots and late_tpots):
        return {"problems": ["too short to judge"]}
    figures: dict[str, Any] = {
        "rss_growth": _growth([s.rss_bytes for s in early], [s.rss_bytes for s in late]),
        "rss_growth_by_group": {
            group: _growth(
                [s.rss_by_group.get(group, 0) for s in early],
                [s.rss_by_group.get(group, 0) for s in late],
            )
            for group in early[-1].rss_by_group
        },
        "descriptor_growth": _growth(
            [s.num_descriptors for s in early], [s.num_descriptors for s in late]
        ),
        "thread_growth": _growth([s.num_threads for s in early], [s.num_threads for s in late]),
        "p99_tpot_ms": [
            round(percentile(early_tpots, 0.99) * 1e3, 3),
            round(percentile(late_tpots, 0.99) * 1e3, 3),
        ],
        "p50_tpot_ms": [
            round(percentile(early_tpots, 0.5) * 1e3, 3),
            round(percentile(late_tpots, 0.5) * 1e3, 3),
        ],
        "tpot_drift": percentile(late_tpots, 0.99) / percentile(early_tpots, 0.99) - 1,
        "held_when_idle": {name: value for name, value in idle.held.items() if value},
        "num_compiles": idle.num_compiles,
        "num_requests": len(records),
        "num_failed": sum(r.error is not None and r.error != _LEFT for r in records),
        "num_left": sum(r.error == _LEFT for r in records),
    }
    limits = {
        "rss_growth": MAX_RSS_GROWTH,
        "descriptor_growth": MAX_COUNT_GROWTH,
        "thread_growth": MAX_COUNT_GROWTH,
        "tpot_drift": MAX_TPOT_DRIFT,
    }
    problems = [
        f"{name} {figures[name]:.1%} exceeds {limit:.0%}"
        for name, limit in limits.items()
        if figures[name] > limit
    ]
    problems += [
        f"{value:g} {name} held when idle" for name, value in figures["held_when_idle"].items()
    ]
    problems += [
        f"{figures[name]} {name}" for name in ("num_compiles", "num_failed") if figures[name]
    ]
    return figures | {"problems": problems}


_LEFT = "the client left"


def _growth(before: Sequence[float], after: Sequence[float]) -> float:
    """Relative change of the median."""
    start = percentile(before, 0.5)
    return round(percentile(after, 0.5) / start - 1, 4) if start else 0.0


async def soak(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Load the service that answers at a URL of this machine, and judge it.

    Args:
        url: root of its API.
        options: of the command line.

    Returns:
        The figures for the report; "verdict" is what `judge` finds.

    Raises:
        SystemExit: it answers nothing.
    """
    port = urlsplit(url).port
    assert port is not None
    vocabulary = Vocabulary(low=options.vocabulary[0], high=options.vocabulary[1])
    async with LoadClient(url, None) as client:
        probes = mixed_load(4000, 1e9, seed=1, vocabulary=vocabulary)
        capacity = await _capacity(client, probes, options.calibration_s)
        rate = capacity * options.share
        duration_s = options.minutes * 60
        specs = mixed_load(round(rate * duration_s), rate, seed=0, vocabulary=vocabulary)
        share = f"{options.share:.0%} of {capacity:.2f}"
        print(f"{rate:.2f} requests/s, {share}, for {duration_s:.0f} s", flush=True)
        samples: list[Sample] = []
        disturbed: set[int] = set()
        paused_s = CLOCK.paused_s
        sampling = asyncio.create_task(_keep_sampling(client, port, samples))
        records = await _run(client, specs, disturbed)
        sampling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sampling  # what went wrong in it is not lost
        idle = await _wait_until_idle(client, port, duration_s)
    verdict = judge(samples, idle, records, duration_s=duration_s, disturbed=disturbed)
    return {
        "requests_per_s": rate,
        "share": options.share,
        "minutes": options.minutes,
        "paused_s": CLOCK.paused_s - paused_s,
        "verdict": verdict,
        "samples": [asdict(sample) for sample in [*samples, idle]],
    }


async def _capacity(client: LoadClient, specs: Sequence[RequestSpec], limit_s: float) -> float:
    """Requests per second of a closed loop; its first third is warm-up."""
    records = await client.run_closed(specs, concurrency=CALIBRATION_CONCURRENCY, limit_s=limit_s)
    ends = [r.end_s for r in records if r.is_ok and r.end_s is not None]
    counted = [end for end in ends if end > limit_s / 3]
    if not counted:
        raise SystemExit("the service answered nothing within the calibration")
    return len(counted) / (limit_s * 2 / 3)


async def _run(
    client: LoadClient, specs: Sequence[RequestSpec], disturbed: set[int]
) -> list[RequestRecord]:
    """Send every request at its time; some clients leave.

    Returns:
        Their records; `sent_s` is without the pauses of this process, which `disturbed` lived
        through.
    """
    rng = random.Random("leaving")
    start, began_at, began_paused_s = time.perf_counter(), now(), CLOCK.paused_s
    records: list[RequestRecord] = []
    tasks: set[asyncio.Task[None]] = set()

    async def send(spec: RequestSpec, record: RequestRecord, leaves_after_s: float | None) -> None:
        paused_s = CLOCK.paused_s
        try:
            async with asyncio.timeout(leaves_after_s):
                await client.send(client.encode(spec), record, start=start)
        except TimeoutError:
            record.error = _LEFT
        record.sent_s -= paused_s - began_paused_s
        if CLOCK.paused_s != paused_s:
            disturbed.add(record.index)

    for index, spec in enumerate(specs):
        await asyncio.sleep(began_at + spec.arrival_s - now())
        record = RequestRecord(
            index=index, sent_s=0.0, num_prompt_tokens=len(spec.prompt_token_ids)
        )
        records.append(record)
        stay_s = rng.uniform(0.0, 1.0) if rng.random() < LEAVING_SHARE else None
        task = asyncio.create_task(send(spec, record, stay_s))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    return records


async def _keep_sampling(client: LoadClient, port: int, samples: list[Sample]) -> None:
    start = shown_at = now()
    while True:
        await asyncio.sleep(SAMPLE_S)
        at_s = now() - start
        if not (text := await client.get_text("/metrics")):
            continue  # a scrape that failed says nothing of what is held
        scrape = top.parse(text, at_s=at_s)
        samples.append(await asyncio.to_thread(take_sample, port, scrape, at_s=at_s))
        if now() - shown_at >= PROGRESS_S:
            shown_at = now()
            _show(samples[-1])


def _show(sample: Sample) -> None:
    held = ", ".join(f"{value:g} {name}" for name, value in sample.held.items())
    print(
        f"{sample.at_s:6.0f} s: {sample.rss_bytes / 1e6:.0f} MB, {sample.num_descriptors} "
        f"descriptors, {sample.num_threads} threads, {held}, {sample.num_compiles} compiles",
        flush=True,
    )


async def _wait_until_idle(client: LoadClient, port: int, at_s: float) -> Sample:
    """Look until nothing is held, or the limit has passed.

    Raises:
        SystemExit: /metrics cannot be had.
    """
    deadline = now() + IDLE_LIMIT_S
    while True:
        is_late = now() > deadline
        if text := await client.get_text("/metrics"):
            scrape = top.parse(text, at_s=at_s)
            sample = await asyncio.to_thread(take_sample, port, scrape, at_s=at_s)
            if is_late or not any(sample.held.values()):
                return sample
        elif is_late:
            raise SystemExit("the service does not answer /metrics after the load")
        await asyncio.sleep(1.0)


@contextlib.contextmanager
def _server(options: argparse.Namespace) -> Iterator[str]:
    """Start the config on a free port, unless a URL was given."""
    if options.url:
        yield check_address(options.url, allow_remote=False)
        return
    with (
        tempfile.TemporaryDirectory() as directory,
        serving(options.config, log=Path(directory) / "server.log") as url,
    ):
        yield url


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--config", default="serve_config.yaml", help="what is served")
    parser.add_argument("--minutes", type=float, default=60.0, help="of load")
    parser.add_argument(
        "--share", type=float, default=LOAD_SHARE, help="of what the service can do"
    )
    parser.add_argument("--calibration-s", type=float, default=CALIBRATION_S, help="before it")
    parser.add_argument(
        "--vocabulary",
        type=integer_range,
        default=(1000, 30000),
        metavar="LOW:HIGH",
        help="token ids of prompts",
    )
    parser.add_argument("--url", help="a service that runs already on this machine")
    options = parser.parse_args(arguments)
    with _server(options) as url:
        result = asyncio.run(soak(url, options))
    path = report.result_path("soak")
    report.write_json(path, {"stamp": report.stamp()} | result)
    for name, value in result["verdict"].items():
        print(f"{name:22} {value}")
    print(f"all samples: {path.relative_to(report.ROOT)}")
    return int(bool(result["verdict"]["problems"]))


if __name__ == "__main__":
    sys.exit(main())
