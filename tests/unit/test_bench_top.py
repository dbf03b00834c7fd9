"""The terminal view, against a fake server that answers with the real exposition."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from app.metrics import IngressMetrics
from bench.top import Scrape, main, parse, quantile, render, scrape
from replicas.wire import ReplicaLoad, ServiceStatus

LOAD = ReplicaLoad(
    num_running=3,
    num_waiting=2,
    num_slots=8,
    num_free_pages=25,
    num_pages=100,
    num_preemptions=4,
    num_prompt_tokens=200,
    num_cached_tokens=50,
    step_s=0.0125,
)


class Service:
    """Counts as an ingress does, and more between two scrapes."""

    def __init__(self) -> None:
        self.metrics = IngressMetrics("ingress-1")
        self.replicas = {"app#Engine#1": LOAD, "app#Engine#2": ReplicaLoad()}
        self.num_scrapes = 0
        self.keys: list[str | None] = []

    def text(self) -> bytes:
        self.num_scrapes += 1
        status = ServiceStatus(
            ready=True,
            replicas=self.replicas,
            num_queued=7,
            num_queued_tokens=0,
            num_inflight=5,
            model_info=None,
        )
        text = self.metrics.render(status)
        for _ in range(100):
            self.metrics.request_ended("/v1/completions", 200, 1.0)
            self.metrics.time_to_first_token.observe(0.05)
            self.metrics.output_tokens.inc(10)
        return text


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def url(service: Service) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/metrics"
            service.keys.append(self.headers["Authorization"])
            body = service.text()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_running_service_is_shown(
    url: str, service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    main([f"{url}/", "--once", "--interval", "0.05", "--api-key", "secret"])
    text = capsys.readouterr().out
    assert service.keys == ["Bearer secret"] * 2
    rates = re.search(r"([\d.]+) requests/s +([\d.]+) output tokens/s", text)
    assert rates is not None
    assert float(rates[2]) == pytest.approx(10 * float(rates[1]), rel=0.01)
    assert 0 < float(rates[1]) <= 100 / 0.05
    ttft = re.search(r"TTFT +P50 ([\d.]+) ms", text)
    assert ttft is not None
    assert 46 <= float(ttft[1]) <= 68  # the bounds around 50 ms
    assert "TPOT      P50 -" in text
    assert "queued 7   in flight 5" in text
    assert re.search(r"app#Engine#1 +3/8 +2 +75% +4 +25% +0 +12\.5 ms", text)
    assert re.search(r"app#Engine#2 +0/0 +0 +- +0 +- ", text)


def test_nothing_is_subtracted_from_another_ingress_replica(service: Service) -> None:
    before = parse(service.text().decode(), at_s=0.0)
    service.metrics = IngressMetrics("ingress-2")
    after = parse(service.text().decode(), at_s=1.0)
    assert "requests/s" not in render(before, after)
    again = parse(service.text().decode(), at_s=2.0)
    assert "100.0 requests/s" in render(after, again)


def test_a_service_without_replicas_says_so(service: Service) -> None:
    service.replicas = {}
    assert "no replica takes requests" in render(None, parse(service.text().decode(), at_s=0.0))


def test_a_service_that_is_not_there_is_an_error() -> None:
    with pytest.raises(SystemExit, match=r"http://127\.0\.0\.1:9: "):
        main(["http://127.0.0.1:9", "--once"])


def test_a_scrape_keeps_names_labels_and_values(url: str) -> None:
    found = scrape(url)
    assert found.ingress == "ingress-1"
    assert found.total("systole_engine_running", replica="app#Engine#1") == 3
    assert found.total("systole_engine_running") == 3
    assert found.total("systole_no_such_series") == 0


def histogram(*counts: tuple[str, float]) -> Scrape:
    return parse("\n".join(f'h_bucket{{le="{le}"}} {count}' for le, count in counts), at_s=0.0)


@pytest.mark.parametrize(
    ("share", "expected"), [(0.5, 1.5), (0.25, 1.0), (0.9, 3.2), (1.0, 4.0), (0.0, 0.0)]
)
def test_quantiles_are_linear_within_a_bucket(share: float, expected: float) -> None:
    before = histogram(("1.0", 5), ("2.0", 5), ("4.0", 5), ("+Inf", 5))
    after = histogram(("1.0", 10), ("2.0", 20), ("4.0", 25), ("+Inf", 25))
    assert quantile(share, before, after, "h") == pytest.approx(expected)


def test_a_quantile_beyond_the_last_bound_is_that_bound_and_of_nothing_is_nan() -> None:
    none = histogram(("1.0", 0), ("+Inf", 0))
    assert quantile(0.9, none, histogram(("1.0", 1), ("+Inf", 10)), "h") == 1.0
    assert math.isnan(quantile(0.9, none, none, "h"))
