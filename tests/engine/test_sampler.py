"""The sampler against a numpy oracle: exact support, right frequencies, rows independent."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from replicas.engine.sampler import SamplingArrays, sample

VOCAB_SIZE = 9000  # large enough for the block search of candidates
NUM_ROWS = 256


@jax.jit
def sample_some(logits: jax.Array, arrays: SamplingArrays, is_wanted: jax.Array) -> jax.Array:
    nothing = jnp.zeros_like(is_wanted)
    return sample(logits, arrays, is_wanted, is_changed=nothing, change=lambda logits, *_: logits)


def sample_all(logits: np.ndarray, arrays: SamplingArrays) -> jax.Array:
    return sample_some(logits, arrays, np.ones(len(logits), bool))


@cache
def logits_row(vocab_size: int = VOCAB_SIZE) -> np.ndarray:
    """A row of distinct logits with a head of likely tokens and a long tail."""
    rng = np.random.default_rng(0)
    row = rng.standard_normal(vocab_size) * 1.5
    row[rng.permutation(vocab_size)[:20]] += 6.0
    return row.astype(np.float32)


def make_arrays(
    num_rows: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    first_seed: int = 0,
) -> SamplingArrays:
    seeds = np.zeros((num_rows, 2), np.uint32)
    seeds[:, 1] = first_seed + np.arange(num_rows)
    return SamplingArrays(
        temperature=np.full(num_rows, temperature, np.float32),
        top_k=np.full(num_rows, top_k, np.int32),
        top_p=np.full(num_rows, top_p, np.float32),
        seeds=seeds,
        positions=np.full(num_rows, 7, np.int32),
    )


def oracle(row: np.ndarray, *, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Probabilities after temperature, then top-k, then top-p on what is left, in f64."""
    scaled = row.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    descending = np.argsort(-row, kind="stable")
    if top_k:
        weights[descending[top_k:]] = 0.0
    weights /= weights.sum()
    mass_above = np.cumsum(weights[descending]) - weights[descending]
    weights[descending[mass_above >= top_p]] = 0.0
    return weights / weights.sum()


def draw(row: np.ndarray, num_draws: int, **parameters: float) -> np.ndarray:
    logits = jnp.asarray(np.tile(row, (NUM_ROWS, 1)))
    return np.concatenate(
        [
            np.asarray(sample_all(logits, make_arrays(NUM_ROWS, first_seed=first, **parameters)))
            for first in range(0, num_draws, NUM_ROWS)
        ]
    )


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, 0, 1.0),
        (0.5, 0, 1.0),
        (2.0, 0, 1.0),
        (1.0, 1, 1.0),
        (1.0, 40, 1.0),
        (1.0, 127, 1.0),
        (1.0, 128, 1.0),
        (1.0, 500, 1.0),
        (0.4, 3000, 1.0),
        (1.0, 0, 1e-6),
        (1.0, 0, 5e-324),  # above 0, and 0 in 32 bits
        (1.0, 500, 1e-44),
        (0.7, 0, 0.6),
        (1.0, 0, 0.5),
        (1.5, 0, 0.9),
        (0.8, 40, 0.7),
        (3.0, 100, 0.99),
        (2.0, 500, 0.8),
    ],
)
def test_draws_follow_the_distribution(temperature: float, top_k: int, top_p: float) -> None:
    row = logits_row()
    parameters = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    expected = oracle(row, **parameters)
    num_draws = 4096
    counts = np.bincount(draw(row, num_draws, **parameters), minlength=VOCAB_SIZE)
    assert counts[expected == 0].sum() == 0
    is_frequent = expected * num_draws >= 8
    observed = np.append(counts[is_frequent], counts[~is_frequent].sum())
    wanted = np.append(expected[is_frequent], expected[~is_frequent].sum()) * num_draws
    is_bin = wanted > 1e-9
    if is_bin.sum() > 1:
        assert stats.chisquare(observed[is_bin], wanted[is_bin]).pvalue > 1e-3


def test_a_wide_nucleus_leaves_the_candidates() -> None:
    """The cases above do reach the whole-vocabulary path."""
    expected = oracle(logits_row(), temperature=1.5, top_k=0, top_p=0.9)
    assert (expected > 0).sum() > 1000


def test_the_tail_is_drawn_evenly() -> None:
    """Blocks of the two-level CDF hold many rare tokens: all of them must come up."""
    row = np.zeros(1000, np.float32)
    counts = np.bincount(draw(row, 16384), minlength=1000)
    assert stats.chisquare(counts).pvalue > 1e-3


def test_greedy_rows_take_the_first_of_equal_maxima() -> None:
    logits = np.zeros((8, 300), np.float32)
    logits[:, [17, 41]] = 2.0
    assert sample_all(logits, make_arrays(8, temperature=0.0)).tolist() == [17] * 8


