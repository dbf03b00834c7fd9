"""Masks of allowed tokens: the reference against numpy, and the native kernel against it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import token_masks
from kernels.cpu import token_masks as native

NEVER = -np.inf
REFERENCE = jax.jit(token_masks.apply_token_masks)
NATIVE = jax.jit(native.apply_token_masks)


def draw(num_logit_rows: int, count: int, vocab_size: int, *, density: float, seed: int = 0):
    rng = np.random.default_rng(seed)
    # Few different values: equal ones must be common.
    logits = rng.integers(-40, 40, (num_logit_rows, vocab_size)).astype(np.float32) / 8
    rows = rng.integers(0, num_logit_rows, count).astype(np.int32)
    is_allowed = rng.random((count, vocab_size)) < density
    bits = np.packbits(is_allowed, axis=1, bitorder="little")
    words = np.zeros((count, -(-vocab_size // 32) * 4), np.uint8)
    words[:, : bits.shape[1]] = bits
    return logits, rows, words.view(np.int32), is_allowed


def expected(logits, rows, is_allowed):
    allowed = np.where(is_allowed, logits[rows], NEVER)
    return allowed, np.argmax(allowed, axis=1)


@pytest.mark.parametrize("vocab_size", [7, 64, 97, 4099])
@pytest.mark.parametrize("density", [0.001, 0.5, 1.0])
def test_reference_equals_numpy(vocab_size: int, density: float) -> None:
    logits, rows, masks, is_allowed = draw(5, 24, vocab_size, density=density)
    needs = np.ones(24, bool)
    allowed, best = REFERENCE(logits, rows, masks, needs, np.array([13], np.int32))
    want_allowed, want_best = expected(logits, rows, is_allowed)
    np.testing.assert_array_equal(allowed[:13], want_allowed[:13])
    np.testing.assert_array_equal(best[:13], want_best[:13])


@pytest.mark.parametrize("vocab_size", [7, 64, 97, 4099])
@pytest.mark.parametrize("density", [0.0, 0.001, 0.5, 1.0])
def test_native_equals_numpy(vocab_size: int, density: float, instruction_set: str) -> None:
    del instruction_set
    logits, rows, masks, is_allowed = draw(5, 13, vocab_size, density=density)
    needs = np.arange(13) % 3 > 0
    allowed, best = NATIVE(logits, rows, masks, needs, np.array([13], np.int32))
    want_allowed, want_best = expected(logits, rows, is_allowed)
    np.testing.assert_array_equal(np.asarray(allowed)[needs], want_allowed[needs])
    np.testing.assert_array_equal(best, want_best)


def test_native_reads_no_row_that_is_not_in_use_and_no_token_that_is_not_allowed() -> None:
    logits, rows, masks, is_allowed = draw(4, 6, 97, density=0.3)
    rows[:3] = [0, 1, 0]
    logits[2:] = np.nan
    logits[0, ~(is_allowed[0] | is_allowed[2])] = np.nan
    rows[3:] = 1_000_000
    needs = np.ones(6, bool)
    allowed, best = NATIVE(logits, rows, masks, needs, np.array([3], np.int32))
    want_allowed, want_best = expected(logits, np.clip(rows, 0, 3), is_allowed)
    np.testing.assert_array_equal(allowed[1], want_allowed[1])
    np.testing.assert_array_equal(best[1], want_best[1])
    for row in (0, 2):
        is_known = ~np.isnan(want_allowed[row])
        assert best[row] == np.argmax(np.where(is_known, want_allowed[row], NEVER))


@pytest.mark.parametrize("function", [REFERENCE, NATIVE])
def test_a_row_past_the_last_is_the_last(function) -> None:
    logits, rows, masks, is_allowed = draw(3, 8, 40, density=0.5)
    rows[0] = 99
    _, best = function(logits, rows, masks, np.ones(8, bool), np.array([8], np.int32))
    np.testing.assert_array_equal(best, expected(logits, np.minimum(rows, 2), is_allowed)[1])


@pytest.mark.parametrize("function", [REFERENCE, NATIVE])
def test_wrong_shapes_are_refused(function) -> None:
    logits, rows, masks, _ = draw(3, 8, 40, density=1.0)
    needs, count = np.ones(8, bool), np.array([8], np.int32)
    with pytest.raises(ValueError, match=r"masks must be \[8, 2\]"):
        function(logits, rows, masks[:, :1], needs, count)
    with pytest.raises(ValueError, match=r"needs_logits must be \[8\]"):
        function(logits, rows, masks, needs[:3], count)
    with pytest.raises(ValueError, match=r"logits must be \[R, V\]"):
        function(logits[0], rows, masks, needs, count)


def test_too_many_rows_in_use_are_refused_at_run_time() -> None:
    logits, rows, masks, _ = draw(3, 8, 40, density=1.0)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"num_rows must lie in \[0, 8\], got 9"):
        jax.block_until_ready(
            native.apply_token_masks(
                *map(jnp.asarray, (logits, rows, masks)), jnp.ones(8, bool), jnp.array([9])
            )
        )
