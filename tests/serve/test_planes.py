"""Client, router and engine replicas over real Ray, with a fake engine: who gets which tokens."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.util
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from app.client import LLMClient
from app.router.config import RouterConfig
from app.router.deployment import RouterDeployment
from app.router.pinned import PinnedRequestRouter
from replicas.config import EngineConfig, TracingConfig
from replicas.deployment import EngineDeployment
from replicas.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineNotReady,
    Overloaded,
    ServingError,
)
from replicas.wire import FinishReason, RoutingHints, SamplingParams, ServiceStatus
from tests.fakes import KILL_TOKEN, FakeEngineOptions, StartFakeEngine, fake_output

pytestmark = pytest.mark.ray


ONE_LOOP = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}
"""What RAY_SERVE_THROUGHPUT_OPTIMIZED changes for replicas that are not the ingress."""


def deploy(
    name: str,
    options: FakeEngineOptions,
    *,
    num_replicas: int = 1,
    router: RouterConfig | None = None,
    env_vars: dict[str, str] | None = None,
    tracing: TracingConfig | None = None,
) -> DeploymentHandle[Any]:
    actor_options = {"num_cpus": 0, "runtime_env": {"env_vars": env_vars or {}}}
    engine = serve.deployment(
        EngineDeployment,
        name="Engine",
        num_replicas=num_replicas,
        max_ongoing_requests=1000,
        ray_actor_options=actor_options,
        request_router_config=RequestRouterConfig(request_router_class=PinnedRequestRouter),
        graceful_shutdown_timeout_s=30,
        health_check_period_s=1,
        graceful_shutdown_wait_loop_s=0.1,
    ).bind(EngineConfig(model="fake"), StartFakeEngine(options), tracing=tracing)
    router_app = serve.deployment(
        RouterDeployment,
        name="Router",
        max_ongoing_requests=1000,
        ray_actor_options=actor_options,
        graceful_shutdown_wait_loop_s=0.1,
    ).bind(engine, router or RouterConfig(), tracing=tracing)
    return serve.run(router_app, name=name, route_prefix=None)


async def until(
    client: LLMClient, condition: Callable[[ServiceStatus], bool], *, timeout_s: float = 30
) -> ServiceStatus:
    give_up_at = time.monotonic() + timeout_s
    while True:
        status = await client.status()
        if condition(status):
            return status
        assert time.monotonic() < give_up_at, status
        await asyncio.sleep(0.05)


def is_idle(status: ServiceStatus) -> bool:
    """Bookings, queue, slots and pages are all back where they started."""
    return (
        status.ready
        and not status.num_queued
        and not status.num_inflight
        and all(
            load.num_running == load.num_waiting == 0 and load.num_free_pages == load.num_pages
            for load in status.replicas.values()
        )
    )


@asynccontextmanager
async def connected(
    handle: DeploymentHandle[Any], *, num_replicas: int = 1
) -> AsyncIterator[LLMClient]:
    client = LLMClient(handle, host="127.0.0.1")
    try:
        await until(client, lambda status: len(status.replicas) == num_replicas)
        yield client
        await until(client, is_idle)
        assert client.num_open == 0
    finally:
        await client.close()


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the two replicas and their router write their spans."""
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module", params=["separate threads", "one loop"])
def two_replicas(
    serve_port: int, traces: Path, request: pytest.FixtureRequest
) -> Iterator[DeploymentHandle[Any]]:
    env_vars = ONE_LOOP if request.param == "one loop" else {}
    tracing = TracingConfig(exporter="file", directory=str(traces))
    yield deploy("two", FakeEngineOptions(), num_replicas=2, env_vars=env_vars, tracing=tracing)
    serve.delete("two")


def read_spans(traces: Path, trace_id: str) -> dict[str, dict[str, Any]]:
    """What has been written of a trace so far, by name."""
    lines = [line for file in traces.iterdir() for line in file.read_text().splitlines()]
    spans = [json.loads(line) for line in lines if trace_id in line and line.endswith("}")]
    return {span["name"]: span for span in spans}