def test_tokens_tied_with_the_last_kept_one_are_kept() -> None:
    row = np.full(400, -5.0, np.float32)
    row[:5] = [3.0, 2.0, 2.0, 2.0, 1.0]
    assert set(draw(row, 1024, top_k=2).tolist()) == {0, 1, 2, 3}
    row[:] = 0.0
    assert len(set(draw(row, 4096, top_k=2).tolist())) == 400
    assert len(set(draw(row, 4096, top_p=0.1).tolist())) == 400


@pytest.mark.parametrize("top_k", [0, 50, 500])
def test_a_row_without_probabilities_gets_some_token(top_k: int) -> None:
    for value in (np.nan, -np.inf, np.inf):
        row = np.full(1000, value, np.float32)
        tokens = draw(row, 256, top_k=top_k, top_p=0.9)
        assert ((tokens >= 0) & (tokens < 1000)).all()


@pytest.mark.parametrize("vocab_size", [60, 9000])
def test_masked_tokens_are_never_drawn(vocab_size: int) -> None:
    row = np.array(logits_row(vocab_size))
    row[::2] = -np.inf
    for parameters in ({}, {"top_k": 30}, {"top_p": 0.99, "temperature": 4.0}):
        assert (draw(row, 512, **parameters) % 2 == 1).all()


def test_extreme_temperatures_are_finite() -> None:
    row = logits_row()
    assert set(draw(row, 256, temperature=1e-30).tolist()) == {int(row.argmax())}
    assert len(set(draw(row, 4096, temperature=1e9).tolist())) > 3000


def test_a_top_k_of_the_whole_vocabulary_changes_nothing() -> None:
    row = logits_row(300)
    np.testing.assert_array_equal(draw(row, 512, top_k=300), draw(row, 512))
    np.testing.assert_array_equal(draw(row, 512, top_k=2**31 - 1), draw(row, 512))


def test_the_draw_depends_on_seed_and_position_only() -> None:
    logits = jnp.asarray(np.tile(logits_row(), (64, 1)))
    arrays = make_arrays(64)
    seeds = np.full((64, 2), 5, np.uint32)
    same = sample_all(logits, arrays._replace(seeds=seeds))
    assert len(set(same.tolist())) == 1
    by_position = sample_all(
        logits, arrays._replace(seeds=seeds, positions=np.arange(64, dtype=np.int32))
    )
    assert by_position[7] == same[0]
    assert len(set(by_position.tolist())) > 8
    high_word = sample_all(logits, arrays._replace(seeds=arrays.seeds[:, ::-1].copy()))
    assert (np.asarray(high_word) != np.asarray(sample_all(logits, arrays))).mean() > 0.5


@pytest.mark.parametrize("vocab_size", [100, 256, 9000])
def test_a_row_does_not_depend_on_its_neighbours(vocab_size: int) -> None:
    """Every path at once, against the same rows in other batches, orders and bucket sizes."""
    rng = np.random.default_rng(1)
    num_rows = 64
    logits = (rng.standard_normal((num_rows, vocab_size)) * 2).astype(np.float32)
    arrays = SamplingArrays(
        temperature=rng.choice([0.0, 0.5, 1.0, 3.0], num_rows).astype(np.float32),
        top_k=rng.choice([0, 0, 1, 50, 90, 127, 128, 300], num_rows).astype(np.int32),
        top_p=rng.choice([1.0, 1.0, 0.3, 0.9, 0.99], num_rows).astype(np.float32),
        seeds=rng.integers(0, 2**32, (num_rows, 2), dtype=np.uint32),
        positions=rng.integers(0, 8192, num_rows).astype(np.int32),
    )
    together = np.asarray(sample_all(logits, arrays))
    order = rng.permutation(num_rows)
    for batch_size in (8, 16, 32):
        for rows in order.reshape(-1, batch_size):
            part = sample_all(logits[rows], SamplingArrays(*(a[rows] for a in arrays)))
            np.testing.assert_array_equal(np.asarray(part), together[rows])
    is_wanted = rng.random(num_rows) < 0.3
    some = np.asarray(sample_some(logits, arrays, is_wanted))
    np.testing.assert_array_equal(some[is_wanted], together[is_wanted])
    for row in range(0, num_rows, 5):
        alone = SamplingArrays(*(np.repeat(a[row : row + 1], 8, axis=0) for a in arrays))
        greedy_neighbours = alone.temperature.copy()
        greedy_neighbours[1:] = 0.0
        tokens = sample_all(
            np.repeat(logits[row : row + 1], 8, axis=0),
            alone._replace(temperature=greedy_neighbours),
        )
        assert tokens[0] == together[row]


def test_an_uneven_number_of_rows_is_drawn() -> None:
    logits = np.tile(logits_row(300), (13, 1))
    full = np.asarray(sample_all(np.tile(logits_row(300), (16, 1)), make_arrays(16)))
    np.testing.assert_array_equal(np.asarray(sample_all(logits, make_arrays(13))), full[:13])
