"""What is done to the service, one function a fault. Each returns once the disturbance is over.

A fault is given the service and acts on its processes, sockets, disk, memory or clock. What users
then see is measured around it, not here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.own_time import now
from tests.chaos import sockets, threads
from tests.chaos.service import (
    CONTROLLER,
    ENGINE,
    GCS,
    INGRESS,
    NUM_ENGINES,
    NUM_INGRESSES,
    PROXY,
    PROXY_MANAGER,
    ROUTER,
    Service,
)
from tests.chaos.traffic import flood

STOPPED_S = 20.0
STORE_BYTES = 16 << 20
FLOOD_REQUESTS = 400
CHANGE_LIMIT_S = 90.0
DRAIN_LIMIT_S = 900.0
"""For a change that waits for the end of long streams."""


@dataclass(frozen=True)
class Fault:
    """One row of the table.

    Attributes:
        name: for the command line.
        what: for the table.
        strike: does it.
        max_errors: failed requests that the design allows; None: any number.
        ends_cluster: the launcher is expected to end, and is started again.
        has_long_streams: beside the short ones, streams of minutes are in flight.
    """

    name: str
    what: str
    strike: Callable[[Service], Awaitable[None]]
    max_errors: int | None = 0
    ends_cluster: bool = False
    has_long_streams: bool = False


def _kill(group: str) -> Callable[[Service], Awaitable[None]]:
    async def strike(service: Service) -> None:
        # After a change of replicas an older HAProxy drains beside the new one.
        service.kill(group, count=len(service.pids(group)) if group == PROXY else 1)

    return strike


def _stop(group: str) -> Callable[[Service], Awaitable[None]]:
    async def strike(service: Service) -> None:
        with service.stopped(group):
            await asyncio.sleep(STOPPED_S)

    return strike


async def _cut_sockets(service: Service) -> None:
    for _ in range(3):
        with sockets.between(service.pids(INGRESS), service.pids(ENGINE)) as connections:
            assert connections
            for connection in connections:
                sockets.cut(connection)
        await asyncio.sleep(1.0)


def _delay_sockets(seconds: float) -> Callable[[Service], Awaitable[None]]:
    async def strike(service: Service) -> None:
        with sockets.between(service.pids(INGRESS), service.pids(ENGINE)) as connections:
            assert connections
            for connection in connections:
                sockets.drop_input(connection)
            try:
                await asyncio.sleep(seconds)
            finally:
                for connection in connections:
                    sockets.take_input(connection)

    return strike


async def _fill_store(service: Service) -> None:
    """No room and no programs: a replacement must compile, and serve without storing."""
    for program in service.store.glob("*"):
        program.unlink()
    with contextlib.suppress(OSError), (service.store / "filler").open("wb") as filler:
        while True:
            filler.write(b"\0" * (1 << 16))
            filler.flush()
    service.kill(ENGINE)


def empty_store(service: Service) -> None:
    """Undo `_fill_store`."""
    (service.store / "filler").unlink(missing_ok=True)


async def _exhaust_memory(service: Service) -> None:
    """No more address space than it has: its next large allocation fails."""
    pid = service.pids(ENGINE)[0]
    limit = _address_space(pid)
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))
    # Threads and pools of a process that starves do not ask for much at once: be sure.
    resource.prlimit(pid, resource.RLIMIT_DATA, (1 << 20, 1 << 20))
    await asyncio.sleep(10.0)


def _address_space(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def _hang_device(service: Service) -> None:
    """The device thread of an engine stands still until Serve has replaced the replica."""
    pid = service.pids(ENGINE)[0]
    with threads.hung(pid, "engine") as thread:
        deadline = now() + CHANGE_LIMIT_S
        while pid in service.pids(ENGINE):
            threads.reap(thread)
            if now() > deadline:
                raise AssertionError(f"not replaced within {CHANGE_LIMIT_S:.0f} s")
            await asyncio.sleep(0.25)


async def _flood(service: Service) -> None:
    await flood(service.url, count=FLOOD_REQUESTS, seed=0)


async def _jump_clock(service: Service) -> None:
    for offset_s in (3600.0, -3600.0, 0.0):
        service.set_clock(offset_s)
        await asyncio.sleep(7.0)


async def _until(
    condition: Callable[[], bool], what: str, *, limit_s: float = CHANGE_LIMIT_S
) -> None:
    deadline = now() + limit_s
    while not await asyncio.to_thread(condition):
        if now() > deadline:
            raise AssertionError(f"not within {limit_s:.0f} s: {what}")
        await asyncio.sleep(0.25)


def _user_config(deployment: str, **settings: Any) -> Callable[[dict[str, Any]], None]:
    def change(application: dict[str, Any]) -> None:
        application["deployments"] = [{"name": deployment, "user_config": settings}]

    return change


async def _change_light_settings(service: Service) -> None:
    """Limits of the ingress change under its streams; no process is replaced."""
    before = service.replicas()
    body = {"prompt": "a", "max_tokens": 1, "n": 3}
    for max_choices, status in ((2, 400), (128, 200)):
        service.deploy(_user_config("Ingress", max_choices=max_choices))
        for _ in range(NUM_INGRESSES):  # a request reaches any one of them
            await _until(lambda want=status: service.post(body) == want, f"status {status}")
    assert service.replicas() == before, "a replica was replaced"


async def _scale(service: Service) -> None:
    """One engine replica less, and again as many: what the leaving one runs, it finishes."""

    def count(num_replicas: int) -> Callable[[dict[str, Any]], None]:
        def change(application: dict[str, Any]) -> None:
            application["deployments"] = [{"name": "Engine", "num_replicas": num_replicas}]

        return change

    service.deploy(count(NUM_ENGINES - 1))
    await _until(
        lambda: len(service.pids(ENGINE)) == NUM_ENGINES - 1,
        "a replica less",
        limit_s=DRAIN_LIMIT_S,
    )
    service.deploy(count(NUM_ENGINES))


async def _roll(service: Service) -> None:
    """Other args: every process is replaced, one after the other, under the streams."""
    before = service.replicas()

    def change(application: dict[str, Any]) -> None:
        application["args"]["router"] = {"max_queued_requests": 2000}

    service.deploy(change)
    await _until(
        lambda: not before & service.replicas() and service.is_whole(),
        "all replicas replaced",
        limit_s=DRAIN_LIMIT_S,
    )


BAD_ARGS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("engine", {"max_seqs": 8}, "engine.max_seqs: there is no such setting"),
    ("engine", {"max_num_seqs": 64, "max_mixed_tokens": 32}, "max_mixed_tokens (32) must be"),
    ("engine", {"memory_bytes": 1000}, "engine.memory_bytes: the weights of"),
    ("replicas", {"resources": {"TPU": 16}}, "replicas.resources.TPU: a replica takes"),
    ("replicas", {"resources": {"TPU": 4}}, "replicas.resources.TPU: a replica wants 4"),
)


async def _send_bad_configs(service: Service) -> None:
    """Each is refused with its key, and the version that runs is not touched."""
    before = service.replicas()
    for section, fields, message in BAD_ARGS:

        def change(application: dict[str, Any], section=section, fields=fields) -> None:
            application["args"].setdefault(section, {}).update(fields)

        service.deploy(change)
        await _until(
            lambda want=message: want in service.application()["message"], f"refusal: {message}"
        )
        assert service.replicas() == before, f"a replica was replaced for {message}"
    service.deploy(lambda application: None)
    await _until(lambda: service.application()["status"] == "RUNNING", "as before")


FAULTS = (
    Fault("kill-engine", "kill -9 an engine replica", _kill(ENGINE)),
    Fault("kill-router", "kill -9 the router", _kill(ROUTER), max_errors=None),
    Fault("kill-ingress", "kill -9 one of two ingress replicas", _kill(INGRESS), max_errors=None),
    Fault("kill-proxy", "kill -9 HAProxy", _kill(PROXY), max_errors=None),
    Fault("kill-proxy-manager", "kill -9 the proxy's manager", _kill(PROXY_MANAGER), None),
    Fault("kill-controller", "kill -9 Serve's controller", _kill(CONTROLLER)),
    Fault("stop-engine", "stop an engine replica for 20 s", _stop(ENGINE)),
    Fault("stop-router", "stop the router for 20 s", _stop(ROUTER)),
    Fault("stop-ingress", "stop one of two ingress replicas for 20 s", _stop(INGRESS)),
    Fault("stop-proxy", "stop HAProxy for 20 s", _stop(PROXY)),
    Fault("stop-controller", "stop Serve's controller for 20 s", _stop(CONTROLLER)),
    Fault("stop-gcs", "stop the head's GCS for 20 s", _stop(GCS)),
    Fault("hang-device", "an engine's device thread hangs for good", _hang_device),
    Fault("cut-sockets", "cut all token sockets three times", _cut_sockets),
    Fault("delay-sockets", "token sockets lose all packets for 3 s", _delay_sockets(3.0)),
    Fault("silence-sockets", "token sockets lose all packets for 15 s", _delay_sockets(15.0)),
    Fault("full-disk", "program store full, then kill -9 an engine replica", _fill_store),
    Fault("no-memory", "an engine replica gets no more memory", _exhaust_memory),
    Fault("flood", f"{FLOOD_REQUESTS} clients that connect and leave", _flood),
    Fault("clock", "wall clock 1 h ahead, 1 h behind, right again", _jump_clock),
    Fault("light-settings", "limits change by `user_config`", _change_light_settings),
    Fault("bad-config", f"{len(BAD_ARGS)} wrong configs are deployed", _send_bad_configs),
    Fault(
        "scale",
        "an engine replica less, then again as many; streams of minutes in flight",
        _scale,
        has_long_streams=True,
    ),
    Fault(
        "roll",
        "rolling update: every process replaced; streams of minutes in flight",
        _roll,
        has_long_streams=True,
    ),
    Fault("kill-gcs", "kill -9 the head's GCS", _kill(GCS), max_errors=None, ends_cluster=True),
)


@contextlib.contextmanager
def small_disk(directory: Path):
    """A file system of its own for the store, so that filling it harms nobody else.

    Raises:
        RuntimeError: mounting one is not permitted.
    """
    directory.mkdir(parents=True, exist_ok=True)
    size = f"size={STORE_BYTES}"
    if shutil.which("mount") is None or os.geteuid() != 0:
        raise RuntimeError("mounting a small disk needs root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(directory)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=False)
