"""The fitted step model: exact data, noise, outliers, change."""

from __future__ import annotations

import random

import pytest

from app.router.step_model import StepCosts, StepModel
from replicas.wire import ReplicaLoad

TRUE = StepCosts(step=2e-3, token=3e-4, pair=2e-8, context=5e-7)


def feed(
    model: StepModel, costs: StepCosts, count: int, *, noise: float = 0.0, outliers: float = 0.0
) -> None:
    """Reports of steps that take what `costs` says."""
    rng = random.Random(0)
    load = ReplicaLoad()
    for _ in range(count):
        steps = rng.randint(1, 5)
        decodes, chunk = rng.randint(0, 16) * steps, rng.choice([0, 0, 64, 512])
        pairs, context = chunk * rng.randint(0, 4000), decodes * rng.randint(1, 4000)
        seconds = costs.step * steps + costs.token * (decodes + chunk)
        seconds += costs.pair * pairs + costs.context * context
        seconds *= 1 + rng.uniform(-noise, noise)
        if rng.random() < outliers:
            seconds *= 50
        after = ReplicaLoad(
            num_steps=load.num_steps + steps,
            num_computed_tokens=load.num_computed_tokens + decodes + chunk,
            num_prefill_pairs=load.num_prefill_pairs + pairs,
            num_context_tokens=load.num_context_tokens + context,
            busy_s=load.busy_s + seconds,
        )
        model.observe(load, after)
        load = after


def check(model: StepModel, true: StepCosts, rel: float) -> None:
    for name in ("step", "token", "pair", "context"):
        assert getattr(model.costs, name) == pytest.approx(getattr(true, name), rel=rel), name


def test_it_finds_the_coefficients_of_exact_steps() -> None:
    model = StepModel()
    feed(model, TRUE, 2000)
    check(model, TRUE, 0.05)


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_device_a_hundred_times_slower_is_learnt_as_well(noise: float) -> None:
    """Small models on a CPU: the prior must not stand in for what weighs little beside a step."""
    slow = StepCosts(step=12e-3, token=2e-3, pair=4e-7, context=3e-6)
    model = StepModel()
    feed(model, slow, 1500, noise=noise)
    check(model, slow, 0.02 + 2 * noise)


def test_noise_and_outliers_hardly_move_it() -> None:
    model = StepModel()
    feed(model, TRUE, 2000, noise=0.1, outliers=0.03)
    check(model, TRUE, 0.15)


def test_a_lasting_change_is_followed() -> None:
    model = StepModel()
    feed(model, TRUE, 1000)
    slower = StepCosts(3 * TRUE.step, 3 * TRUE.token, 3 * TRUE.pair, 3 * TRUE.context)
    feed(model, slower, 3000)
    check(model, slower, 0.1)


def test_no_steps_teach_nothing() -> None:
    model = StepModel()
    load = ReplicaLoad(num_steps=5, busy_s=1.0, num_computed_tokens=100)
    assert model.observe(load, load) is None
    assert model.observe(load, ReplicaLoad()) is None, "a restarted replica"
    assert model.costs == StepModel().costs
