"""A Ray cluster of this machine whose TPU hosts come and go with the demand for them.

A CPU head, and nodes that declare TPU chips and have none. What Ray's own autoscaler reads from the
cluster (pending demands, idle times) is read here, too; hosts are raylets. Starts and stops only
processes of its own, on ports that Ray chooses.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray._common.utils import get_ray_address_file
from ray._raylet import GcsClient
from ray.autoscaler.v2.sdk import get_cluster_resource_state
from ray.cluster_utils import Cluster

POLL_S = 0.3
STORE_BYTES = 80 << 20
LOOPBACK = "127.0.0.2"
"""Not 127.0.0.1, which Ray replaces by this machine's address when it connects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A kind of TPU host.

    Attributes:
        chips: that it declares.
        pod_type: as in cluster.yaml, "v6e-4".
        boot_s: from the order to its first raylet.
        idle_timeout_s: released after so long without a use of its chips.
        max_hosts: at once.
    """

    chips: int = 4
    pod_type: str = "v6e-4"
    boot_s: float = 2.0
    idle_timeout_s: float = 5.0
    max_hosts: int = 4

    @property
    def resources(self) -> dict[str, float]:
        """What a node of it declares."""
        return {"TPU": float(self.chips), f"TPU-{self.pod_type}-head": 1.0}

    @property
    def labels(self) -> dict[str, str]:
        """Its node's labels."""
        return {"ray.io/accelerator-type": "TPU-V6E", "ray.io/tpu-pod-type": self.pod_type}


@dataclass
class FakeTpuCluster:
    """The cluster, and an autoscaler thread that adds and removes hosts.

    Attributes:
        host: what is added.
        history: (seconds since the start, hosts) after each change.
        host_s: seconds of hosts, from the order to the release.
    """

    host: Host
    cluster: Cluster
    started_at: float = field(default_factory=time.monotonic)
    history: list[tuple[float, int]] = field(default_factory=list)
    host_s: float = 0.0
    _hosts: dict[str, tuple[Any, float]] = field(default_factory=dict)
    _booting: list[float] = field(default_factory=list)
    _idle_since: dict[str, float] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    @property
    def num_hosts(self) -> int:
        """TPU hosts that are up."""
        return len(self._hosts)

    def watch(self) -> None:
        """Add and remove hosts until told to stop."""
        client = GcsClient(self.cluster.gcs_address)
        try:
            while not self._stop.wait(POLL_S):
                self._poll(client)
        except BaseException as error:
            self.error = error
            raise

    def stop(self) -> None:
        """End the autoscaler; the hosts stay."""
        self._stop.set()
        now = time.monotonic()
        self.host_s += sum(now - since for _, since in self._hosts.values())

    def _poll(self, client: GcsClient) -> None:
        state, now = get_cluster_resource_state(client), time.monotonic()
        wanted = 0.0
        for entry in state.pending_resource_requests:
            wanted += entry.count * entry.request.resources_bundle.get("TPU", 0.0)
        free = 0.0
        used: set[str] = set()
        for node in state.node_states:
            node_id = node.node_id.hex()
            if node_id in self._hosts:
                available = node.available_resources.get("TPU", 0.0)
                free += available
                if available < node.total_resources.get("TPU", 0.0):
                    used.add(node_id)
        short = wanted - free - len(self._booting) * self.host.chips
        while short > 0 and len(self._hosts) + len(self._booting) < self.host.max_hosts:
            self._booting.append(now)
            short -= self.host.chips
        while self._booting and now - self._booting[0] >= self.host.boot_s:
            self._add(self._booting.pop(0))
        for node_id in tuple(self._hosts):
            if node_id in used or wanted > 0:
                self._idle_since.pop(node_id, None)
            elif now - self._idle_since.setdefault(node_id, now) >= self.host.idle_timeout_s:
                self._remove(node_id)

    def _add(self, ordered_at: float) -> None:
        node = self.cluster.add_node(
            num_cpus=2,
            resources=self.host.resources,
            labels=self.host.labels,
            object_store_memory=STORE_BYTES,
            node_ip_address=LOOPBACK,
        )
        self._hosts[node.node_id] = (node, ordered_at)
        self._note()

    def _remove(self, node_id: str) -> None:
        node, since = self._hosts.pop(node_id)
        self._idle_since.pop(node_id, None)
        self.cluster.remove_node(node)
        self.host_s += time.monotonic() - since
        self._note()

    def _note(self) -> None:
        self.history.append((time.monotonic() - self.started_at, len(self._hosts)))


@contextmanager
def fake_tpu_cluster(host: Host, *, namespace: str) -> Iterator[FakeTpuCluster]:
    """Start the cluster, connect this process to it, and stop all of it at the end."""
    address_file = Path(get_ray_address_file(None))
    before = address_file.read_bytes() if address_file.is_file() else None
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 16,  # logical: Serve's actors reserve them
            "object_store_memory": STORE_BYTES,
            "include_dashboard": False,
            "node_ip_address": LOOPBACK,
        },
    )
    # Ray notes the newest cluster for `address="auto"`: that of somebody else, perhaps.
    if before is None:
        address_file.unlink(missing_ok=True)
    else:
        address_file.write_bytes(before)
    try:
        ray.init(address=cluster.address, namespace=namespace, log_to_driver=False)
        # Signal handlers can only be set by the main thread, and another one adds the hosts;
        # without the head they end by themselves.
        cluster._shutdown_at_exit = False
        fake = FakeTpuCluster(host, cluster)
        thread = threading.Thread(target=fake.watch, name="fake-autoscaler", daemon=True)
        thread.start()
        try:
            yield fake
        finally:
            fake.stop()
            thread.join(timeout=60)
            ray.shutdown()
    finally:
        cluster.shutdown()
