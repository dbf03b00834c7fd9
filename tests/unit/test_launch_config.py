"""The config that the launcher deploys: ports that never meet, and who may be listened to."""

from __future__ import annotations

import itertools
import socket
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from app.errors import ConfigError
from app.launch_config import (
    Ports,
    check_host,
    choose_ports,
    http_address,
    is_free,
    make_effective_config,
    read_config,
)

PORTS = Ports(
    http=8001,
    dashboard=8266,
    haproxy_stats=8405,
    haproxy_metrics=9102,
    fallback_proxy=8501,
    first_replica=30100,
)


def config_with(**application: object) -> dict[str, Any]:
    return {"applications": [{"name": "llm", "import_path": "app.build:build", **application}]}


def test_ports_are_rays_usual_ones_on_port_8000() -> None:
    ports = choose_ports(8000, lambda _: True, lambda: 1)
    assert astuple(ports) == (8000, 8265, 8404, 9101, 8500, 30000)


@given(st.sets(st.integers(8000, 8095), min_size=2, max_size=5))
def test_neighbouring_launchers_share_no_port(https: set[int]) -> None:
    free = itertools.count(50000)
    chosen = [choose_ports(http, lambda _: True, lambda: next(free)) for http in https]
    singles = [port for ports in chosen for port in astuple(ports)]
    assert len(set(singles)) == len(singles)
    ranges = sorted(ports.first_replica for ports in chosen)
    assert all(second - first >= 100 for first, second in itertools.pairwise(ranges))


@given(st.integers(1, 65535), st.sets(st.integers(8000, 10000)))
def test_a_taken_or_impossible_port_is_replaced(http: int, taken: set[int]) -> None:
    free = itertools.count(20000)
    ports = choose_ports(http, lambda port: port not in taken, lambda: next(free))
    chosen = set(astuple(ports)[1:-1])
    assert not chosen & taken
    assert all(1024 <= port <= 65535 for port in chosen)
    assert 30000 <= ports.first_replica <= 39900


def test_a_listening_port_is_not_free() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        server.listen()
        assert not is_free(port, "127.0.0.1")
        assert not is_free(port)
    assert is_free(port, "127.0.0.1")


def test_effective_config_moves_every_port_and_keeps_the_rest() -> None:
    flags = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_HAPROXY_STATS_PORT": "7777"}
    config = config_with(args={"model": "m"}, runtime_env={"env_vars": dict(flags)})
    config["http_options"] = {"host": "127.0.0.1", "port": 8000, "keep_alive_timeout_s": 9}
    effective = make_effective_config(
        config, host="127.0.0.1", ports=PORTS, is_moved=True, extra={}
    )
    assert effective["http_options"] == config["http_options"] | {"port": 8001}
    assert effective["applications"][0]["args"] == {"model": "m"}
    controller = effective["controller_options"]["runtime_env"]["env_vars"]
    application = effective["applications"][0]["runtime_env"]["env_vars"]
    assert controller == PORTS.environment()
    assert application == {**PORTS.environment(), "RAY_SERVE_ENABLE_HA_PROXY": "1"}
    assert config["applications"][0]["runtime_env"]["env_vars"] == flags, "the input is not changed"


def test_without_an_override_the_files_own_ports_stay() -> None:
    config = config_with(runtime_env={"env_vars": {"RAY_SERVE_HAPROXY_STATS_PORT": "7777"}})
    effective = make_effective_config(config, host="::1", ports=PORTS, is_moved=False, extra={})
    environment = effective["applications"][0]["runtime_env"]["env_vars"]
    assert environment["RAY_SERVE_HAPROXY_STATS_PORT"] == "7777"
    assert environment["RAY_SERVE_HAPROXY_METRICS_PORT"] == "9102"


def test_extra_variables_win() -> None:
    config = config_with(runtime_env={"env_vars": {"RAY_SERVE_ENABLE_HA_PROXY": "1"}})
    effective = make_effective_config(
        config,
        host="127.0.0.1",
        ports=PORTS,
        is_moved=False,
        extra={"RAY_SERVE_ENABLE_HA_PROXY": "0"},
    )
    environment = effective["applications"][0]["runtime_env"]["env_vars"]
    assert environment["RAY_SERVE_ENABLE_HA_PROXY"] == "0"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_a_public_address_without_keys_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="no API key is configured"):
        check_host(config_with(args={"model": "m"}), host)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.1.2.3"])
def test_this_machine_needs_no_keys(host: str) -> None:
    check_host(config_with(), host)


def test_a_public_address_with_keys_is_accepted(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    check_host(config_with(args={"ingress": {"api_keys_file": str(keys)}}), "0.0.0.0")
    check_host(config_with(args={"ingress": {"api_key_hashes": ["ab" * 32]}}), "0.0.0.0")


def test_one_application_without_keys_is_enough_to_refuse() -> None:
    config = config_with(args={"ingress": {"api_key_hashes": ["ab" * 32]}})
    config["applications"] = [*config["applications"], {"name": "second"}]
    with pytest.raises(ConfigError, match="no API key is configured"):
        check_host(config, "0.0.0.0")


def test_a_file_without_a_host_gets_serves_default_which_is_public() -> None:
    assert http_address({"applications": []}, None) == ("0.0.0.0", 8000)
    assert http_address({"http_options": {"host": "127.0.0.1", "port": 9}}, 7) == ("127.0.0.1", 7)


@pytest.mark.parametrize("port", [0, 65536, -1, "8000", None])
def test_an_impossible_port_is_refused(port: object) -> None:
    with pytest.raises(ConfigError, match="port must be in"):
        http_address({"http_options": {"port": port}}, None)


@pytest.mark.parametrize("content", ["", "- a\n- b\n", "http_options: {}\n", "a: [", "\x00"])
def test_a_file_that_is_no_serve_config_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"odd\.yaml"):
        read_config(path)
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        read_config(tmp_path / "absent.yaml")


def test_a_config_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(config_with()))
    assert read_config(path) == config_with()
