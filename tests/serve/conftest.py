"""One Ray cluster for most tests of this directory: local, loopback only, on ports of its own.

Those that need what `make serve` starts, HAProxy first, share one such service.

With `--service-url URL` the tests of test_api.py drive a service that runs elsewhere, as
`python -m tests.clients` does; those that need its handle are left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import ray
from ray import serve

from app.launch_config import find_free
from tests.make_serve import MakeServe


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--service-url", help="root of a running service to test, without a cluster")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--service-url") is None:
        return
    inside = [i for i in items if isinstance(i, pytest.Function) and "handle" in i.fixturenames]
    config.hook.pytest_deselected(items=inside)
    items[:] = [item for item in items if item not in inside]


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
def serve_ports(ray_cluster: None) -> Iterator[tuple[int, int]]:
    """Serve, listening on these ports for HTTP and gRPC."""
    ports = find_free(), find_free()
    servicer = "app.grpc.generation_pb2_grpc.add_GenerationServicer_to_server"
    serve.start(
        http_options={"host": "127.0.0.1", "port": ports[0]},
        grpc_options={"port": ports[1], "grpc_servicer_functions": [servicer]},
    )
    yield ports
    serve.shutdown()


@pytest.fixture(scope="session")
def serve_port(serve_ports: tuple[int, int]) -> int:
    """Serve's HTTP port on the loopback; tests deploy applications with `serve.run`."""
    return serve_ports[0]


@pytest.fixture(scope="session")
def services() -> Iterator[list[MakeServe]]:
    """Every `make serve` that `server` has started."""
    services: list[MakeServe] = []
    yield services
    for service in services:
        service.end()


@pytest.fixture
def server(services: list[MakeServe]) -> MakeServe:
    """`make serve` with the shipped configuration: the last test's, unless that has stopped it."""
    if not services or services[-1].process.poll() is not None:
        services.append(MakeServe(port=find_free()))
        services[-1].wait_until_ready()
    return services[-1]
