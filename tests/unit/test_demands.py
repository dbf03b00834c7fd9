"""Headers that say how soon, how fast and how urgent."""

from __future__ import annotations

import pytest

from app.demands import Demands, read_demands, tenant_of
from replicas.errors import InvalidRequest


def test_headers_become_seconds_and_a_tenant() -> None:
    demands = read_demands(
        {
            "x-slo-ttft-ms": "1500",
            "x-slo-tpot-ms": "40",
            "x-timeout-ms": "30000",
            "x-priority": "2",
            "authorization": "Bearer sk-secret",
        }
    )
    assert (demands.hints.ttft_target_s, demands.hints.tpot_target_s) == (1.5, 0.04)
    assert (demands.timeout_s, demands.priority) == (30.0, 2)
    assert demands.hints.tenant
    assert "secret" not in repr(demands)


def test_without_headers_nothing_is_demanded() -> None:
    assert read_demands({}) == Demands()


def test_tenants_differ_by_key_only() -> None:
    assert tenant_of("Bearer a") == tenant_of("bearer  a ") != tenant_of("Bearer b")


def test_the_shorter_budget_counts() -> None:
    assert Demands(timeout_s=5.0).within(10.0) == 5.0
    assert Demands(timeout_s=5.0).within(None) == 5.0
    assert Demands(timeout_s=50.0).within(10.0) == 10.0
    assert Demands().within(10.0) == 10.0


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf", ""])
@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "x-priority"])
def test_nonsense_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        read_demands({name: value})
