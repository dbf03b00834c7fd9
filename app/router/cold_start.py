"""A service without replicas: when that is no fault, and how the first one is asked for.

Invariant: at most one call waits for a replica.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from typing import Any, cast

from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from app.autoscaling.config import AutoscalingConfig
from app.autoscaling.schedule import reopens_at

logger = logging.getLogger(__name__)


class ColdStart:
    """What a router may do while it has no replica. Where nothing scales, that is nothing."""

    def __init__(self, engine: DeploymentHandle[Any], config: AutoscalingConfig | None) -> None:
        self._engine = engine
        self._config = config
        self._asking: asyncio.Task[None] | None = None

    def shut_for_s(self, *, has_replicas: bool) -> float | None:
        """Return for how long the schedule allows no replica; None while it allows some.

        A replica that still is there is used to its end.
        """
        if self._config is None or has_replicas:
            return None
        now = time.time()
        opens_at = reopens_at(self._config, now)
        return None if opens_at is None else opens_at - now

    def is_possible(self, *, has_replicas: bool) -> bool:
        """Whether having no replica now is no fault: a request would wait for one to start."""
        config = self._config
        if config is None or not config.can_reach_zero:
            return False
        return self.shut_for_s(has_replicas=has_replicas) is None

    def ask(self) -> None:
        """Have a call wait for a replica: that is what makes Serve start one."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.get_running_loop().create_task(self._wait_for_replica())

    async def _wait_for_replica(self) -> None:
        wake = self._engine.options(method_name="wake")
        try:
            await cast("DeploymentResponse[Any]", contextvars.Context().run(wake.remote))
        except (RayActorError, RequestCancelledError, DeploymentUnavailableError) as error:
            logger.debug("the replica that was asked for did not come: %r", error)
