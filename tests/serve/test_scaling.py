"""Autoscaling for real: replicas follow a load, down to none and back.

Hosts that come and go need a cluster of their own and minutes: `make scale`.
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta

import pytest
from ray import serve

from app.autoscaling.config import AutoscalingConfig, Window
from app.client import LLMClient
from replicas.errors import EngineNotReady
from replicas.wire import SamplingParams
from tests.fakes import FakeEngineOptions, fake_output
from tests.scale_app import deploy

pytestmark = pytest.mark.ray


async def until_empty(client: LLMClient) -> bool:
    """Wait until there is no replica; return whether the service is ready all the same."""
    give_up_at = time.monotonic() + 60
    while (status := await client.status()).replicas:
        assert time.monotonic() < give_up_at, status
        await asyncio.sleep(0.1)
    return status.ready


async def test_an_idle_service_has_no_replica_and_the_next_request_gets_one(
    serve_port: int,
) -> None:
    config = AutoscalingConfig(
        min_replicas=0, boot_s=5.0, scale_to_zero_after_s=2.0, report_interval_s=0.5
    )
    handle = await asyncio.to_thread(
        deploy, "idle", FakeEngineOptions(), chips=0, scaling=config, replica_wait_s=60.0
    )
    client = LLMClient(handle, host="127.0.0.1")
    try:
        assert await until_empty(client)
        completion = await client.complete((3, 1), SamplingParams(max_tokens=4), timeout_s=90)
        assert completion.token_ids == fake_output((3, 1), 4)
    finally:
        await client.close()
        serve.delete("idle")


async def test_a_schedule_shuts_the_service_down_and_says_until_when(serve_port: int) -> None:
    now = datetime.now(UTC)
    start, end = (f"{now + timedelta(hours=hours):%H:%M}" for hours in (-2, 2))
    config = AutoscalingConfig(
        report_interval_s=0.5, schedule=(Window(start=start, end=end, max_replicas=0),)
    )
    handle = await asyncio.to_thread(
        deploy, "night", FakeEngineOptions(), chips=0, scaling=config, replica_wait_s=60.0
    )
    client = LLMClient(handle, host="127.0.0.1")
    try:
        assert not await until_empty(client)
        with pytest.raises(EngineNotReady, match="the schedule has shut") as caught:
            await client.complete((3, 1), SamplingParams(max_tokens=4))
        assert caught.value.retry_after_s == pytest.approx(2 * 3600, abs=120)
    finally:
        await client.close()
        serve.delete("night")
