"""`bench.storm`, reduced: the engine weathers it, and what it must not do would be seen."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from bench import storm
from replicas.engine.engine import Engine
from tests.checkpoints import write_checkpoint
from tests.fake_runner import make_engine


def test_a_storm_compiles_nothing_loses_nobody_and_gives_every_page_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_checkpoint(tmp_path / "model")
    status = storm.main(
        [
            *("--model", str(model), "--dtype", "float32", "--requests", "300"),
            *("--page-sizes", "16,64", "--pool-tokens", "256", "--max-model-len", "128"),
            *("--max-num-seqs", "8", "--max-num-batched-tokens", "16", "--max-tokens", "48"),
            *("--program-store", str(tmp_path / "programs"), "--out", str(tmp_path / "out.json")),
        ]
    )
    rows = json.loads((tmp_path / "out.json").read_text())["storms"]
    assert [row["page_size"] for row in rows] == [16, 64]
    for row in rows:
        assert row["num_ended"] == 300
        assert row["num_compiles"] == row["num_lost_pages"] == 0
        assert row["num_cancelled"] > 20
    assert rows[0]["num_preemptions"] > 0
    assert status == 0
    assert "True" in capsys.readouterr().out


def run(engine: Engine) -> storm.Outcome:
    return storm.Storm(engine, seed=1, max_tokens=8).run(50, max_in_flight=20)


def test_lost_pages_and_compilations_are_failures() -> None:
    engine, runner = make_engine()
    assert run(engine).is_ok
    engine.scheduler.allocator.allocate(1)
    outcome = run(engine)
    assert (outcome.num_lost_pages, outcome.is_ok) == (1, False)
    engine, runner = make_engine()
    runner.num_compiles_after_warmup = 1
    outcome = run(engine)
    assert (outcome.num_compiles, outcome.is_ok) == (1, False)


def test_the_same_seed_is_the_same_storm() -> None:
    first, second = (run(make_engine()[0]) for _ in range(2))
    assert first.num_output_tokens == second.num_output_tokens
    assert first.num_steps == second.num_steps
    other = storm.Storm(make_engine()[0], seed=2, max_tokens=8).run(50, max_in_flight=20)
    assert other.num_output_tokens != first.num_output_tokens


def test_the_counter_that_the_storm_reads_counts_compilations() -> None:
    from replicas.engine.model_runner import CompileCounter

    counter = CompileCounter()
    argument = jnp.zeros(7)
    before = counter.count
    jax.jit(lambda x: x * 3 + 1)(argument).block_until_ready()
    assert counter.count == before + 1
