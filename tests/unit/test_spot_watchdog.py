"""The watchdog for preempted TPU VMs against a small TPU API on the loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.watchdog import load_watchdog

PARENT = "projects/p/locations/z"


watchdog = load_watchdog()


def node(name: str, state: str, *, cluster: str = "systole", kind: str = "worker") -> dict:
    return {
        "name": f"{PARENT}/nodes/{name}",
        "state": state,
        "acceleratorType": "v6e-4",
        "runtimeVersion": "v2-alpha-tpuv6e",
        "schedulingConfig": {"spot": True},
        "networkConfig": {"enableExternalIps": False},
        "labels": {
            "ray-cluster-name": cluster,
            "ray-node-type": kind,
            "ray-node-name": f"ray-{cluster}-worker",
        },
        "ipAddress": "10.0.0.7",
        "createTime": "2026-01-01T00:00:00Z",
    }


class FakeTpuApi:
    """Lists in pages, deletes and creates through operations that take a poll, and can fail."""

    def __init__(self) -> None:
        self.nodes: dict[str, dict[str, Any]] = {}
        self.created: dict[str, dict[str, Any]] = {}
        self.tokens: list[str | None] = []
        self.failing = 0
        self.pending: dict[str, str] = {}
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path, query = self._begin()
                if path == "token":
                    self._answer({"access_token": "secret", "expires_in": 3600})
                elif path.startswith("operations/"):
                    name = api.pending.pop(path, None)
                    if name is not None:
                        del api.nodes[name]
                    self._answer({"name": path, "done": True})
                elif path == f"{PARENT}/nodes":
                    names = sorted(api.nodes)
                    first = int(query.get("pageToken", ["0"])[0])
                    page: dict[str, Any] = {
                        "nodes": [api.nodes[n] for n in names[first : first + 2]]
                    }
                    if first + 2 < len(names):
                        page["nextPageToken"] = str(first + 2)
                    self._answer(page)

            def do_DELETE(self) -> None:
                path, _ = self._begin()
                if path not in api.nodes:
                    self._answer({"error": {"message": "no such node"}}, 404)
                    return
                operation = f"operations/{len(api.pending)}"
                api.pending[operation] = path
                self._answer({"name": operation, "done": False})

            def do_POST(self) -> None:
                _, query = self._begin()
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                api.created[query["nodeId"][0]] = body
                self._answer({"name": "operations/create", "done": False})

            def log_message(self, format: str, *args: object) -> None:
                del format, args

            def _begin(self) -> tuple[str, dict[str, list[str]]]:
                parts = urlsplit(self.path)
                if parts.path != "/token":
                    api.tokens.append(self.headers["Authorization"])
                return parts.path.removeprefix("/"), parse_qs(parts.query)

            def _answer(self, body: dict[str, Any], status: int = 200) -> None:
                if api.failing:
                    api.failing -= 1
                    status, body = 503, {"error": {"message": "try again"}}
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))

    def client(self, *, token: bool = False) -> Any:
        return watchdog.TpuApi(PARENT, self.url, f"{self.url}/token" if token else "")


@pytest.fixture
def api() -> Iterator[FakeTpuApi]:
    fake = FakeTpuApi()
    fake.thread.start()
    nodes = [
        node("healthy", "READY"),
        node("taken", "PREEMPTED"),
        node("ended", "TERMINATED"),
        node("paused", "STOPPED"),
        node("head", "PREEMPTED", kind="head"),
        node("others", "PREEMPTED", cluster="other"),
        {"name": f"{PARENT}/nodes/foreign", "state": "PREEMPTED"},
    ]
    fake.nodes = {item["name"]: item for item in nodes}
    yield fake
    fake.server.shutdown()
    fake.thread.join()
    fake.server.server_close()


def names(api: FakeTpuApi) -> set[str]:
    return {name.rpartition("/")[2] for name in api.nodes}


def test_only_lost_workers_of_the_cluster_are_deleted(api: FakeTpuApi) -> None:
    client = api.client()
    assert watchdog.sweep(client, "systole", recreate=False, poll_s=0.0) == 2
    assert names(api) == {"healthy", "paused", "head", "others", "foreign"}
    assert not api.created
    assert watchdog.sweep(client, "systole", recreate=False, poll_s=0.0) == 0


def test_the_same_is_ordered_again_and_nothing_that_describes_the_old(api: FakeTpuApi) -> None:
    watchdog.sweep(api.client(), "systole", recreate=True, poll_s=0.0)
    assert len(api.created) == 2
    for node_id, body in api.created.items():
        assert node_id.startswith("ray-systole-worker-")
        assert body["acceleratorType"] == "v6e-4"
        assert body["schedulingConfig"] == {"spot": True}
        assert body["networkConfig"] == {"enableExternalIps": False}
        assert body["labels"]["ray-cluster-name"] == "systole"
        assert not {"name", "state", "ipAddress", "createTime"} & set(body)


def test_the_order_names_the_accelerator_once() -> None:
    both = node("a", "PREEMPTED") | {"acceleratorConfig": {"type": "V6E", "topology": "2x2"}}
    body = watchdog.request_of(both)
    assert "acceleratorType" not in body
    assert body["acceleratorConfig"] == {"type": "V6E", "topology": "2x2"}


def test_a_node_that_somebody_else_deleted_is_no_error(api: FakeTpuApi) -> None:
    api.client().delete(f"{PARENT}/nodes/nobody", poll_s=0.0)


def test_a_failing_api_is_reported_and_the_next_sweep_finishes(
    api: FakeTpuApi, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        *("--project", "p", "--zone", "z", "--cluster", "systole"),
        *("--api", api.url, "--token-url", "", "--once"),
    ]
    api.failing = 1
    assert watchdog.main(arguments) == 1
    assert "HTTP 503" in capsys.readouterr().err
    assert "taken" in names(api)


def test_calls_carry_the_machine_s_token(api: FakeTpuApi) -> None:
    watchdog.sweep(api.client(token=True), "systole", recreate=False, poll_s=0.0)
    assert set(api.tokens) == {"Bearer secret"}
