"""One Ray cluster for all tests of this directory: local, loopback only, on ports of its own."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
import ray
from ray import serve


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local cluster that this session starts and stops; token authentication is Ray's default."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        address="local",
        num_cpus=16,  # logical: every Serve actor reserves one
        include_dashboard=False,
        log_to_driver=False,
        namespace="systole-test",
        _node_ip_address="127.0.0.1",
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def serve_port(ray_cluster: None) -> Iterator[int]:
    """Serve, listening on this port of the loopback; tests deploy applications with `serve.run`."""
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield port
    serve.shutdown()
