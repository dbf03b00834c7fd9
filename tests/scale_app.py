"""Router and engine replicas over fake engines, as `app.build` binds them, for tests of scaling."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from app.autoscaling.config import AutoscalingConfig
from app.autoscaling.serve_policy import serve_autoscaling
from app.client import LLMClient
from app.router.core import RouterConfig
from app.router.deployment import RouterDeployment
from app.router.pinned import PinnedRequestRouter
from replicas.config import EngineConfig
from replicas.deployment import EngineDeployment
from replicas.errors import ServingError
from replicas.wire import SamplingParams
from tests.fakes import FakeEngineOptions, StartFakeEngine, fake_output


def deploy(
    name: str,
    options: FakeEngineOptions,
    *,
    chips: int,
    scaling: AutoscalingConfig | int,
    replica_wait_s: float = 0.0,
) -> DeploymentHandle[Any]:
    """Run an application; wait until it is up.

    Args:
        name: of the application.
        options: of its engines.
        chips: that a replica takes; 0 on a cluster that has none.
        scaling: the policy's settings, or a number of replicas.
        replica_wait_s: how long a request waits while there is no replica.
    """
    is_fixed = isinstance(scaling, int)
    how_many: dict[str, Any] = (
        {"num_replicas": scaling}
        if is_fixed
        else {"autoscaling_config": serve_autoscaling(scaling)}
    )
    engine = serve.deployment(
        EngineDeployment,
        name="Engine",
        max_ongoing_requests=1000,
        ray_actor_options={"num_cpus": 0, "resources": {"TPU": chips} if chips else {}},
        request_router_config=RequestRouterConfig(request_router_class=PinnedRequestRouter),
        graceful_shutdown_timeout_s=60,
        graceful_shutdown_wait_loop_s=0.1,
        **how_many,
    ).bind(EngineConfig(model="fake"), StartFakeEngine(options))
    router = serve.deployment(
        RouterDeployment,
        name="Router",
        max_ongoing_requests=1000,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_wait_loop_s=0.1,
    ).bind(
        engine,
        RouterConfig(replica_wait_s=replica_wait_s),
        autoscaling=None if is_fixed else scaling,
    )
    return serve.run(router, name=name, route_prefix=None)


@dataclass
class Outcome:
    """What became of a load.

    Attributes:
        num_requests: sent.
        errors: of those that failed.
        wrong: requests with other tokens than an undisturbed engine gives.
        latencies_s: of those that were answered, with the time of their start.
        replicas: (seconds since the start, replicas that take requests) after each change.
    """

    num_requests: int = 0
    errors: list[ServingError] = field(default_factory=list)
    wrong: int = 0
    latencies_s: list[tuple[float, float]] = field(default_factory=list)
    replicas: list[tuple[float, int]] = field(default_factory=list)

    @property
    def counts(self) -> list[int]:
        """Numbers of replicas, in order."""
        return [count for _, count in self.replicas]


async def load(
    client: LLMClient,
    outcome: Outcome,
    rate: Callable[[float], float],
    *,
    until: Callable[[float], bool],
    num_tokens: int,
) -> None:
    """Send requests at a rate until told to stop, then wait for all of them.

    Args:
        client: of the application.
        outcome: filled.
        rate: seconds since the start -> requests per second.
        until: seconds since the start -> whether to stop.
        num_tokens: output tokens of each.
    """
    began = time.monotonic()
    tasks: list[asyncio.Task[None]] = []

    async def ask(number: int) -> None:
        prompt = (number % 900 + 1, 2, 3)
        started = time.monotonic()
        try:
            completion = await client.complete(prompt, SamplingParams(max_tokens=num_tokens))
        except ServingError as error:
            outcome.errors.append(error)
            return
        outcome.latencies_s.append((started - began, time.monotonic() - started))
        outcome.wrong += completion.token_ids != fake_output(prompt, num_tokens)

    async def watch() -> None:
        while True:
            count = len((await client.status()).replicas)
            if not outcome.replicas or outcome.replicas[-1][1] != count:
                outcome.replicas.append((time.monotonic() - began, count))
            await asyncio.sleep(0.25)

    watching = asyncio.create_task(watch())
    due = 0.0
    while not until(now := time.monotonic() - began):
        due += (rate(now)) * 0.05
        while due >= 1:
            due -= 1
            tasks.append(asyncio.create_task(ask(outcome.num_requests)))
            outcome.num_requests += 1
        await asyncio.sleep(0.05)
    await asyncio.gather(*tasks)
    watching.cancel()


def chips_of(directory: Path) -> list[dict[str, Any]]:
    """What each engine that started was given, by start."""
    paths = sorted(directory.glob("*.json"), key=lambda path: path.stat().st_mtime)
    return [json.loads(path.read_text()) for path in paths]
