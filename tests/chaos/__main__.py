"""Breaks a running service in every way that production does, and says what its users saw.

    .venv/bin/python -m tests.chaos [--only NAME,...] [--write]

Starts a Ray cluster of its own with two engine replicas of a small random model, keeps streams
running, strikes, waits until the service is whole again, and looks for what was left behind.
`--write` puts the table into docs/reliability.md. Ends with status 1 if a stream had a wrong,
missing or doubled token, a fault cost more requests than it may, the service did not become whole,
or anything leaked. Linux only; the disk's fault needs root.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench import report
from bench.own_time import CLOCK, now
from bench.top import Scrape
from tests.chaos.faults import FAULTS, Fault, empty_store, small_disk
from tests.chaos.page import write_page
from tests.chaos.service import NUM_ENGINES, NUM_INGRESSES, Service
from tests.chaos.traffic import (
    LONG_LIMIT_S,
    NUM_LONG,
    NUM_STREAMS,
    Traffic,
    body_of,
    new_session,
    send,
)

PROGRAMS = report.ROOT / ".cache" / "chaos"
"""Compiled programs of an earlier run."""
WARM_S = 2.0
AFTERMATH_S = 3.0
MAX_ATTEMPTS = 3
WHOLE_LIMIT_S = 90.0
CLUSTER_LIMIT_S = 120.0
IDLE_LIMIT_S = 75.0
POLL_S = 0.25


@dataclass
class Outcome:
    """What a fault did.

    Attributes:
        name: of the fault.
        what: in words.
        num_requests: sent while it lasted and until the service was whole again.
        errors: failed requests by what went wrong.
        num_wrong: streams with a missing, doubled or wrong token.
        recovery_s: from the fault to the end of the last failed request; 0 when none failed.
        stall_s: longest wait for tokens in a stream that was completed.
        whole_s: from the fault until all replicas were back.
        longest_s: the longest stream, from sending to end.
        paused_s: in which this machine's other users had us stopped; not in the other figures.
        leaks: what had not gone back to its start, in words.
        problems: why the row fails, in words.
    """

    name: str
    what: str
    num_requests: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    num_wrong: int = 0
    recovery_s: float = 0.0
    stall_s: float = 0.0
    whole_s: float = 0.0
    longest_s: float = 0.0
    paused_s: float = 0.0
    leaks: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


async def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--only", help="names of faults, with commas between them")
    parser.add_argument("--write", action="store_true", help="update docs/reliability.md")
    parser.add_argument("--limit-minutes", type=float, default=15.0, help="for everything")
    parser.add_argument("--list", action="store_true", help="name the faults and end")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(f"{fault.name:20} {fault.what}" for fault in FAULTS))
        return 0
    names = options.only.split(",") if options.only else [fault.name for fault in FAULTS]
    if unknown := set(names) - {fault.name for fault in FAULTS}:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    chosen = [fault for fault in FAULTS if fault.name in names]
    directory = Path(tempfile.mkdtemp(prefix="systole-chaos-"))
    service = Service(directory)
    outcomes: list[Outcome] = []
    path, stamp = report.result_path("chaos"), report.stamp()
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        if any(fault.name == "full-disk" for fault in chosen):
            stack.enter_context(small_disk(service.store))
        stack.callback(service.stop)
        if PROGRAMS.is_dir():
            shutil.copytree(PROGRAMS, service.store, dirs_exist_ok=True)
        try:
            async with asyncio.timeout(60 * options.limit_minutes):
                print(f"whole after {await asyncio.to_thread(service.start):.0f} s", flush=True)
                shutil.rmtree(PROGRAMS, ignore_errors=True)
                shutil.copytree(service.store, PROGRAMS)
                references = await _references(service)
                for fault in chosen:
                    if fault.has_long_streams and len(references) == NUM_STREAMS:
                        references += await _long_references(service)
                    outcome = await _strike_undisturbed(service, fault, references)
                    outcomes.append(outcome)
                    _publish(outcomes, stamp, path, write=options.write)
        except TimeoutError:
            print(f"stopped after {options.limit_minutes:g} minutes", file=sys.stderr)
        if any(outcome.problems for outcome in outcomes):
            shutil.copy(service.log, path.with_suffix(".log"))
    is_complete = len(outcomes) == len(chosen)
    return int(not is_complete or any(outcome.problems for outcome in outcomes))


async def _references(service: Service) -> list[list[int]]:
    """What each stream answers undisturbed: alone, and again beside the others."""
    async with new_session() as session:
        alone = [await send(session, service.url, body_of(i)) for i in range(NUM_STREAMS)]
        beside = await asyncio.gather(
            *(send(session, service.url, body_of(i)) for i in range(NUM_STREAMS))
        )
    for one, other in zip(alone, beside, strict=True):
        assert one.error is None, one.error
        assert one.tokens == other.tokens, "the service is not deterministic undisturbed"
    return [answer.tokens for answer in alone]


async def _long_references(service: Service) -> list[list[int]]:
    """What the long streams answer undisturbed."""
    async with new_session(LONG_LIMIT_S) as session:
        indices = range(NUM_STREAMS, NUM_STREAMS + NUM_LONG)
        answers = await asyncio.gather(
            *(send(session, service.url, body_of(index)) for index in indices)
        )
    for answer in answers:
        assert answer.error is None, answer.error
    print(f"long streams: {max(a.ended_at - a.sent_at for a in answers):.0f} s", flush=True)
    return [answer.tokens for answer in answers]


async def _strike_undisturbed(
    service: Service, fault: Fault, references: list[list[int]]
) -> Outcome:
    """Strike, and again where the machine was taken from us meanwhile and something failed."""
    count = len(references) if fault.has_long_streams else NUM_STREAMS
    outcome = await _strike(service, fault, references[:count])
    for _ in range(MAX_ATTEMPTS - 1):
        if not (outcome.paused_s and (outcome.errors or outcome.problems)):
            break
        print(f"{fault.name}: we were stopped for {outcome.paused_s:.0f} s, again", flush=True)
        outcome = await _strike(service, fault, references[:count])
    return outcome


async def _strike(service: Service, fault: Fault, references: list[list[int]]) -> Outcome:
    """Disturb the service under traffic, and wait until it is whole and idle again."""
    outcome = Outcome(fault.name, fault.what)
    traffic = Traffic(service.url, references)
    traffic.start()
    await asyncio.sleep(WARM_S)
    fault_at, paused_s = now(), CLOCK.paused_s
    try:
        await fault.strike(service)
    except Exception as error:  # one fault that goes wrong must not hide the others
        outcome.problems.append(f"{type(error).__name__}: {error}")
    ended_at = now()  # some take minutes
    if fault.ends_cluster:
        await _restart(service, outcome)
    else:
        await asyncio.sleep(AFTERMATH_S)
    while not await asyncio.to_thread(service.is_whole):
        if now() - ended_at > (CLUSTER_LIMIT_S if fault.ends_cluster else WHOLE_LIMIT_S):
            outcome.problems.append("not whole")
            break
        await asyncio.sleep(POLL_S)
    outcome.whole_s = now() - fault_at
    await asyncio.sleep(AFTERMATH_S)
    await traffic.stop()
    empty_store(service)
    outcome.num_requests = len(traffic.answers)
    outcome.errors = dict(traffic.errors())
    outcome.num_wrong = traffic.num_wrong()
    outcome.recovery_s = traffic.recovery_s(fault_at)
    outcome.stall_s = traffic.stall_s()
    outcome.longest_s = traffic.longest_s()
    outcome.paused_s = CLOCK.paused_s - paused_s
    outcome.leaks = await _wait_until_idle(service)
    num_errors = sum(outcome.errors.values())
    if fault.max_errors is not None and num_errors > fault.max_errors:
        outcome.problems.append(f"{num_errors} failed requests")
    if outcome.num_wrong:
        outcome.problems.append(f"{outcome.num_wrong} streams with wrong tokens")
    outcome.problems += outcome.leaks
    return outcome


async def _restart(service: Service, outcome: Outcome) -> None:
    """Wait for the launcher to end, as a supervisor does, and start it again."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        await asyncio.to_thread(service.launcher.wait, CLUSTER_LIMIT_S)
    if service.launcher.poll() is None:
        outcome.problems.append("the launcher did not notice")
        await asyncio.to_thread(service.stop)
    await asyncio.to_thread(service.start)


