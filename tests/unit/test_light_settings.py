"""user_config: what a running replica takes over, and what it refuses."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from app.auth import hash_key
from app.errors import ConfigError
from app.ingress_config import IngressConfig
from app.light_settings import (
    LIGHT_INGRESS_SETTINGS,
    LIGHT_ROUTER_SETTINGS,
    apply_ingress_settings,
    apply_light_settings,
)
from app.router.config import RouterConfig
from app.router.core import RouterCore
from app.router.events import Fail, ReplicaReported, RequestArrived
from replicas.errors import Overloaded
from replicas.wire import ReplicaLoad

INGRESS = IngressConfig(model_dir="m", model_id="m", key_hashes=frozenset({hash_key(b"old")}))
ROOT = Path(__file__).resolve().parents[2]


def test_limits_of_the_router_change_and_the_rest_stays() -> None:
    changed = apply_light_settings(
        RouterConfig(replica_wait_s=7.0), {"max_queued_requests": 5}, LIGHT_ROUTER_SETTINGS
    )
    assert changed == RouterConfig(replica_wait_s=7.0, max_queued_requests=5)


@pytest.mark.parametrize(
    ("user_config", "message"),
    [
        ({"max_indexed_pages": 5}, "max_indexed_pages cannot be changed while a replica runs"),
        ({"max_queued_requests": 0}, "max_queued_requests must be >= 1, got 0"),
        ({"max_queued_requests": "many"}, "max_queued_requests: .*got 'many'"),
    ],
)
def test_wrong_limits_are_refused_by_name(user_config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_light_settings(RouterConfig(), user_config, LIGHT_ROUTER_SETTINGS)


def test_keys_are_read_from_a_new_file(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("new\n")
    user_config = {"api_keys_file": "keys", "keep_alive_s": 2}
    changed = apply_ingress_settings(INGRESS, user_config, root=tmp_path)
    assert changed.key_hashes == frozenset({hash_key(b"new")})
    assert changed.keep_alive_s == 2
    assert changed.model_id == "m"
    with pytest.raises(ConfigError, match="cannot read"):
        apply_ingress_settings(INGRESS, {"api_keys_file": "none"}, root=tmp_path)
    with pytest.raises(ConfigError, match="max_choices must be > 0, got 0"):
        apply_ingress_settings(INGRESS, {"max_choices": 0}, root=tmp_path)
    with pytest.raises(ConfigError, match="model_id cannot be changed"):
        apply_ingress_settings(INGRESS, {"model_id": "x"}, root=tmp_path)


def arrived(name: str) -> RequestArrived:
    return RequestArrived(
        request_id=name, num_prompt_tokens=8, max_tokens=8, deadline=None, priority=0
    )


def test_a_running_router_takes_other_limits_and_keeps_what_waits() -> None:
    core = RouterCore(RouterConfig(max_waiting_per_replica=0), random.Random(0))
    load = ReplicaLoad(num_slots=1, num_free_pages=64, num_pages=64, page_size=16)
    core.on(ReplicaReported("r", 0, load), 0.0)
    for name in "abc":
        assert not any(isinstance(action, Fail) for action in core.on(arrived(name), 0.0))
    assert core.num_queued == 2
    core.configure(RouterConfig(max_queued_requests=1, max_waiting_per_replica=1))
    (fail,) = [a for a in core.on(arrived("d"), 0.0) if isinstance(a, Fail)]
    assert isinstance(fail.error, Overloaded)
    assert (core.num_booked, core.num_queued) == (2, 1)


def test_the_document_lists_what_may_change() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    section = page.partition("## Without a restart")[2].partition("\n## ")[0]
    for name in (*LIGHT_ROUTER_SETTINGS, *LIGHT_INGRESS_SETTINGS, "api_keys_file"):
        assert f"`{name}`" in section, name
