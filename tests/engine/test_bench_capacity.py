"""The capacity planner: loads and prices have the effect that they must have."""

from __future__ import annotations

from typing import Any

import pytest

from bench.capacity import main, read_price


@pytest.fixture(autouse=True)
def _libtpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    """The only row of the table that the command prints."""
    main(["--slices", "v6e-1", "--model", "llama-3.1-8b", *arguments])
    header, row = capsys.readouterr().out.splitlines()
    return dict(zip(header.split(), row.split(), strict=True))


def test_twice_the_price_costs_twice_and_more_load_takes_more(
    capsys: pytest.CaptureFixture[Any],
) -> None:
    small = plan(capsys, "--rate", "30", "--price", "v6e=2")
    dear = plan(capsys, "--rate", "30", "--price", "v6e=4", "v5e=1")
    large = plan(capsys, "--rate", "300", "--price", "v6e=2")
    assert float(dear["per_million_output_tokens"]) == pytest.approx(
        2 * float(small["per_million_output_tokens"]), abs=0.011
    )
    assert int(large["replicas"]) > 5 * int(small["replicas"]) > 5
    # A replica reads its weights once a step: 16 GB at 1.64 TB/s.
    assert float(small["step_ms"]) == pytest.approx(9.8, rel=0.15)


def test_targets_that_no_replica_meets_and_prices_that_are_none(
    capsys: pytest.CaptureFixture[Any],
) -> None:
    row = plan(capsys, "--rate", "1", "--tpot-s", "0.001")
    assert (row["requests_per_s"], row["replicas"]) == ("0.00", "-")
    assert row["per_million_output_tokens"] == "-"
    with pytest.raises(Exception, match="GENERATION=NUMBER"):
        read_price("v6e")
