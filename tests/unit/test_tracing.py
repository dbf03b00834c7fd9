"""One trace from the HTTP edge through the router to the engine: parents, times, attributes."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import error_attributes, http_attributes, url_attributes

from app.completion_service import CompletionService
from app.demands import NO_HINTS
from app.http_api import create_app
from app.ingress_config import IngressConfig
from app.metrics import IngressMetrics
from app.router.trace import RouterTrace
from app.tokenizer import Tokenizer
from replicas import tracing as tracing_module
from replicas.config import TracingConfig
from replicas.errors import EngineDead, Overloaded, ServingError
from replicas.request_trace import record_request
from replicas.tracing import Tracing, check_exporter, start_tracing
from replicas.wire import (
    GenerateRequest,
    GenerateResult,
    ModelInfo,
    RoutingHints,
    SamplingParams,
    ServiceStatus,
    TokenDelta,
)
from tests.asgi_client import Client
from tests.fake_runner import NO_SINK, make_engine
from tests.tiny_tokenizer import write_model_dir

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CLIENT_SPAN = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{CLIENT_SPAN}-01"
INFO = ModelInfo(
    model_id="tiny",
    max_model_len=200,
    max_request_tokens=200,
    vocab_size=500,
    eos_token_ids=(),
    fingerprint="0123456789abcdef0123",
)


class TracedPipeline:
    """What the router's and the engine's deployments do with a request, without Ray."""

    def __init__(self, tracing: Tracing) -> None:
        self.num_open = 0
        self.failure: ServingError | None = None
        self.stops_after_first_token = False
        self.is_stuck = asyncio.Event()
        self._tracing = tracing

    async def status(self) -> ServiceStatus:
        return ServiceStatus(
            ready=True,
            replicas={},
            num_queued=0,
            num_queued_tokens=0,
            num_inflight=0,
            model_info=INFO,
        )

    async def close(self) -> None: ...

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
        priority: int = 0,
        cache_salt: str = "",
        traceparent: str | None = None,
        hints: RoutingHints = NO_HINTS,
    ) -> AsyncGenerator[TokenDelta]:
        request = GenerateRequest(
            hints=hints,
            request_id=f"{request_id}~1",
            prompt_token_ids=tuple(prompt_token_ids),
            sampling=sampling,
            sink=NO_SINK,
            traceparent=traceparent,
        )
        trace = RouterTrace(self._tracing, request)
        answer: GenerateResult | ServingError | None = None
        try:
            start_ns = time.time_ns()
            if self.failure is not None:
                answer = self.failure
                raise self.failure
            trace.decided("replica-1", queued_ns=start_ns, decision_s=1e-5)
            engine, _ = make_engine(num_pages=64)
            engine.add(request)
            start_ns = time.time_ns()
            while engine.has_work:
                for delta in engine.step().deltas:
                    answer = delta.result
                    yield delta
                    if self.stops_after_first_token:
                        self.is_stuck.set()
                        await asyncio.Event().wait()
        finally:
            engine_request = GenerateRequest(
                request_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                sampling=sampling,
                sink=NO_SINK,
                traceparent=trace.traceparent,
            )
            record_request(
                self._tracing,
                engine_request,
                answer,
                replica_id="replica-1",
                start_ns=start_ns,
                end_ns=time.time_ns(),
            )
            trace.ended(answer)


class Server:
    """The HTTP edge over the pipeline, and the spans that it has written."""

    def __init__(self, model_dir: Path, traces: Path) -> None:
        config = TracingConfig(exporter="file", directory=str(traces))
        self._traces = traces
        self.tracing = start_tracing(config, service="test", instance="1")
        assert self.tracing is not None
        self.pipeline = TracedPipeline(self.tracing)
        ingress = IngressConfig(model_dir=str(model_dir), model_id="tiny")
        metrics = IngressMetrics("ingress-1")
        service = CompletionService(self.pipeline, Tokenizer.load(model_dir), ingress, metrics)
        app = create_app(
            service, self.pipeline, ingress, metrics, tracing=self.tracing, echo_request_id=True
        )
        self.client = Client(app)

    def spans(self) -> dict[str, dict[str, Any]]:
        """By name; every span once."""
        assert self.tracing is not None
        self.tracing.shutdown()
        [file] = self._traces.glob("test-*.jsonl")
        spans = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        by_name = {span["name"]: span for span in spans}
        assert len(by_name) == len(spans)
        return by_name


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def server(model_dir: Path, tmp_path: Path) -> Iterator[Server]:
    server = Server(model_dir, tmp_path / "traces")
    yield server
    assert server.tracing is not None
    server.tracing.shutdown()


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "Hello", "max_tokens": 5, "seed": 7, **fields}


def parents(spans: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Name of each span's parent; "client" for the one that the request carried."""
    names = {span["context"]["span_id"]: name for name, span in spans.items()}
    names[f"0x{CLIENT_SPAN}"] = "client"
    return {name: names[span["parent_id"]] for name, span in spans.items() if span["parent_id"]}


