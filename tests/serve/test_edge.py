"""What several ingress replicas share, and gRPC, over real Ray with a fake engine."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from ray import serve
from ray.serve.config import RequestRouterConfig

from app.audit import AuditConfig
from app.auth import hash_key
from app.grpc import generation_pb2 as pb
from app.grpc.generation_pb2_grpc import GenerationStub
from app.ingress import Ingress
from app.ingress_config import IngressConfig
from app.rate_limits import RateLimit, RateLimits
from app.router.deployment import RouterDeployment
from app.router.pinned import PinnedRequestRouter
from app.shared_state import SharedState, SharedStateConfig
from replicas.config import EngineConfig
from replicas.deployment import EngineDeployment
from tests.fakes import FakeEngineOptions, StartFakeEngine
from tests.tiny_tokenizer import write_model_dir

pytestmark = pytest.mark.ray

LIMITS = RateLimits(keys={"limited": RateLimit(requests_per_minute=5)})
KEYS = {hash_key(b"k"): "free", hash_key(b"l"): "limited"}
NUM_INGRESSES = 2
# The fake engine draws ids that the tiny tokenizer does not have; as bytes they are text anyway.
SLOW: dict[str, Any] = {"prompt": [5], "max_tokens": 3000, "ignore_eos": True}


class Service:
    def __init__(self, url: str, grpc_target: str, audit_file: Path) -> None:
        self.url = url
        self.grpc_target = grpc_target
        self.audit_file = audit_file

    async def ask(
        self, method: str, path: str, body: object = None, *, key: str = "k"
    ) -> tuple[int, Any, dict[str, str]]:
        """A request over a connection of its own, so that any ingress replica may get it."""
        headers = {"Authorization": f"Bearer {key}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.request(method, self.url + path, json=body) as response,
        ):
            return response.status, await response.json(), dict(response.headers)

    async def num_running(self) -> int:
        _, status, _ = await self.ask("POST", "/admin/resume", {}, key="admin")
        return status["num_running_requests"]

    async def until_running(self, num_requests: int) -> None:
        for _ in range(200):
            if await self.num_running() == num_requests:
                return
            await asyncio.sleep(0.05)
        pytest.fail(f"there are not {num_requests} running requests after 10 s")


@pytest.fixture(scope="module")
def service(
    serve_ports: tuple[int, int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp("edge")
    audit_file = directory / "audit.jsonl"
    options: dict[str, Any] = {
        "max_ongoing_requests": 1000,
        "ray_actor_options": {"num_cpus": 0},
        "graceful_shutdown_timeout_s": 2,
        "graceful_shutdown_wait_loop_s": 0.1,
    }
    engine = serve.deployment(
        EngineDeployment,
        name="Engine",
        request_router_config=RequestRouterConfig(request_router_class=PinnedRequestRouter),
        **options,
    ).bind(EngineConfig(model="fake"), StartFakeEngine(FakeEngineOptions(step_s=0.01)))
    router = serve.deployment(RouterDeployment, name="Router", **options).bind(engine)
    shared = serve.deployment(SharedState, name="SharedState", **options).bind(
        SharedStateConfig(limits=LIMITS)
    )
    config = IngressConfig(
        model_dir=str(write_model_dir(directory / "tiny")),
        model_id="tiny",
        key_hashes=frozenset(KEYS),
        key_names=KEYS,
        admin_key_hashes=frozenset({hash_key(b"admin")}),
        limits=LIMITS,
        audit=AuditConfig(file=str(audit_file)),
    )
    application = serve.deployment(
        serve.ingress()(Ingress), name="Ingress", num_replicas=NUM_INGRESSES, **options
    ).bind(router, config, shared)
    serve.run(application, name="edge", route_prefix="/edge")
    http_port, grpc_port = serve_ports
    yield Service(f"http://127.0.0.1:{http_port}/edge", f"127.0.0.1:{grpc_port}", audit_file)
    serve.delete("edge")


@pytest.fixture
async def stub(service: Service) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(service.grpc_target) as channel:
        yield GenerationStub(channel)


def metadata(key: str = "k", **others: str) -> list[tuple[str, str]]:
    named = [(name.replace("_", "-"), value) for name, value in others.items()]
    return [("application", "edge"), ("authorization", f"Bearer {key}"), *named]


async def test_ingress_replicas_do_not_multiply_a_limit(service: Service) -> None:
    body = {"prompt": [5], "max_tokens": 2}
    began_s = time.monotonic()
    answers = [await service.ask("POST", "/v1/completions", body, key="l") for _ in range(12)]
    minutes = (time.monotonic() - began_s) / 60
    statuses = [status for status, _, _ in answers]
    assert statuses[:5] == [200] * 5
    assert statuses.count(200) <= 5 * (1 + minutes)
    assert set(statuses) == {200, 429}
    _, content, headers = answers[statuses.index(429)]
    assert content["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(headers["Retry-After"]) <= 12
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert answers[0][2]["x-ratelimit-remaining-requests"] == "4"
    _, _, headers = await service.ask("POST", "/v1/completions", body)
    assert "x-ratelimit-limit-requests" not in headers


async def test_responses_are_seen_and_cancelled_at_every_ingress_replica(service: Service) -> None:
    body = {"input": "Hi", "max_output_tokens": 5, "model": "tiny"}
    status, made, _ = await service.ask("POST", "/v1/responses", body)
    assert (status, made["status"]) == (200, "incomplete")
    path = f"/v1/responses/{made['id']}"
    for _ in range(6):
        assert (await service.ask("GET", path))[1] == made
    assert (await service.ask("GET", path, key="l"))[0] in (404, 429)
    slow = {**body, "max_output_tokens": 3000, "background": True}
    _, begun, _ = await service.ask("POST", "/v1/responses", slow)
    assert begun["status"] == "in_progress"
    status, cancelled, _ = await service.ask("POST", f"/v1/responses/{begun['id']}/cancel")
    assert (status, cancelled["status"]) == (200, "cancelled")
    await service.until_running(0)
    assert (await service.ask("DELETE", path))[1]["deleted"] is True
    assert (await service.ask("GET", path))[0] == 404


async def test_grpc_generates_streams_and_refuses(service: Service, stub: Any) -> None:
    request = pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[5]), max_tokens=6, seed=7)
    whole = await stub.Generate(request, metadata=metadata())
    [choice] = whole.choices
    assert len(choice.token_ids) == 6
    assert choice.finish_reason == "length"
    assert whole.usage.completion_tokens == 6
    chunks = [chunk async for chunk in stub.Stream(request, metadata=metadata())]
    assert len(chunks) > 2, "a stream comes in pieces"
    assert [i for chunk in chunks for i in chunk.choice.token_ids] == list(choice.token_ids)
    assert "".join(chunk.choice.text for chunk in chunks) == choice.text
    assert chunks[-1].usage == whole.usage
    for call, code, param in (
        (stub.Generate(request, metadata=metadata("wrong")), "UNAUTHENTICATED", None),
        (
            stub.Generate(pb.GenerateRequest(prompt="x", temperature=9), metadata=metadata()),
            "INVALID_ARGUMENT",
            "temperature",
        ),
        (
            stub.Generate(pb.GenerateRequest(prompt="x", model="y"), metadata=metadata()),
            "NOT_FOUND",
            "model",
        ),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        trailing = dict(refused.value.trailing_metadata() or ())
        assert refused.value.code().name == code, refused.value.details()
        assert trailing.get("error-param") == param
    stream = stub.Stream(pb.GenerateRequest(prompt="x", top_p=7), metadata=metadata())
    last = await stream.read()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stream.read()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(refused.value.trailing_metadata() or ())["error-param"] == "top_p"
    assert last.error.param == "top_p"


async def read_all(stream: Any) -> None:
    while await stream.read() is not grpc.aio.EOF:
        pass


async def test_a_grpc_call_is_cancelled_by_another(service: Service, stub: Any) -> None:
    slow = pb.GenerateRequest(
        prompt_token_ids=pb.TokenIds(ids=[5]),
        max_tokens=3000,
        parameters_json='{"ignore_eos":true}',
    )
    stream = stub.Stream(slow, metadata=metadata(x_request_id="my-stream"))
    await stream.read()
    cancel = pb.CancelRequest(request_id="my-stream")
    assert not (await stub.Cancel(cancel, metadata=metadata("l"))).was_running
    assert (await stub.Cancel(cancel, metadata=metadata())).was_running
    with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
        await read_all(stream)
    await service.until_running(0)
    assert not (await stub.Cancel(cancel, metadata=metadata())).was_running


async def test_a_drained_service_finishes_what_it_has(service: Service) -> None:
    slow = asyncio.create_task(service.ask("POST", "/v1/completions", {**SLOW, "max_tokens": 100}))
    await service.until_running(1)
    _, status, _ = await service.ask("POST", "/admin/drain", {}, key="admin")
    assert (status["draining"], status["ready"]) == (True, False)
    for _ in range(4):
        refused, content, headers = await service.ask("POST", "/v1/completions", SLOW)
        assert (refused, headers["Retry-After"]) == (503, "5")
        assert "draining" in content["error"]["message"]
        assert (await service.ask("GET", "/ready"))[0] == 503
    assert (await slow)[0] == 200
    [replica] = status["replicas"]
    await service.ask("POST", "/admin/resume", {}, key="admin")
    _, status, _ = await service.ask("POST", "/admin/drain", {"replica": replica}, key="admin")
    assert status["replicas"][replica]["drained"] is True
    assert (await service.ask("POST", "/v1/completions", SLOW))[0] == 503
    await service.ask("POST", "/admin/resume", {"replica": replica}, key="admin")
    body = {"prompt": [5], "max_tokens": 2}
    assert (await service.ask("POST", "/v1/completions", body))[0] == 200


async def test_all_ingress_replicas_write_one_audit_file(service: Service) -> None:
    for _ in range(8):
        await service.ask("POST", "/v1/completions", {"prompt": [5], "max_tokens": 2})
    lines = [json.loads(line) for line in service.audit_file.read_text().splitlines()]
    endpoints = {line["endpoint"] for line in lines}
    assert {"/edge/v1/completions", "/systole.v1.Generation/Stream"} <= endpoints
    assert {line["key"] for line in lines} == {"free", "limited"}
    assert {line["outcome"] for line in lines} >= {"ok", "refused", "client_left"}
