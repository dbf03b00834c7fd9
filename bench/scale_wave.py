"""A load wave over real Ray with TPU hosts that come and go: `python -m bench.scale_wave`.

A CPU head and fake TPU hosts on this machine (tests/fake_tpu_cluster.py), the real router, replicas
and policy over fake engines (tests/fakes.py). Reports how replicas and hosts followed, what users
saw, and which chips each replica was given. Its times are those of this machine, and no TPU's.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ray import serve

from app.autoscaling.config import AutoscalingConfig
from app.client import LLMClient
from bench.report import result_path, stamp, write_json
from bench.router_sim.experiment import quantile
from replicas.wire import SamplingParams
from tests.fake_tpu_cluster import FakeTpuCluster, Host, fake_tpu_cluster
from tests.fakes import FakeEngineOptions, fake_output
from tests.scale_app import Outcome, chips_of, deploy, load

TOKENS = 20
STEP_S = 0.05
SLOTS = 8
"""A request holds a slot for a second: a replica carries 8 requests per second."""
SETTLED_S = 2.0
LIMIT_S = 200.0


def wave(
    fake: FakeTpuCluster, directory: Path, *, peak: int, hold_s: float | None
) -> dict[str, Any]:
    """One replica per host: rise to `peak` replicas, and fall back to one.

    Args:
        fake: the cluster.
        directory: where the engines note their chips.
        peak: replicas that the load takes at its height.
        hold_s: how long it stays high once they are up; None: it is high for ten seconds, whatever
            comes of it.

    Returns:
        replicas and hosts by time, and how the requests went.
    """
    config = AutoscalingConfig(
        max_replicas=peak,
        ttft_target_s=1.0,
        tpot_target_s=1.0,
        boot_s=5.0,
        headroom=0.1,
        upscale_delay_s=1.0,
        downscale_window_s=5.0 if hold_s is None else 15.0,
        report_interval_s=0.5,
    )
    options = FakeEngineOptions(step_s=STEP_S, num_slots=SLOTS, report_dir=str(directory))
    handle = deploy("wave", options, chips=fake.host.chips, scaling=config)
    outcome = Outcome()
    high = 0.8 * peak * SLOTS / (TOKENS * STEP_S)
    low = 0.25 * SLOTS / (TOKENS * STEP_S)
    reached_at: list[float] = []
    alone_at: list[float] = []

    def rate(at: float) -> float:
        """Low, high, low."""
        counts = outcome.counts
        if counts and counts[-1] == peak and not reached_at:
            reached_at.append(at)
        if hold_s is None:
            is_high = 2 < at < 12
        else:
            is_high = at > 3 and (not reached_at or at < reached_at[0] + hold_s)
        return high if is_high else low

    def is_over(at: float) -> bool:
        if at > 2 * LIMIT_S:
            return True
        is_alone = bool(reached_at) and outcome.counts[-1] == 1 and fake.num_hosts == 1
        if is_alone and not alone_at:
            alone_at.append(at)
        return bool(alone_at) and at > alone_at[0] + SETTLED_S

    async def run() -> None:
        client = LLMClient(handle, host="127.0.0.1")
        try:
            await load(client, outcome, rate, until=is_over, num_tokens=TOKENS)
        finally:
            await client.close()

    began = time.monotonic()
    asyncio.run(run())
    serve.delete("wave")
    latencies = sorted(latency for _, latency in outcome.latencies_s)
    offset = began - fake.started_at
    return {
        "num_requests": outcome.num_requests,
        "errors": [repr(error) for error in outcome.errors],
        "wrong": outcome.wrong,
        "replicas": outcome.counts,
        "replica_times_s": [round(at, 1) for at, _ in outcome.replicas],
        "hosts": [count for _, count in fake.history],
        "host_times_s": [round(at - offset, 1) for at, _ in fake.history],
        "latency_s": {
            f"p{round(100 * share)}": round(quantile(latencies, share), 2)
            for share in (0.5, 0.95, 0.99)
        },
        "peak": peak,
    }


def zero(fake: FakeTpuCluster) -> dict[str, Any]:
    """Let an idle service go, its host too, and wake it with a few requests that wait.

    Returns:
        how long each wait was; `ready_at_zero` is what /ready would say.
    """
    config = AutoscalingConfig(
        min_replicas=0, boot_s=20.0, scale_to_zero_after_s=5.0, report_interval_s=0.5
    )
    handle = deploy(
        "zero", FakeEngineOptions(), chips=fake.host.chips, scaling=config, replica_wait_s=120.0
    )
    report: dict[str, Any] = {}

    async def run() -> None:
        client = LLMClient(handle, host="127.0.0.1")
        began = time.monotonic()
        while (await client.status()).replicas or fake.num_hosts:
            assert time.monotonic() < began + LIMIT_S, fake.num_hosts
            await asyncio.sleep(0.3)
        asleep = time.monotonic()
        report["asleep_after_s"] = round(asleep - began, 1)
        report["ready_at_zero"] = (await client.status()).ready
        answers = await asyncio.gather(
            *(
                client.complete((number, 1), SamplingParams(max_tokens=5), timeout_s=LIMIT_S)
                for number in range(1, 5)
            )
        )
        report["woken_after_s"] = round(time.monotonic() - asleep, 1)
        report["wrong"] = sum(
            answer.token_ids != fake_output((number, 1), 5)
            for number, answer in enumerate(answers, 1)
        )
        await client.close()

    asyncio.run(run())
    serve.delete("zero")
    return report


def pin(directory: Path, *, chips: int, hosts: int, host: Host) -> dict[str, Any]:
    """Fill hosts with replicas of `chips` chips each and see what each was given."""
    directory.mkdir()
    count = hosts * host.chips // chips
    deploy("pinned", FakeEngineOptions(report_dir=str(directory)), chips=chips, scaling=count)
    given = chips_of(directory)
    serve.delete("pinned")
    by_host: dict[str, list[str]] = {}
    for replica in given:
        visible = replica["TPU_VISIBLE_CHIPS"]
        every = ",".join(map(str, range(host.chips)))
        by_host.setdefault(replica["node"], []).extend((visible or every).split(","))
    are_disjoint = all(sorted(c) == sorted(set(c)) for c in by_host.values())
    return {
        "chips_per_replica": chips,
        "replicas_per_host": host.chips // chips,
        "num_replicas": len(given),
        "are_disjoint": are_disjoint and len(given) == count,
        "given": [
            {name: value for name, value in replica.items() if name.startswith("TPU_")}
            for replica in given
        ],
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.scale_wave", description=__doc__)
    parser.add_argument("--only-zero", action="store_true", help="scale to zero and back, only")
    parser.add_argument("--short", action="store_true", help="a small wave, one kind of pinning")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    host = Host(boot_s=1.0, idle_timeout_s=1.0 if options.short else 5.0)
    with (
        tempfile.TemporaryDirectory() as name,
        fake_tpu_cluster(host, namespace="scale-wave") as fake,
    ):
        serve.start(http_options={"location": "NoServer"})
        if options.only_zero:
            print(zero(fake))
            serve.shutdown()
            return 0
        directory = Path(name)
        (directory / "wave").mkdir()
        peak, hold_s = (2, None) if options.short else (3, 20.0)
        report: dict[str, Any] = {"wave": wave(fake, directory / "wave", peak=peak, hold_s=hold_s)}
        report["wave"]["chips"] = chips_of(directory / "wave")
        kinds = (2,) if options.short else (1, 2, 4)
        report["pinning"] = [
            pin(directory / str(chips), chips=chips, hosts=1, host=host) for chips in kinds
        ]
        if not options.short:
            give_up_at = time.monotonic() + 60
            while fake.num_hosts and time.monotonic() < give_up_at:
                time.sleep(0.5)
            report["hosts_at_the_end"] = fake.num_hosts
            report["zero"] = zero(fake)
            print(report["zero"])
        serve.shutdown()
    path = options.out or result_path("scale_wave")
    write_json(path, {"stamp": stamp(), **report})
    for part in (report["wave"], *report["pinning"]):
        print(part)
    print(path)
    failed = report["wave"]["errors"] or report["wave"]["wrong"]
    return 1 if failed or not all(run["are_disjoint"] for run in report["pinning"]) else 0


if __name__ == "__main__":
    sys.exit(main())