async def _wait_until_idle(service: Service) -> list[str]:
    """Wait until nothing is held any more; return what still is after the limit."""
    deadline = now() + IDLE_LIMIT_S
    while True:
        left = await asyncio.to_thread(_left_behind, service)
        if not left or now() > deadline:
            return left
        await asyncio.sleep(1.0)


def _left_behind(service: Service) -> list[str]:
    seen: dict[str, Scrape] = {}
    for _ in range(12 * NUM_INGRESSES):  # a scrape reaches any one of them
        if (scrape := service.scrape()) is not None:
            seen[scrape.ingress] = scrape
        if len(seen) == NUM_INGRESSES:
            break
    if len(seen) < NUM_INGRESSES:
        return [f"only {len(seen)} ingress replicas answer"]
    left: dict[str, float] = {}
    for scrape in seen.values():
        left["sink entries"] = left.get("sink entries", 0) + scrape.total(
            "systole_token_sink_entries"
        )
    latest = max(seen.values(), key=lambda scrape: scrape.at_s)
    left["router queue"] = latest.total("systole_router_queued_requests")
    left["bookings"] = latest.total("systole_router_inflight_requests")
    left["slots"] = latest.total("systole_engine_running") + latest.total("systole_engine_waiting")
    pages = latest.total("systole_engine_pages")
    left["pages"] = pages - latest.total("systole_engine_free_pages")
    engines = len(latest.samples.get("systole_engine_pages", ()))
    left["missing engines"] = NUM_ENGINES - engines
    left["compiles"] = latest.total("systole_engine_compiles_after_warmup_total")
    return [f"{value:.0f} {name}" for name, value in left.items() if value]


def _publish(
    outcomes: Sequence[Outcome], stamp: dict[str, Any], path: Path, *, write: bool
) -> None:
    """Say what the last fault did, and put all so far where it is kept: a run may be cut short."""
    rows = [asdict(outcome) for outcome in outcomes]
    print(json.dumps(rows[-1]), flush=True)
    report.write_json(path, {"stamp": stamp, "outcomes": rows})
    if write:
        write_page(rows, stamp, [fault.what for fault in FAULTS])


def _end(signal_number: int, _frame: object) -> None:
    """Leave as by Ctrl-C, so that the service is stopped."""
    signal.signal(signal_number, signal.SIG_IGN)
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    sys.exit(asyncio.run(main()))
