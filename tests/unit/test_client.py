"""The client against replicas of this process: order, cancellation, migration without repeats."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest
from ray.exceptions import ActorUnavailableError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

import app.client
from app.client import LLMClient
from replicas.errors import (
    DeadlineExceeded,
    EngineDead,
    EngineError,
    EngineNotReady,
    InvalidRequest,
    Overloaded,
    ServingError,
)
from replicas.token_stream import TokenStream
from replicas.wire import (
    FinishReason,
    GenerateRequest,
    GenerateResult,
    ReplicaLoad,
    SamplingParams,
    ServiceStatus,
    StepEvents,
)
from tests.fakes import FakeEngineLoop, FakeEngineOptions, FakeHandle, fake_output


class FakeReplica:
    """A fake engine and a real token stream."""

    def __init__(self, replica_id: str) -> None:
        self.replica_id = replica_id
        self.loop = asyncio.get_running_loop()
        self.engine = FakeEngineLoop(FakeEngineOptions(step_s=0.002), self.on_step)
        self.stream = TokenStream(replica_id, self.engine.abort)
        self.is_alive = True
        self.death = asyncio.Event()

    def on_step(self, events: StepEvents) -> None:
        self.loop.call_soon_threadsafe(self.publish, events)

    def publish(self, events: StepEvents) -> None:
        if self.is_alive:
            self.stream.publish(events.deltas)

    def die(self) -> None:
        """As a killed process: links reset, calls fail."""
        self.is_alive = False
        self.stream.shutdown()
        self.death.set()

    async def generate(self, request: GenerateRequest) -> GenerateResult | ServingError:
        outcome = self.stream.open(request)
        death = asyncio.ensure_future(self.death.wait())
        try:
            self.engine.submit(request)
            await asyncio.wait((outcome, death), return_when=asyncio.FIRST_COMPLETED)
            if self.death.is_set():
                raise ActorUnavailableError("gone", None)
            return outcome.result()
        except asyncio.CancelledError:
            self.engine.abort(request.request_id)
            self.stream.close(request.request_id)
            raise
        finally:
            death.cancel()

    def num_active(self) -> int:
        load = self.engine.load()
        return load.num_running + load.num_waiting


class FakeRouter:
    """Sends to the first replica that is not excluded; tests may script answers before that."""

    def __init__(self, replicas: list[FakeReplica]) -> None:
        self.replicas = replicas
        self.requests: list[GenerateRequest] = []
        self.script: list[Callable[[], Any]] = []
        self.names_the_dead = True

    async def generate(self, request: GenerateRequest) -> GenerateResult | ServingError:
        self.requests.append(request)
        if self.script:
            return self.script.pop(0)()
        for replica in self.replicas:
            if replica.is_alive and replica.replica_id not in request.excluded_replicas:
                try:
                    return await replica.generate(request)
                except ActorUnavailableError as error:
                    if self.names_the_dead:
                        return EngineDead(str(error), replica_id=replica.replica_id)
                    raise
        return EngineNotReady("no replica")

    async def status(self) -> ServiceStatus:
        return ServiceStatus(
            ready=True,
            replicas={"a": ReplicaLoad()},
            num_queued=0,
            num_queued_tokens=0,
            num_inflight=0,
            model_info=None,
        )


class Service:
    def __init__(self) -> None:
        self.replicas = [FakeReplica(name) for name in ("a", "b", "c", "d")]
        self.router = FakeRouter(self.replicas)
        handle = cast("DeploymentHandle[Any]", FakeHandle(self.router))
        self.client = LLMClient(handle, host="127.0.0.1")

    async def until(self, condition: Callable[[], bool]) -> None:
        give_up_at = time.monotonic() + 5
        while not condition():
            assert time.monotonic() < give_up_at
            await asyncio.sleep(0.002)


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    service = Service()
    yield service
    await service.until(lambda: service.client.num_open == 0)
    for replica in service.replicas:
        if replica.is_alive:
            await service.until(lambda r=replica: r.num_active() == 0 == r.stream.num_records)
        replica.stream.shutdown()
        replica.engine.stop()
    await service.client.close()
    await asyncio.sleep(0.01)


def params(max_tokens: int, seed: int = 0) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed)


async def test_an_output_is_complete_and_describes_itself(service: Service) -> None:
    completion = await service.client.complete((1, 2), params(30, seed=3), request_id="mine")
    assert completion.token_ids == fake_output((1, 2), 30, seed=3)
    result = completion.result
    assert result.request_id == "mine"
    assert result.replica_id == "a"
    assert (result.num_prompt_tokens, result.num_output_tokens) == (2, 30)
    assert result.finish_reason is FinishReason.LENGTH


async def test_one_id_may_be_used_by_several_requests_at_once(service: Service) -> None:
    completions = await asyncio.gather(
        *(service.client.complete((n,), params(20), request_id="same") for n in range(1, 9))
    )
    assert [c.token_ids for c in completions] == [fake_output((n,), 20) for n in range(1, 9)]


async def test_a_stop_token_ends_the_output(service: Service) -> None:
    expected = fake_output((5,), 12)
    sampling = SamplingParams(max_tokens=100, stop_token_ids=(expected[-1],))
    assert expected.index(expected[-1]) == 11
    completion = await service.client.complete((5,), sampling)
    assert completion.token_ids == expected
    assert completion.result.finish_reason is FinishReason.STOP


async def test_closing_a_stream_aborts_it(service: Service) -> None:
    stream = service.client.generate((1,), params(4000))
    async for delta in stream:
        if delta.start_index > 5:
            break
    await stream.aclose()
    assert service.client.num_open == 0
    await service.until(lambda: service.replicas[0].num_active() == 0)


async def test_cancelling_at_any_moment_aborts_it(service: Service) -> None:
    for step in range(30):
        task = asyncio.create_task(service.client.complete((1,), params(4000)))
        for _ in range(step):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert service.client.num_open == 0
    await service.until(lambda: service.replicas[0].num_active() == 0)


@pytest.mark.parametrize("names_the_dead", [True, False])
async def test_a_lost_replica_costs_no_token(service: Service, *, names_the_dead: bool) -> None:
    service.router.names_the_dead = names_the_dead
    received: list[int] = []
    async for delta in service.client.generate((7, 8), params(100, seed=9), request_id="r"):
        assert delta.request_id == "r"
        assert delta.start_index == len(received)
        received += delta.token_ids
        result = delta.result
        if len(received) >= 20 and service.replicas[0].is_alive:
            service.replicas[0].die()
    assert tuple(received) == fake_output((7, 8), 100, seed=9)
    assert result is not None
    assert result.replica_id == "b"
    assert (result.num_prompt_tokens, result.num_output_tokens) == (2, 100)
    first, second = service.router.requests
    num_kept = second.output_offset
    assert second.prompt_token_ids == (7, 8, *received[:num_kept])
    assert second.sampling == params(100 - num_kept, seed=9)
    assert second.excluded_replicas == (("a",) if names_the_dead else ())
    assert first.request_id != second.request_id


async def test_a_lost_router_excludes_no_replica(service: Service) -> None:
    def lose() -> None:
        raise ActorUnavailableError("the router is gone", None)

    service.router.script.append(lose)
    completion = await service.client.complete((1,), params(5))
    assert completion.token_ids == fake_output((1,), 5)
    assert service.router.requests[1].excluded_replicas == ()


async def test_a_deadline_is_kept_even_when_nobody_answers(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.client, "DEADLINE_GRACE_S", 0.01)
    service.router.replicas = []
    silence = asyncio.Event()

    async def generate(request: GenerateRequest) -> None:
        await silence.wait()

    monkeypatch.setattr(service.router, "generate", generate)
    with pytest.raises(DeadlineExceeded, match="silent"):
        await service.client.complete((1,), params(5), timeout_s=0.05)


async def test_sixteen_streams_survive_a_lost_replica(service: Service) -> None:
    tasks = [asyncio.create_task(service.client.complete((n,), params(60))) for n in range(16)]
    await asyncio.sleep(0.06)
    service.replicas[0].die()
    completions = await asyncio.gather(*tasks)
    assert [c.token_ids for c in completions] == [fake_output((n,), 60) for n in range(16)]


async def test_a_third_loss_ends_the_request(service: Service) -> None:
    received: list[int] = []

    async def read() -> None:
        async for delta in service.client.generate((1,), params(4000)):
            received.extend(delta.token_ids)
            for number, replica in enumerate(service.replicas):
                if len(received) > 10 * (number + 1) and replica.is_alive:
                    replica.die()
                    break

    with pytest.raises(EngineDead, match="lost 3 replicas"):
        await read()
    assert len(service.router.requests) == 3
    assert tuple(received) == fake_output((1,), len(received))


async def test_a_request_whose_every_token_arrived_does_not_migrate(service: Service) -> None:
    """The replica dies after the last token and before it could say that it was the last."""
    client = service.client
    stream = client.generate((1,), params(10))
    received: list[int] = []

    def lose() -> None:
        raise ActorUnavailableError("gone", None)

    service.router.script.append(lose)
    task = asyncio.ensure_future(anext(stream))
    await service.until(lambda: bool(service.router.requests))
    # The attempt is lost at once; the next one continues at token 0 and is an ordinary run.
    received += (await task).token_ids
    async for delta in stream:
        received += delta.token_ids
    assert tuple(received) == fake_output((1,), 10)
    lost = app.client._AttemptLostError("gone", replica_id="a")
    ending = app.client._ended_by_length("r", 1, 10, lost)
    assert ending.result is not None
    assert ending.result.finish_reason is FinishReason.LENGTH
    assert (ending.start_index, ending.token_ids) == (10, ())


async def test_tokens_that_never_arrive_are_a_lost_attempt(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.client, "RECONCILE_S", 0.05)

    def claim() -> GenerateResult:
        return GenerateResult(
            request_id="r",
            finish_reason=FinishReason.LENGTH,
            num_output_tokens=5,
            num_prompt_tokens=1,
            num_cached_tokens=0,
            replica_id="a",
        )

    service.router.script.append(claim)
    completion = await service.client.complete((1,), params(5))
    assert completion.token_ids == fake_output((1,), 5)
    assert service.router.requests[1].excluded_replicas == ("a",)


async def test_a_link_that_does_not_come_back_is_a_lost_attempt(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partition: the connection is gone, and the control call hangs."""
    monkeypatch.setattr(app.client, "RECONCILE_S", 0.05)
    received: list[int] = []
    async for delta in service.client.generate((1,), params(100)):
        received += delta.token_ids
        if len(received) >= 10 and service.replicas[0].stream.num_sinks:
            service.replicas[0].stream.shutdown()
    assert tuple(received) == fake_output((1,), 100)
    await service.until(lambda: service.replicas[0].num_active() == 0)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (Overloaded("full", retry_after_s=3), Overloaded),
        (BackPressureError(num_queued_requests=1, max_queued_requests=1), Overloaded),
        (DeploymentUnavailableError(cast(Any, "router")), EngineNotReady),
        (RuntimeError("odd"), EngineError),
    ],
)
async def test_what_serve_raises_becomes_a_serving_error(
    service: Service, raised: Exception, expected: type[ServingError]
) -> None:
    def fail() -> None:
        raise raised

    service.router.script.append(fail)
    with pytest.raises(expected):
        await service.client.complete((1,), params(5))


async def test_a_returned_error_is_raised(service: Service) -> None:
    service.router.script.append(lambda: Overloaded("full", retry_after_s=3))
    with pytest.raises(Overloaded) as caught:
        await service.client.complete((1,), params(5))
    assert caught.value.retry_after_s == 3


async def test_an_empty_prompt_is_refused_without_a_call(service: Service) -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        await service.client.complete((), params(5))
    assert not service.router.requests


async def test_status_is_what_the_router_knows(service: Service) -> None:
    status = await service.client.status()
    assert status.ready
    assert list(status.replicas) == ["a"]


async def test_closing_the_client_ends_what_runs(service: Service) -> None:
    tasks = [asyncio.create_task(service.client.complete((1,), params(4000))) for _ in range(3)]
    await asyncio.sleep(0.05)
    await service.client.close()
    for task in tasks:
        with pytest.raises(EngineError, match="client was closed"):
            await task
