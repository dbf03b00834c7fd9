"""Rotary position embedding: frequencies on the host, angles and rotation on the device.

Pure functions of a `RopeConfig`. Invariant: positions times frequencies are f32, as the reference
computes them; frequencies are computed once, in f64.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from replicas.config import RopeConfig

if TYPE_CHECKING:
    from jaxtyping import Array, Float32, Int32

type Angles = "tuple[Float32[Array, 'T R/2'], Float32[Array, 'T R/2']]"


def rope_frequencies(rope: RopeConfig, head_dim: int) -> npt.NDArray[np.float32]:
    """Return the angle per position of each rotated pair, f32 [R / 2].

    By kind:
        default: theta^(-2i / R).
        linear: divided by `factor` (position interpolation).
        dynamic: as default. NTK scaling grows the base with the sequence, beyond
            max_position_embeddings only, which no engine admits.
        llama3: wavelengths above original / low_freq_factor are divided by `factor`, those below
            original / high_freq_factor kept, blended linearly in the inverse wavelength between.
        yarn: as llama3, blended linearly in the index of the pair (Peng et al. 2023).
        longrope: divided by a factor of its own for each pair (Ding et al. 2024).
    """
    rotary_dim = head_dim if rope.rotary_dim is None else rope.rotary_dim
    frequencies = rope.theta ** -(np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        periods = rope.original_max_position_embeddings * frequencies / (2 * np.pi)
        kept = (periods - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        frequencies = _blend(frequencies, np.clip(kept, 0.0, 1.0), factor=rope.factor)
    elif rope.kind == "yarn":
        kept = _yarn_kept(rope, rotary_dim, num_pairs=len(frequencies))
        frequencies = _blend(frequencies, kept, factor=rope.factor)
    elif rope.kind == "longrope":
        divisors = rope.long_factors if rope.is_long else rope.short_factors
        frequencies = frequencies / np.array(divisors, np.float64)
    return frequencies.astype(np.float32)


def rope_angles(positions: Int32[Array, " T"], rope: RopeConfig, head_dim: int) -> Angles:
    """Return cosine and sine of every position's angles, times `attention_factor`.

    In f32: bf16 would round 257 to 256.
    """
    frequencies = jnp.asarray(rope_frequencies(rope, head_dim))
    angles = positions.astype(jnp.float32)[:, None] * frequencies[None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if rope.attention_factor != 1.0:
        cos, sin = cos * rope.attention_factor, sin * rope.attention_factor
    # Without the barrier XLA fuses them into every use: once per head of every layer.
    return lax.optimization_barrier((cos, sin))


def apply_rope(
    x: Float32[Array, "T H D"], angles: Angles, *, is_interleaved: bool = False
) -> Float32[Array, "T H D"]:
    """Rotate the first R dimensions of every head (Su et al. 2021).

    Pairs are (i, i + R / 2), or (2i, 2i + 1) if `is_interleaved`; R is twice the angles' width.
    """
    rotary_dim = 2 * angles[0].shape[1]
    if rotary_dim == x.shape[2]:
        return _rotate(x, angles, is_interleaved=is_interleaved)
    rotated = _rotate(x[:, :, :rotary_dim], angles, is_interleaved=is_interleaved)
    return jnp.concatenate([rotated, x[:, :, rotary_dim:]], axis=2)


def _rotate(
    x: Float32[Array, "T H R"], angles: Angles, *, is_interleaved: bool
) -> Float32[Array, "T H R"]:
    # first * cos - second * sin, then second * cos + first * sin. A reversal fuses with its
    # neighbours where a concatenation of the two does not.
    signs = jnp.array([-1.0, 1.0], jnp.float32)
    if is_interleaved:
        pairs, axis = x.reshape(*x.shape[:2], -1, 2), 3
        cos, sin = (table[:, None, :, None] for table in angles)
        signs = signs.reshape(1, 1, 1, 2)
    else:
        pairs, axis = x.reshape(*x.shape[:2], 2, -1), 2
        cos, sin = (table[:, None, None, :] for table in angles)
        signs = signs.reshape(1, 1, 2, 1)
    return (pairs * cos + jnp.flip(pairs, axis=axis) * (sin * signs)).reshape(x.shape)


def _blend(
    frequencies: npt.NDArray[np.floating], kept: npt.NDArray[np.floating], *, factor: float
) -> npt.NDArray[np.floating]:
    """Divide frequencies by `factor` where `kept` is 0, not at all where it is 1."""
    return (1 - kept) * frequencies / factor + kept * frequencies


def _yarn_kept(rope: RopeConfig, rotary_dim: int, *, num_pairs: int) -> npt.NDArray[np.floating]:
    """Return how much of each pair's frequency YaRN keeps, in [0, 1]."""

    def pair_that_turns(times: float) -> float:
        length = rope.original_max_position_embeddings / (times * 2 * math.pi)
        return rotary_dim * math.log(length) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncates:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # as the reference avoids a division by zero
    return 1 - np.clip((np.arange(num_pairs) - low) / (high - low), 0.0, 1.0)