async def test_a_request_is_one_trace_through_router_and_replica(
    two_replicas: DeploymentHandle[Any], traces: Path
) -> None:
    trace_id, client_span = secrets.token_hex(16), secrets.token_hex(8)
    async with connected(two_replicas, num_replicas=2) as client:
        await client.complete(
            (1, 2, 3),
            SamplingParams(max_tokens=3),
            traceparent=f"00-{trace_id}-{client_span}-01",
        )
    give_up_at = time.monotonic() + 20
    while len(spans := read_spans(traces, trace_id)) < 6:
        assert time.monotonic() < give_up_at, spans
        await asyncio.sleep(0.1)
    names = {span["context"]["span_id"]: name for name, span in spans.items()}
    assert {n: names.get(s["parent_id"], s["parent_id"]) for n, s in spans.items()} == {
        "router": f"0x{client_span}",
        "router.queue": "router",
        "engine": "router",
        "engine.queue": "engine",
        "engine.prefill": "engine",
        "engine.decode": "engine",
    }
    replica = spans["engine"]["attributes"]["systole.replica.id"]
    assert spans["router.queue"]["attributes"]["systole.replica.id"] == replica


async def test_sixteen_parallel_choices_complete(two_replicas: DeploymentHandle[Any]) -> None:
    async with connected(two_replicas, num_replicas=2) as client:
        completions = await asyncio.wait_for(
            asyncio.gather(
                *(
                    client.complete((1, 2, 3), SamplingParams(max_tokens=20, seed=seed))
                    for seed in range(16)
                )
            ),
            timeout=30,
        )
    for seed, completion in enumerate(completions):
        assert completion.token_ids == fake_output((1, 2, 3), 20, seed=seed)
        assert completion.result.finish_reason is FinishReason.LENGTH
    assert len({completion.result.replica_id for completion in completions}) == 2


class FanOut:
    """A user's own deployment: many choices within one Serve request."""

    def __init__(self, router: DeploymentHandle[Any]) -> None:
        self._client = LLMClient(router, host="127.0.0.1")

    async def __call__(self, num_choices: int) -> list[tuple[int, ...]]:
        completions = await asyncio.gather(
            *(
                self._client.complete((7, 8), SamplingParams(max_tokens=5, seed=seed))
                for seed in range(num_choices)
            )
        )
        return [completion.token_ids for completion in completions]


async def test_choices_of_one_serve_request_do_not_hang(
    two_replicas: DeploymentHandle[Any],
) -> None:
    deployment = serve.deployment(FanOut, ray_actor_options={"num_cpus": 0})
    fan_out = serve.run(deployment.bind(two_replicas), name="fan-out", route_prefix=None)
    try:
        for _ in range(5):
            answer = await asyncio.wait_for(fan_out.remote(16), timeout=30)
            assert answer == [fake_output((7, 8), 5, seed=seed) for seed in range(16)]
    finally:
        serve.delete("fan-out")


