"""Models, probes, metrics, keys and request ids over HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from openai.types import Model
from prometheus_client.parser import text_string_to_metric_families

from app.auth import hash_key
from app.version import VERSION
from replicas.wire import ReplicaLoad, StartupProgress
from tests.http_server import MODEL, MakeServer, body


async def test_models_are_listed_and_found_by_id(make_server: MakeServer) -> None:
    client = make_server().client
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    [model] = [Model.model_validate(model) for model in listed["data"]]
    assert model.id == MODEL
    assert (await client.get(f"/v1/models/{MODEL}")).json() == listed["data"][0]
    answer = await client.get("/v1/models/other")
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")


async def test_ready_follows_the_replicas(make_server: MakeServer) -> None:
    server = make_server()
    answer = await server.client.get("/ready")
    assert answer.status == 200
    assert answer.json()["ready"] is True
    server.fake.state = dataclasses.replace(
        server.fake.state,
        ready=False,
        replicas={},
        model_info=None,
        startup=(StartupProgress(replica_id="r", stage="compile", done=3, total=9),),
    )
    answer = await server.client.get("/ready")
    assert answer.status == 503
    progress = answer.json()
    assert (progress["ready"], progress["stage"]) == (False, "compile")
    assert (progress["done"], progress["total"]) == (3, 9)
    assert (await server.client.get("/health")).status == 200


async def test_a_server_that_is_starting_says_503(make_server: MakeServer) -> None:
    server = make_server()
    server.fake.state = dataclasses.replace(server.fake.state, ready=False, model_info=None)
    answer = await server.client.post("/v1/completions", body())
    assert (answer.status, answer.error["code"]) == (503, "engine_not_ready")
    assert int(answer.headers["retry-after"]) > 0
    assert (await server.client.get("/v1/models")).status == 200
    assert (await server.client.get("/version")).json()["version"] == VERSION


async def test_probes_answer_while_the_router_is_silent(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server()
    monkeypatch.setattr("app.token_client.STATUS_TIMEOUT_S", 0.01)

    async def never() -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(server.fake, "status", never)
    answer = await server.client.get("/ready")
    assert (answer.status, answer.json()["stage"]) == (503, "starting the router")
    assert (await server.client.get("/metrics")).status == 200


async def test_metrics_count_requests_and_show_engines(make_server: MakeServer) -> None:
    server = make_server(num_cached_tokens=1)
    server.fake.state = dataclasses.replace(
        server.fake.state,
        replicas={"r1": ReplicaLoad(num_compiles_after_warmup=2, num_steps=7, step_s=0.5)},
        num_queued=4,
        num_inflight=3,
    )
    whole = (await server.client.post("/v1/completions", body())).json()
    await server.client.post("/v1/completions", body(temperature=9))
    answer = await server.client.get("/metrics")
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.body.decode())
        for sample in family.samples
    }
    ingress = ("ingress", "ingress-1")
    path = ("endpoint", "/v1/completions")
    assert samples["systole_requests_total", (path, ingress, ("status", "200"))] == 1
    assert samples["systole_requests_total", (path, ingress, ("status", "400"))] == 1
    assert samples["systole_time_to_first_token_seconds_count", (ingress,)] == 1
    num_tokens = whole["usage"]["completion_tokens"]
    assert samples["systole_output_tokens_total", (ingress,)] == num_tokens
    assert samples["systole_inter_token_latency_seconds_count", (ingress,)] == num_tokens - 1
    assert samples["systole_time_per_output_token_seconds_count", (ingress,)] == 1
    assert samples["systole_prompt_tokens_total", (ingress,)] == whole["usage"]["prompt_tokens"]
    assert samples["systole_cached_prompt_tokens_total", (ingress,)] == 1
    assert samples["systole_request_duration_seconds_count", (path, ingress)] == 2
    assert samples["systole_requests_in_progress", (ingress,)] == 0
    replica = (("replica", "r1"),)
    assert samples["systole_engine_compiles_after_warmup_total", replica] == 2
    assert samples["systole_engine_steps_total", replica] == 7
    assert samples["systole_engine_step_seconds", replica] == 0.5
    assert samples["systole_router_queued_requests", ()] == 4
    assert samples["systole_router_inflight_requests", ()] == 3
    assert samples["systole_token_sink_entries", (ingress,)] == 0


async def test_keys_protect_everything_but_the_probes(make_server: MakeServer) -> None:
    server = make_server(config={"key_hashes": frozenset({hash_key(b"secret")})})
    paths = ["/v1/models", "/v1/models/x", "/metrics", "/version", "/v1/nothing", "/healthx"]
    for path in paths:
        for headers in ({}, {"authorization": "Bearer wrong"}):
            answer = await server.client.get(path, headers)
            assert (answer.status, answer.error["code"]) == (401, "invalid_api_key"), path
            assert answer.headers["www-authenticate"] == "Bearer"
    answer = await server.client.post("/v1/completions", b"x" * (50 << 20))
    assert answer.status == 401
    assert server.client.num_body_chunks_taken == 0
    for path in ("/health", "/ready"):
        assert (await server.client.get(path)).status == 200
    allowed = await server.client.get("/v1/models", {"authorization": "Bearer secret"})
    assert allowed.status == 200


@pytest.mark.parametrize("given", ["req-1", "a" * 128])
async def test_a_request_id_is_echoed(make_server: MakeServer, given: str) -> None:
    client = make_server().client
    for answer in (
        await client.post("/v1/completions", body(), {"x-request-id": given}),
        await client.post("/v1/completions", body(stream=True), {"x-request-id": given}),
        await client.get("/v1/nothing", {"x-request-id": given}),
    ):
        assert answer.headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "has space", "a" * 129])
async def test_an_unusable_request_id_is_replaced(make_server: MakeServer, given: str) -> None:
    answer = await make_server().client.get("/health", {"x-request-id": given})
    assert answer.headers["x-request-id"] not in ("", given)


def test_the_version_is_pyprojects() -> None:
    import tomllib

    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    assert tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["version"] == VERSION
