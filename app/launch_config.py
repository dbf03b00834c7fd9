"""Turns a serve_config.yaml into the one that a launcher on this machine deploys.

Pure functions over the parsed YAML: which ports to use, and the file with them written in. Serve
reads its ports from environment variables of its own processes, so they go into the file's
`runtime_env`s; set in the launching process they would break Serve's client there.
"""

from __future__ import annotations

import copy
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from app.auth import check_exposure, load_key_hashes
from app.errors import ConfigError

DEFAULT_HTTP_PORT = 8000
SERVE_DEFAULT_HOST = "0.0.0.0"
_MAX_PORT = 65535
_FIRST_UNPRIVILEGED_PORT = 1024
# Ports of the ingress replicas themselves, which HAProxy forwards to: a range per launcher.
_FIRST_REPLICA_PORT = 30000
_REPLICA_PORTS = 100
_REPLICA_RANGES = 100

type YamlMapping = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports of one launcher.

    Attributes:
        http: where clients connect.
        dashboard: Ray's dashboard and REST API.
        haproxy_stats: HAProxy's statistics page.
        haproxy_metrics: HAProxy's Prometheus metrics.
        fallback_proxy: Serve's Python proxy, which answers while no ingress replica can.
        first_replica: start of the range of the ingress replicas.
    """

    http: int
    dashboard: int
    haproxy_stats: int
    haproxy_metrics: int
    fallback_proxy: int
    first_replica: int

    def environment(self) -> dict[str, str]:
        """Return the variables that move Serve's own ports."""
        return {
            "RAY_SERVE_HAPROXY_STATS_PORT": str(self.haproxy_stats),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(self.haproxy_metrics),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(self.fallback_proxy),
            "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(self.first_replica),
            "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(self.first_replica + _REPLICA_PORTS - 1),
        }


def read_config(path: Path) -> YamlMapping:
    """Read a Serve config file.

    Raises:
        ConfigError: it is unreadable, not YAML, or not a mapping with applications.
    """
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    mapping = cast(YamlMapping, config if isinstance(config, dict) else {})
    if not isinstance(mapping.get("applications"), list):
        raise ConfigError(f"{path} is not a Serve config file: it has no list `applications`")
    return mapping


def http_address(config: YamlMapping, port: int | None) -> tuple[str, int]:
    """Return host and port that clients use; `port` overrides the file's.

    Raises:
        ConfigError: the port is not one.
    """
    options = _section(config, "http_options")
    chosen: object = port if port is not None else options.get("port", DEFAULT_HTTP_PORT)
    if not isinstance(chosen, int) or not 1 <= chosen <= _MAX_PORT:
        raise ConfigError(f"port must be in [1, {_MAX_PORT}], got {chosen!r}")
    return str(options.get("host", SERVE_DEFAULT_HOST)), chosen


def _section(mapping: YamlMapping, key: str) -> YamlMapping:
    """Return a nested mapping; empty where it is absent or null."""
    return cast(YamlMapping, mapping.get(key) or {})


def check_host(config: YamlMapping, host: str) -> bool:
    """Refuse to listen beyond this machine where an application has no API keys.

    Returns:
        Whether there are keys, so that clients must send one.

    Raises:
        ConfigError: that is so, or the keys cannot be read.
    """
    has_keys = False
    for application in config["applications"]:
        ingress = _section(_section(application, "args"), "ingress")
        keys_file: str | None = ingress.get("api_keys_file")
        keys = load_key_hashes(
            ingress.get("api_key_hashes") or (), Path(keys_file) if keys_file else None
        )
        check_exposure(host, has_keys=bool(keys))
        has_keys = has_keys or bool(keys)
    return has_keys


def choose_ports(http: int, is_free: Callable[[int], bool], find_free: Callable[[], int]) -> Ports:
    """Choose all ports for an HTTP port: Ray's usual ones, moved as far as `http` is from 8000.

    A launcher then always has the same ports, and launchers on HTTP ports less than 96 apart never
    meet. A port that is taken or out of range is replaced by any free one.
    """
    offset = http - DEFAULT_HTTP_PORT

    def choose(usual: int) -> int:
        port = usual + offset
        if _FIRST_UNPRIVILEGED_PORT <= port <= _MAX_PORT and is_free(port):
            return port
        return find_free()

    return Ports(
        http=http,
        dashboard=choose(8265),
        haproxy_stats=choose(8404),
        haproxy_metrics=choose(9101),
        fallback_proxy=choose(8500),
        first_replica=_FIRST_REPLICA_PORT + offset % _REPLICA_RANGES * _REPLICA_PORTS,
    )


def is_free(port: int, host: str = "") -> bool:
    """Tell whether a server could listen on `port` now; `host` "" stands for all interfaces."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Connections of a server that has just ended must not count as a server.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def find_free() -> int:
    """Return a port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def make_effective_config(
    config: YamlMapping, *, host: str, ports: Ports, is_moved: bool, extra: Mapping[str, str]
) -> YamlMapping:
    """Write host, ports and `extra` variables into a copy of the config.

    Args:
        is_moved: the port was overridden: the file's own auxiliary ports belong to another
            instance and are replaced, too; otherwise they are kept.
    """
    effective = copy.deepcopy(config)
    effective["http_options"] = _section(effective, "http_options") | {
        "host": host,
        "port": ports.http,
    }
    effective["controller_options"] = _section(effective, "controller_options")
    for section in (effective["controller_options"], *effective["applications"]):
        runtime_env = _section(section, "runtime_env")
        own = _section(runtime_env, "env_vars")
        moved = ports.environment()
        merged = (own | moved if is_moved else moved | own) | dict(extra)
        section["runtime_env"] = runtime_env | {"env_vars": merged}
    return effective
