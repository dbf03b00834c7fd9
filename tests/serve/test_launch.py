"""`make serve` as a newcomer meets it: it starts, says how to use it, drains and leaves nothing."""

from __future__ import annotations

import http.client
import json
import math
import re
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from app.launch_config import find_free, read_config
from app.process_tree import find_members
from bench.top import Scrape, parse
from tests.make_serve import ROOT, START_TIMEOUT_S, MakeServe
from tests.node_metrics import panel_queries, read_node_metrics, rule_queries
from tests.promql import evaluate, scalars

STOP_LIMIT_S = 15

pytestmark = [pytest.mark.ray, pytest.mark.timeout(START_TIMEOUT_S + 120)]


def test_the_printed_curl_line_answers(server: MakeServe) -> None:
    assert server.printed("URL") == f"http://127.0.0.1:{server.port}/v1"
    result = server.run(f"{server.printed('Try')} --silent --show-error")
    assert result.returncode == 0, result.stderr
    body = json.loads(result.stdout)
    assert body["usage"]["completion_tokens"] == 16
    assert body["choices"][0]["text"]


def test_the_printed_status_command_works_from_a_second_terminal(server: MakeServe) -> None:
    result = server.run(server.printed("Status"))
    assert result.returncode == 0, result.stderr
    assert "status: RUNNING" in result.stdout


def test_the_dashboard_takes_the_printed_token(server: MakeServe) -> None:
    url, token_file = re.fullmatch(
        r"(\S+)\s+\(token: cat (\S+)\)", server.printed("Dashboard")
    ).groups()
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
    connection.request("GET", "/api/serve/applications/")
    assert connection.getresponse().status == 401
    connection.close()
    token = Path(token_file).read_text().strip()
    connection.request(
        "GET", "/api/serve/applications/", headers={"Authorization": f"Bearer {token}"}
    )
    assert connection.getresponse().status == 200
    connection.close()


def test_rays_lines_go_to_the_log_and_progress_to_the_terminal(server: MakeServe) -> None:
    assert "Started a local Ray instance" in (ROOT / f"run/{server.port}/serve.log").read_text()
    assert not [line for line in server.lines if "pid=" in line]
    assert any(line.startswith("Starting Ray") for line in server.lines)
    assert server.lines[-4].startswith("  URL")


def scrape_all(server: MakeServe) -> Scrape:
    """The service's metrics and its node's, as one Prometheus would have them."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    members = find_members(server.process.pid, server.process.pid)
    return parse(f"{text}\n{read_node_metrics(members)}", at_s=time.monotonic())


UNSEEN = ("device_memory",)
"""A CPU does not count its memory."""


def test_every_query_of_dashboard_and_rules_runs_on_this_services_metrics(
    server: MakeServe,
) -> None:
    """Evaluated over two scrapes with traffic in between: each panel shows something."""
    deadline = time.monotonic() + 60
    while True:
        before = scrape_all(server)
        for _ in range(3):
            stream(server.port, 32, threading.Event(), [])
        time.sleep(3)  # replicas export once a second, the agent a little later
        after = scrape_all(server)
        empty = [
            query
            for query in panel_queries()
            if not any(name in query for name in UNSEEN)
            and not scalars(evaluate(query, before, after))
        ]
        unknown = [
            query
            for query in panel_queries()
            if query.startswith("histogram_quantile")
            and any(map(math.isnan, scalars(evaluate(query, before, after))))
        ]
        if not empty and not unknown:
            break
        assert time.monotonic() < deadline, "\n".join(["", *empty, "unknown", *unknown])
    fired = [query for query in rule_queries() if scalars(evaluate(query, before, after))]
    # Latencies of a busy test machine may fire; these may not.
    assert not [query for query in fired if "compiles" in query or "num_replicas" in query], fired


def test_no_port_is_shared_with_a_checkout_on_the_usual_ports(server: MakeServe) -> None:
    config = read_config(ROOT / f"run/{server.port}/serve_config.yaml")
    environment = config["applications"][0]["runtime_env"]["env_vars"]
    ports = {value for key, value in environment.items() if key.endswith("_PORT")}
    assert len(ports) == 5
    assert not ports & {"8404", "9101", "8500", "30000", "31000"}


def test_a_taken_port_is_said_in_a_line(server: MakeServe) -> None:
    second = MakeServe(port=server.port)
    second.wait_until_refused()
    assert f"port {server.port} on 127.0.0.1 is in use" in second.output
    assert "Traceback" not in second.output


def test_a_public_address_without_a_key_is_refused(server: MakeServe, tmp_path: Path) -> None:
    text = (ROOT / "serve_config.yaml").read_text().replace("host: 127.0.0.1", "host: 0.0.0.0")
    public = tmp_path / "public.yaml"
    public.write_text(text)
    port = find_free()
    refused = MakeServe(f"CONFIG={public}", port=port)
    refused.wait_until_refused()
    assert "no API key is configured" in refused.output
    assert "Traceback" not in refused.output
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", port)) != 0


def stream(port: int, num_tokens: int, started: threading.Event, chunks: list[bytes]) -> None:
    """Stream a completion; `started` is set at its first token."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"prompt": "Once upon a time", "max_tokens": num_tokens, "ignore_eos": True}
    model = "smollm2-135m-instruct"
    connection.request(
        "POST",
        "/v1/completions",
        json.dumps(body | {"model": model, "stream": True}),
        {"Content-Type": "application/json"},
    )
    response = connection.getresponse()
    for line in response:
        if line.startswith(b"data:"):
            chunks.append(line)
            started.set()
    connection.close()


def compiles_after_warmup(port: int) -> float:
    """The total over all replicas, from /metrics."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    values = re.findall(r"^systole_engine_compiles_after_warmup_total\{.*\} (\S+)$", text, re.M)
    assert values
    return sum(map(float, values))


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def check_drain(server: MakeServe, signal_number: signal.Signals) -> None:
    """Stop a server in the middle of a stream: that is finished, and no process is left."""
    members = find_members(server.process.pid, server.process.pid)
    assert len(members) > 5
    started, chunks = threading.Event(), list[bytes]()
    client = threading.Thread(target=stream, args=(server.port, 64, started, chunks))
    client.start()
    assert started.wait(timeout=60)
    assert compiles_after_warmup(server.port) == 0
    took_s = server.stop(signal_number)
    client.join()
    assert chunks[-1].strip() == b"data: [DONE]", "the running stream was cut"
    assert took_s <= STOP_LIMIT_S
    assert "Traceback" not in server.output
    # An orphan that has ended stays a zombie until init looks for it.
    assert not [pid for pid in members if is_running(pid)]


def test_sigint_to_make_drains_and_leaves_the_neighbour_alone(server: MakeServe) -> None:
    neighbour = MakeServe(port=find_free())
    try:
        neighbour.wait_until_ready()
        check_drain(neighbour, signal.SIGINT)
    finally:
        neighbour.end()
    assert server.run(f"{server.printed('Try')} --silent --fail").returncode == 0


def test_sigterm_to_make_drains(server: MakeServe) -> None:
    check_drain(server, signal.SIGTERM)
