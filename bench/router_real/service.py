"""The service under test: started from serve_config.yaml by the launcher, watched, and stopped.

Its ports are free ones, its keys are made up for it. Invariant: when `running` is left, nothing of
it lives.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from app.launch_config import find_free
from bench import processes
from bench.report import ROOT
from bench.router_real.client import Client
from bench.router_sim.hardware import Hardware
from bench.server_process import ServerCommand, running
from replicas.engine.scheduler import (
    MIN_PREFILL_BESIDE_DECODES,
    PREFILL_PER_DECODE,
    PREFILL_PER_FURTHER_PROMPT,
)
from replicas.load_metrics import LOAD_FIELDS, load_metric_name
from replicas.wire import ReplicaLoad

NUM_REPLICAS = 2
START_LIMIT_S = 600.0
ENGINE_GROUP = "replica:Engine"
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the service is given; small, so that its limits are met in seconds.

    Attributes:
        model: directory of the checkpoint, relative to the checkout.
        num_slots: of a replica.
        num_pages: of a replica's KV cache.
        page_size: tokens of a page.
        max_mixed_tokens, max_num_batched_tokens: of a step, see `replicas.config.EngineConfig`.
        max_queued_requests: of the router.
    """

    model: str = "models/smollm2-135m-instruct"
    num_slots: int = 8
    num_pages: int = 401
    page_size: int = 16
    max_mixed_tokens: int = 32
    max_num_batched_tokens: int = 128
    max_queued_requests: int = 48

    def as_hardware(self) -> Hardware:
        """The modelled replica of these sizes; its speed is not known yet."""
        return Hardware(
            chunk_tokens=self.max_num_batched_tokens,
            mixed_tokens=self.max_mixed_tokens,
            prefill_per_decode=PREFILL_PER_DECODE,
            min_prefill_tokens=MIN_PREFILL_BESIDE_DECODES,
            prefill_per_further_prompt=PREFILL_PER_FURTHER_PROMPT,
            num_planned_steps=1,
            page_size=self.page_size,
            num_slots=self.num_slots,
            num_pages=self.num_pages - 1,  # one is the null page
        )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the service said of itself at one moment.

    Attributes:
        at: `time.monotonic` seconds.
        num_queued: requests that wait in the router.
        loads: of each replica, by id.
    """

    at: float
    num_queued: int
    loads: dict[str, ReplicaLoad]


@dataclass(slots=True)
class Watch:
    """What was seen of the service over a while.

    Attributes:
        snapshots: in order; those that nobody answered are left out.
        resident_bytes: (seconds, memory by kind of process), in order.
    """

    snapshots: list[Snapshot] = field(default_factory=list)
    resident_bytes: list[tuple[float, dict[str, int]]] = field(default_factory=list)


class Service:
    """A running service.

    Attributes:
        sizes: what it was given.
        keys: API keys that it takes, of so many tenants.
        client: sends requests with the first of them.
    """

    def __init__(self, sizes: Sizes, port: int, keys: tuple[str, ...]) -> None:
        self.sizes = sizes
        self.keys = keys
        self._port = port
        self.client = Client(f"http://127.0.0.1:{port}", api_key=keys[0])

    async def snapshot(self) -> Snapshot | None:
        """Ask once; None when nobody answers, or the router is silent."""
        status, body = await self.client.get("/metrics")
        if status != 200 or b"systole_router_queued_requests" not in body:
            return None
        return parse_metrics(body.decode())

    async def wait_for_replicas(self, count: int, *, limit_s: float = 300.0) -> Snapshot:
        """Wait until `count` replicas take requests and nothing runs.

        Raises:
            TimeoutError: they do not.
        """
        async with asyncio.timeout(limit_s):
            while True:
                seen = await self.snapshot()
                if seen is not None and len(seen.loads) == count and not seen.num_queued:
                    loads = seen.loads.values()
                    if not any(load.num_running + load.num_waiting for load in loads):
                        return seen
                await asyncio.sleep(0.2)

    def engine_pids(self) -> list[int]:
        """Processes of the engine replicas."""
        found = processes.find_server(self._port)
        return [process.pid for process in found if process.group == ENGINE_GROUP]

    def kill_engine(self, pid: int) -> None:
        """End one of `engine_pids` as a crash does."""
        os.kill(pid, signal.SIGKILL)

    @asynccontextmanager
    async def watched(self, *, interval_s: float = 0.25) -> AsyncIterator[Watch]:
        """Look at queue, loads and memory, again and again, until the block is left."""
        watch = Watch()
        task = asyncio.create_task(self._watch(watch, interval_s))
        try:
            yield watch
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _watch(self, watch: Watch, interval_s: float) -> None:
        found = processes.find_server(self._port)
        memory_at = -1.0
        while True:
            seen = await self.snapshot()
            if seen is not None:
                watch.snapshots.append(seen)
            now = time.monotonic()
            if now >= memory_at:
                watch.resident_bytes.append((now, _resident_bytes(found)))
                memory_at = now + 1.0
            await asyncio.sleep(interval_s)


@asynccontextmanager
async def running_service(sizes: Sizes, *, log: Path) -> AsyncIterator[Service]:
    """Start a service with two engine replicas, and stop it afterwards.

    Args:
        sizes: see there.
        log: takes the launcher's lines.
    """
    keys = tuple(secrets.token_hex(16) for _ in range(NUM_REPLICAS))
    port = find_free()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "serve_config.yaml"
        path.write_text(yaml.safe_dump(serve_config(sizes, keys), sort_keys=False))
        url = f"http://127.0.0.1:{port}"
        command = ServerCommand(
            name="systole",
            command=f"{sys.executable} -m app.launch --config {path} --port {port}",
            url=url,
            ready_url=f"{url}/ready",
            start_limit_s=START_LIMIT_S,
        )
        with running(command, log=log, directory=ROOT):
            service = Service(sizes, port, keys)
            async with service.client:
                await service.wait_for_replicas(NUM_REPLICAS, limit_s=START_LIMIT_S)
                yield service


def serve_config(sizes: Sizes, keys: tuple[str, ...]) -> dict[str, Any]:
    """serve_config.yaml with these sizes."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    (application,) = config["applications"]
    args = application["args"]
    args["model"] = sizes.model
    args["engine"] |= {
        "kv_cache_bytes": None,
        "num_pages": sizes.num_pages,
        "page_size": sizes.page_size,
        "max_num_seqs": sizes.num_slots,
        "max_mixed_tokens": sizes.max_mixed_tokens,
        "max_num_batched_tokens": sizes.max_num_batched_tokens,
    }
    args["replicas"] |= {"num_replicas": NUM_REPLICAS, "health_check_period_s": 1}
    args["router"] |= {"max_queued_requests": sizes.max_queued_requests}
    hashes = [f"sha256:{hashlib.sha256(key.encode()).hexdigest()}" for key in keys]
    args["ingress"] |= {"api_key_hashes": hashes}
    return config


def parse_metrics(text: str) -> Snapshot:
    """Read an answer of /metrics; it is as of now."""
    names = {load_metric_name(name): name for name in LOAD_FIELDS}
    values: dict[str, dict[str, Any]] = {}
    num_queued = 0
    for family in text_string_to_metric_families(text):
        if family.name == "systole_router_queued_requests":
            num_queued = int(family.samples[0].value)
        if (name := names.get(family.name)) is None:
            continue
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            value = sample.value if name.endswith("_s") else int(sample.value)
            values.setdefault(sample.labels["replica"], {})[name] = value
    loads = {replica: ReplicaLoad(**found) for replica, found in values.items()}
    return Snapshot(time.monotonic(), num_queued, loads)


def _resident_bytes(found: list[processes.Process]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for process in found:
        try:
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
        except (OSError, IndexError):  # ended
            continue
        totals[process.group] = totals.get(process.group, 0) + pages * PAGE_BYTES
    return totals