async def test_a_request_makes_one_trace_with_the_right_parents(server: Server) -> None:
    answer = await server.client.post("/v1/completions", body(), {"traceparent": TRACEPARENT})
    assert answer.status == 200
    spans = server.spans()
    assert parents(spans) == {
        "POST /v1/completions": "client",
        "router": "POST /v1/completions",
        "router.queue": "router",
        "engine": "router",
        "engine.queue": "engine",
        "engine.prefill": "engine",
        "engine.decode": "engine",
    }
    assert {span["context"]["trace_id"] for span in spans.values()} == {f"0x{TRACE_ID}"}
    assert {span["status"]["status_code"] for span in spans.values()} == {"UNSET"}
    stages = [spans[f"engine.{stage}"] for stage in ("queue", "prefill", "decode")]
    assert stages[0]["start_time"] == spans["engine"]["start_time"]
    assert stages[-1]["end_time"] == spans["engine"]["end_time"]
    for before, after in itertools.pairwise(stages):
        assert before["start_time"] <= before["end_time"] == after["start_time"]


async def test_a_request_without_a_trace_begins_one(server: Server) -> None:
    await server.client.post("/v1/completions", body(stream=True), {"traceparent": "00-1-2-01"})
    spans = server.spans()
    assert spans["POST /v1/completions"]["parent_id"] is None
    assert len({span["context"]["trace_id"] for span in spans.values()}) == 1


async def test_a_client_that_asks_not_to_be_sampled_leaves_no_span(server: Server) -> None:
    unsampled = f"00-{TRACE_ID}-{CLIENT_SPAN}-00"
    answer = await server.client.post("/v1/completions", body(), {"traceparent": unsampled})
    assert answer.status == 200
    assert server.spans() == {}


async def test_attributes_have_the_conventions_names_and_say_what_happened(server: Server) -> None:
    answer = await server.client.post("/v1/completions", body(temperature=0.5))
    known = {
        value
        for module in (gen_ai_attributes, http_attributes, error_attributes, url_attributes)
        for name, value in vars(module).items()
        if name.isupper()
    }
    spans = server.spans()
    for span in spans.values():
        for name in span["attributes"]:
            assert name in known or name.startswith("systole."), name
    usage = answer.json()["usage"]
    attributes = spans["POST /v1/completions"]["attributes"]
    assert attributes.pop("gen_ai.response.time_to_first_chunk") > 0
    assert attributes.pop("systole.request.id")
    assert attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "url.path": "/v1/completions",
        "url.scheme": "http",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "systole",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.stream": False,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.seed": 7,
        "gen_ai.response.id": answer.json()["id"],
        "gen_ai.response.model": "tiny",
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ["length"],
    }
    assert spans["engine"]["attributes"]["gen_ai.usage.output_tokens"] == 5
    assert spans["router.queue"]["attributes"]["systole.replica.id"] == "replica-1"
    assert "Hello" not in json.dumps(spans)


