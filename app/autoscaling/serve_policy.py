"""The policy as Ray Serve calls it: once per turn of the controller's loop, in its process.

Serve pickles this package by value into its controller, so it imports Ray and the standard library
only. Serve's own delays are off: the policy has better ones.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from ray import cloudpickle
from ray.serve import config as serve_config

import app.autoscaling
from app.autoscaling.config import AutoscalingConfig, Window
from app.autoscaling.observation import observe
from app.autoscaling.policy import State, decide

logger = logging.getLogger("ray.serve")

_STATE = "systole"
_STALE_S = 30.0
"""A report as old as this says nothing of the present."""
_POLICY = "app.autoscaling.serve_policy:LoadPolicy"

_pickle: Final[Any] = cloudpickle
_config: Final[Any] = serve_config


class LoadPolicy:
    """An autoscaling policy of Ray Serve.

    Attributes:
        config: what it goes by.
    """

    def __init__(self, **settings: Any) -> None:
        """Take the fields of an AutoscalingConfig, as JSON has them."""
        given: list[dict[str, Any]] = settings.pop("schedule", [])
        windows = (Window(days=tuple(fields.pop("days")), **fields) for fields in map(dict, given))
        self.config = AutoscalingConfig(**settings, schedule=tuple(windows))

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas, and what to hand back the next time.

        Args:
            context: a ray.serve.config.AutoscalingContext.
        """
        now: float = context.current_time
        seen = observe(
            latest_reports(context.raw_metrics or {}, now),
            now=now,
            target=context.target_num_replicas,
            num_running=context.current_num_replicas,
            num_queued=context.total_queued_requests or 0.0,
        )
        state = context.policy_state.get(_STATE, State())
        decision, state = decide(self.config, state, seen)
        if decision.reason:
            logger.info(
                "%s: %d -> %d replicas: %s",
                context.deployment_id,
                seen.target,
                decision.target,
                decision.reason,
            )
        return decision.target, {_STATE: state}


def latest_reports(series: Mapping[str, Mapping[Any, Any]], now: float) -> list[dict[str, float]]:
    """Return each replica's last report, by name; without what is stale.

    Args:
        series: name -> replica -> points with `timestamp` and `value`, oldest first.
        now: seconds since the epoch.
    """
    reports: dict[Any, dict[str, float]] = {}
    for name, points_of in series.items():
        for replica, points in points_of.items():
            if points and now - points[-1].timestamp < _STALE_S:
                reports.setdefault(replica, {})[name] = points[-1].value
    return list(reports.values())


def serve_autoscaling(config: AutoscalingConfig) -> Any:
    """Return the ray.serve.config.AutoscalingConfig that makes Serve run this policy."""
    initial = config.initial_replicas
    if initial is None:
        initial = max(1, config.min_replicas)
    # Serve's controller may not be able to import this checkout.
    _pickle.register_pickle_by_value(app.autoscaling)
    try:
        policy = _config.AutoscalingPolicy(policy_function=_POLICY, policy_kwargs=asdict(config))
    finally:
        _pickle.unregister_pickle_by_value(app.autoscaling)
    with warnings.catch_warnings():
        # Deprecated, but in Ray 2.60 nothing reads the variables that are to replace it.
        warnings.simplefilter("ignore", DeprecationWarning)
        return _config.AutoscalingConfig(
            min_replicas=0 if config.can_reach_zero else config.min_replicas,
            max_replicas=config.max_replicas,
            initial_replicas=initial,
            metrics_interval_s=config.report_interval_s,
            look_back_period_s=max(10.0, 2 * config.report_interval_s),
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            downscale_to_zero_delay_s=0.0,
            policy=policy,
        )
