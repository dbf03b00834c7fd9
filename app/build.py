"""Builds the Serve application: `import_path: app.build:build` in serve_config.yaml.

The one place that knows every deployment and its Serve options, and the last one that reads the
environment. Nothing imports it. Invariant: settings that cannot work are refused here, before a
replica starts.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import ray
from ray import serve
from ray.serve._private.client import ServeControllerClient
from ray.serve.config import RequestRouterConfig
from ray.serve.context import _get_global_client  # pyright: ignore[reportPrivateUsage]

from app.auth import check_exposure
from app.autoscaling.serve_policy import serve_autoscaling
from app.deploy_check import check_deployable
from app.errors import ConfigError
from app.ingress import Ingress
from app.router.deployment import RouterDeployment
from app.router.pinned import PinnedRequestRouter
from app.settings import parse_settings, pin_version
from app.shared_state import SharedState
from replicas.deployment import EngineDeployment

logger = logging.getLogger("ray.serve")

_untyped_serve: Final[Any] = serve

# The router's credits are the only limit: Serve itself must never queue a call.
_UNLIMITED_REQUESTS = 1 << 16
# On every node of a cluster with an autoscaler: the node type that it was made from.
NODE_GROUP_LABEL = "ray.io/node-group"
# How often a stopping replica looks whether its requests have ended.
_DRAIN_POLL_S = 0.2


def build(args: dict[str, Any]) -> serve.Application:
    """Bind Ingress -> Router -> Engine, and Ingress -> SharedState.

    Raises:
        ConfigError: a setting is wrong; the message lists what and why.
    """
    settings = pin_version(parse_settings(args))
    host = _listening_host()
    if host is not None:
        check_exposure(host, has_keys=bool(settings.ingress.key_hashes))
    nodes = [node for node in _nodes() if node["Alive"]]
    check_deployable(
        settings.engine,
        settings.replicas,
        nodes=[node["Resources"] for node in nodes],
        can_grow=settings.replicas.autoscaling is not None
        or any(NODE_GROUP_LABEL in node["Labels"] for node in nodes),
    )
    if not settings.ingress.key_hashes and _serves_grpc():
        raise ConfigError(
            "grpc_options: Serve's gRPC servers listen on all interfaces, so they need API keys: "
            "set ingress.api_keys_file or ingress.api_key_hashes"
        )
    logger.info("application settings: %s", settings)
    replicas = settings.replicas
    options: dict[str, Any] = {
        "max_ongoing_requests": _UNLIMITED_REQUESTS,
        "graceful_shutdown_timeout_s": replicas.drain_timeout_s,
        "graceful_shutdown_wait_loop_s": _DRAIN_POLL_S,
    }
    if replicas.autoscaling is None:
        autoscaling = replicas.serve_autoscaling
    else:
        autoscaling = serve_autoscaling(replicas.autoscaling)
    engine = _deployment(
        EngineDeployment,
        "Engine",
        num_replicas=None if autoscaling else replicas.num_replicas,
        autoscaling_config=autoscaling,
        ray_actor_options={"num_cpus": replicas.num_cpus, "resources": replicas.resources},
        request_router_config=_request_router_config(),
        health_check_period_s=replicas.health_check_period_s,
        health_check_timeout_s=replicas.health_check_timeout_s,
        **options,
    ).bind(settings.engine, tracing=settings.tracing)
    light = {"ray_actor_options": {"num_cpus": 0}, **options}
    router = _deployment(RouterDeployment, "Router", **light).bind(
        engine,
        settings.router,
        tracing=settings.tracing,
        autoscaling=replicas.autoscaling,
        sink_ports=settings.sink_ports,
    )
    shared = _deployment(SharedState, "SharedState", **light).bind(settings.shared_state)
    return _deployment(
        _untyped_serve.ingress()(Ingress),
        "Ingress",
        num_replicas=settings.num_ingress_replicas,
        **light,
    ).bind(
        router,
        settings.ingress,
        shared,
        tracing=settings.tracing,
        sink_ports=settings.sink_ports,
    )


def _deployment(cls: type, name: str, **options: Any) -> Any:
    """`serve.deployment`, whose own types are too loose to be checked."""
    given = {key: value for key, value in options.items() if value is not None}
    return _untyped_serve.deployment(cls, name=name, **given)


def _request_router_config() -> RequestRouterConfig:
    router_class: Any = PinnedRequestRouter
    return RequestRouterConfig(request_router_class=router_class)


def _nodes() -> list[dict[str, Any]]:
    """Return what Ray knows of its nodes; none where there is no cluster."""
    untyped_ray: Any = ray
    return untyped_ray.nodes() if ray.is_initialized() else []


def _serves_grpc() -> bool:
    """Whether the Serve that is running has gRPC servers."""
    client = _running_serve()
    if client is None:
        return False
    controller: Any = client._controller  # pyright: ignore[reportPrivateUsage]
    options: Any = ray.get(controller.get_grpc_config.remote())
    return bool(options.grpc_servicer_functions)


def _listening_host() -> str | None:
    """Return the host that Serve's HTTP servers listen on; None while no Serve is running.

    Serve has no public way to ask: `serve.status()` leaves http_options out (2.60).
    """
    client = _running_serve()
    return None if client is None else client.http_config.host


def _running_serve() -> ServeControllerClient | None:
    """Return the client of the Serve that is running, if one is."""
    if not ray.is_initialized():  # or Serve would start a cluster to look for itself
        return None
    return _get_global_client(raise_if_no_controller_running=False)