async def test_a_seed_beyond_64_signed_bits_is_left_out(server: Server) -> None:
    await server.client.post("/v1/completions", body(seed=(1 << 64) - 1))
    attributes = server.spans()["POST /v1/completions"]["attributes"]
    assert "gen_ai.request.seed" not in attributes


@pytest.mark.parametrize(
    ("failure", "status", "kind", "http_status"),
    [
        (EngineDead("the device is gone"), "ERROR", "EngineDead", 500),
        # By the conventions a 4xx is no failure of the server's.
        (Overloaded("full", retry_after_s=1.0), "UNSET", "Overloaded", 429),
    ],
)
async def test_errors_show_in_every_span(
    server: Server, failure: ServingError, status: str, kind: str, http_status: int
) -> None:
    server.pipeline.failure = failure
    assert (await server.client.post("/v1/completions", body())).status == http_status
    spans = server.spans()
    http = spans["POST /v1/completions"]
    assert http["status"]["status_code"] == status
    assert http["attributes"]["http.response.status_code"] == http_status
    assert {span["attributes"]["error.type"] for span in spans.values()} == {kind}
    for name in ("router", "engine"):
        assert spans[name]["status"] == {"status_code": "ERROR", "description": str(failure)}


async def test_a_client_that_leaves_is_a_cancellation_in_every_span(server: Server) -> None:
    server.pipeline.stops_after_first_token = True
    raw = json.dumps(body(stream=True)).encode()
    await server.client.request(
        "POST", "/v1/completions", [raw], before_leaving=server.pipeline.is_stuck.wait
    )
    spans = server.spans()
    assert set(spans) == {"POST /v1/completions", "router", "router.queue", "engine"}
    for name in ("POST /v1/completions", "router", "engine"):
        assert spans[name]["status"]["status_code"] == "ERROR"
        assert spans[name]["attributes"]["error.type"] == "cancelled"


async def test_a_bad_request_has_a_span_of_its_own(server: Server) -> None:
    await server.client.post("/v1/completions", body(temperature=9))
    [span] = server.spans().values()
    assert span["attributes"]["error.type"] == "InvalidRequest"


def test_tracing_is_off_by_default() -> None:
    assert start_tracing(TracingConfig(), service="engine", instance="1") is None


def test_an_exporter_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TracingConfig(exporter="otlp", endpoint="http://127.0.0.1:4318/v1/traces")
    monkeypatch.setattr(tracing_module, "OTLP_MODULE", "no_such_package.exporter")
    with pytest.raises(ValueError, match="opentelemetry-exporter-otlp-proto-http"):
        check_exporter(config)
    with pytest.raises(ValueError, match="opentelemetry-exporter-otlp-proto-http"):
        start_tracing(config, service="engine", instance="1")


def test_an_exporter_that_is_installed_gets_the_endpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A stand-in with the constructor of the real one, which is not a dependency."""
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    class OTLPSpanExporter(InMemorySpanExporter):
        def __init__(self, endpoint: str | None = None) -> None:
            super().__init__()
            made.append((endpoint, self))

    made: list[tuple[str | None, InMemorySpanExporter]] = []
    (tmp_path / "fake_otlp.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    module = ModuleType("fake_otlp")
    module.OTLPSpanExporter = OTLPSpanExporter
    module.__spec__ = __spec__
    monkeypatch.setitem(sys.modules, "fake_otlp", module)
    monkeypatch.setattr(tracing_module, "OTLP_MODULE", "fake_otlp")
    endpoint = "http://127.0.0.1:4318/v1/traces"
    config = TracingConfig(exporter="otlp", endpoint=endpoint)
    tracing = start_tracing(config, service="engine", instance="1")
    assert tracing is not None
    tracing.start("a", parent=None).end()
    tracing.shutdown()
    [(given, exporter)] = made
    assert given == endpoint
    assert [span.name for span in exporter.get_finished_spans()] == ["a"]