async def test_a_stream_arrives_in_order_and_ends_with_its_result(
    two_replicas: DeploymentHandle[Any],
) -> None:
    async with connected(two_replicas, num_replicas=2) as client:
        deltas = [
            delta
            async for delta in client.generate((5,), SamplingParams(max_tokens=30), request_id="r")
        ]
    received: list[int] = []
    for delta in deltas:
        assert delta.request_id == "r"
        assert delta.start_index == len(received)
        received += delta.token_ids
    assert tuple(received) == fake_output((5,), 30)
    assert [delta.result for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    result = deltas[-1].result
    assert result is not None
    assert (result.num_output_tokens, result.num_prompt_tokens) == (30, 1)


async def test_leaving_a_stream_aborts_the_request(two_replicas: DeploymentHandle[Any]) -> None:
    async with connected(two_replicas, num_replicas=2) as client:
        stream = client.generate((1,), SamplingParams(max_tokens=4000))
        await anext(stream)
        await stream.aclose()
        assert client.num_open == 0
        # Without the abort the request would run for 20 s.
        await until(client, is_idle, timeout_s=5)


async def test_cancelling_before_the_first_token_aborts_the_request(
    two_replicas: DeploymentHandle[Any],
) -> None:
    async with connected(two_replicas, num_replicas=2) as client:
        tasks = [
            asyncio.create_task(client.complete((1,), SamplingParams(max_tokens=4000)))
            for _ in range(40)
        ]
        for delay_s, task in enumerate(tasks):
            await asyncio.sleep(delay_s % 4 * 0.001)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(task.cancelled() for task in tasks)
        await until(client, is_idle, timeout_s=5)


async def test_refusals_of_the_engine_reach_the_caller(
    two_replicas: DeploymentHandle[Any],
) -> None:
    async with connected(two_replicas, num_replicas=2) as client:
        with pytest.raises(ContextLengthExceeded, match="the context holds 4096"):
            await client.complete((1,) * 4000, SamplingParams(max_tokens=200))


async def test_a_spent_time_budget_ends_a_running_request(
    two_replicas: DeploymentHandle[Any],
) -> None:
    async with connected(two_replicas, num_replicas=2) as client:
        with pytest.raises(DeadlineExceeded):
            await client.complete((1,), SamplingParams(max_tokens=4000), timeout_s=0.3)
        await until(client, is_idle, timeout_s=5)


async def test_overload_is_refused_and_the_rest_completes(serve_port: int) -> None:
    handle = deploy(
        "small",
        FakeEngineOptions(num_slots=2),
        router=RouterConfig(max_queued_requests=4, max_waiting_per_replica=1),
    )
    async with connected(handle) as client:
        answers = await asyncio.gather(
            *(client.complete((1,), SamplingParams(max_tokens=40)) for _ in range(20)),
            return_exceptions=True,
        )
    refused = [answer for answer in answers if isinstance(answer, Overloaded)]
    assert len(refused) == 20 - 2 - 1 - 4
    assert all(error.retry_after_s is not None and error.retry_after_s >= 1 for error in refused)
    assert not [a for a in answers if isinstance(a, ServingError) and not isinstance(a, Overloaded)]
    serve.delete("small")


async def test_two_tenants_at_ten_to_one_get_equal_service(serve_port: int) -> None:
    """The light one comes last, to a queue that the heavy one has filled."""
    handle = deploy(
        "shared",
        FakeEngineOptions(num_slots=2, step_s=0.02),
        router=RouterConfig(max_queued_requests=16, max_waiting_per_replica=0),
    )
    served: list[str] = []
    refused: list[str] = []
    async with connected(handle) as client:

        async def ask(tenant: str, num_prompt_tokens: int, max_tokens: int) -> None:
            try:
                await client.complete(
                    (1,) * num_prompt_tokens,
                    SamplingParams(max_tokens=max_tokens),
                    hints=RoutingHints(tenant=tenant),
                )
            except Overloaded:
                refused.append(tenant)
            else:
                served.append(tenant)

        async with asyncio.TaskGroup() as group:
            # Nothing is served before all are there, however slow the machine is.
            blocking = [group.create_task(ask("neither", 1, 3000)) for _ in range(2)]
            await until(client, lambda status: status.num_inflight == 2)
            for _ in range(60):
                group.create_task(ask("heavy", 1, 8))
            await until(client, lambda status: status.num_queued == 16 and len(refused) == 44)
            for _ in range(6):
                group.create_task(ask("light", 3, 8))
            await until(client, lambda status: status.num_queued_tokens == 10 + 6 * 3)
            for task in blocking:
                task.cancel()
    assert refused == ["heavy"] * 50
    assert len(served) == 16
    # Two run at a time; in turns, the last of the light one's six is the twelfth or so.
    for count in (4, 8, 12):
        assert abs(served[:count].count("light") - count / 2) <= 1, served
    serve.delete("shared")


async def test_a_killed_replica_costs_no_token(serve_port: int, tmp_path: Path) -> None:
    options = FakeEngineOptions(step_s=0.02, kill_marker=str(tmp_path / "killed"))
    handle = deploy("fragile", options, num_replicas=2)
    async with connected(handle, num_replicas=2) as client:
        prompts = [(KILL_TOKEN, 1)] + [(9, n) for n in range(15)]
        completions = await asyncio.wait_for(
            asyncio.gather(*(client.complete(p, SamplingParams(max_tokens=60)) for p in prompts)),
            timeout=60,
        )
        assert (tmp_path / "killed").exists()
        for prompt, completion in zip(prompts, completions, strict=True):
            assert completion.token_ids == fake_output(prompt, 60)
            assert completion.result.num_prompt_tokens == 2
            assert completion.result.num_output_tokens == 60
        # All of them ended on the survivor: the other half migrated.
        survivors = {completion.result.replica_id for completion in completions}
        assert len(survivors) == 1
    serve.delete("fragile")


def kill_replica(app_name: str, deployment_name: str) -> None:
    """SIGKILL, as far as the cluster can tell."""
    prefix = f"SERVE_REPLICA::{app_name}#{deployment_name}#"
    (name,) = (
        actor["name"]
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["name"].startswith(prefix)
    )
    ray.kill(ray.get_actor(name, namespace="serve"))


async def test_a_killed_router_costs_no_token(serve_port: int) -> None:
    handle = deploy("headless", FakeEngineOptions(step_s=0.02), num_replicas=2)
    async with connected(handle, num_replicas=2) as client:
        tasks = [
            asyncio.create_task(client.complete((4, n), SamplingParams(max_tokens=200)))
            for n in range(16)
        ]
        await until(client, lambda status: status.num_inflight > 0)
        kill_replica("headless", "Router")
        completions = await asyncio.wait_for(asyncio.gather(*tasks), timeout=60)
        for n, completion in enumerate(completions):
            assert completion.token_ids == fake_output((4, n), 200)
    serve.delete("headless")


async def test_scaling_down_breaks_no_stream(serve_port: int) -> None:
    options = FakeEngineOptions(step_s=0.02)
    handle = deploy("shrinking", options, num_replicas=2)
    async with connected(handle, num_replicas=2) as client:
        tasks = [
            asyncio.create_task(client.complete((5, n), SamplingParams(max_tokens=400)))
            for n in range(16)
        ]
        await until(client, lambda s: all(load.num_running for load in s.replicas.values()))
        before = await client.status()
        await asyncio.to_thread(deploy, "shrinking", options, num_replicas=1)
        await until(client, lambda status: len(status.replicas) == 1, timeout_s=6)
        after = await client.complete((6,), SamplingParams(max_tokens=5))
        completions = await asyncio.gather(*tasks)
        (survivor,) = (await client.status()).replicas
    assert [c.token_ids for c in completions] == [fake_output((5, n), 400) for n in range(16)]
    # Nothing migrated: what the leaving replica ran, it finished; new requests avoid it.
    assert {c.result.replica_id for c in completions} == set(before.replicas)
    assert after.result.replica_id == survivor
    serve.delete("shrinking")


async def test_a_dead_engine_is_migrated_from_and_replaced(serve_port: int) -> None:
    """The device thread dies and the process lives: health check, migration, new replica."""
    handle = deploy("sick", FakeEngineOptions(step_s=0.02, dies_at_step=60), num_replicas=1)
    async with connected(handle) as client:
        (first,) = (await client.status()).replicas
        completion = await asyncio.wait_for(
            client.complete((3,), SamplingParams(max_tokens=100)), timeout=60
        )
    assert completion.token_ids == fake_output((3,), 100)
    assert completion.result.replica_id != first
    serve.delete("sick")


async def find_client(app_name: str) -> LLMClient:
    """A client of an application that is still being deployed."""
    give_up_at = time.monotonic() + 60
    while True:
        try:
            handle = serve.get_deployment_handle("Router", app_name)
            client = LLMClient(handle, host="127.0.0.1")
            await client.status()
            return client
        except (KeyError, ServingError, RayServeException):
            assert time.monotonic() < give_up_at
            await asyncio.sleep(0.1)


async def test_a_starting_replica_shows_its_progress(serve_port: int, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    deployment = asyncio.create_task(
        asyncio.to_thread(
            deploy,
            "slow",
            FakeEngineOptions(start_gate=str(gate)),
            router=RouterConfig(discovery_s=0),
        )
    )
    client = await find_client("slow")
    try:
        status = await until(client, lambda status: bool(status.startup))
        assert not status.ready
        (progress,) = status.startup
        assert (progress.stage, progress.done, progress.total) == ("load weights", 1, 2)
        with pytest.raises(EngineNotReady) as caught:
            await client.complete((1,), SamplingParams(max_tokens=1))
        assert caught.value.retry_after_s
        gate.touch()
        await deployment
        status = await until(client, lambda status: status.ready)
        assert status.startup == ()
    finally:
        gate.touch()
        await client.close()
    serve.delete("slow")
