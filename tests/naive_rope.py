"""Rotary frequencies of every kind in plain Python floats, one pair at a time.

Independent of the product: written from the formulas of the papers and of transformers'
`modeling_rope_utils`, reads config.json by itself, and knows the length of the text as the
reference does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def naive_rope(
    raw: Mapping[str, Any], *, rotary_dim: int, length: int, default_theta: float = 10_000.0
) -> tuple[list[float], float]:
    """Frequency of each pair for a text of `length` tokens, and the factor of sine and cosine."""
    stated = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    kind = stated.get("rope_type", stated.get("type", "default"))
    theta = stated.get("rope_theta", raw.get("rope_theta", default_theta))
    longest = raw.get("max_position_embeddings", 2048)
    original = stated.get(
        "original_max_position_embeddings", raw.get("original_max_position_embeddings", longest)
    )
    if kind == "dynamic":
        grown = stated["factor"] * max(length, longest) / longest - (stated["factor"] - 1)
        theta *= grown ** (rotary_dim / (rotary_dim - 2))
    plain = [1 / theta ** (2 * i / rotary_dim) for i in range(rotary_dim // 2)]
    if kind in ("default", "dynamic"):
        return plain, 1.0
    if kind == "linear":
        return [frequency / stated["factor"] for frequency in plain], 1.0
    if kind == "llama3":
        return [_llama3(frequency, stated, original) for frequency in plain], 1.0
    factor = stated.get("factor") or longest / original
    if kind == "yarn":
        scaled = [
            _yarn(i, frequency, stated, (factor, original, rotary_dim, theta))
            for i, frequency in enumerate(plain)
        ]
        return scaled, _yarn_attention_factor(stated, factor)
    assert kind in ("longrope", "su"), kind
    divisors = stated["long_factor" if length > original else "short_factor"]
    attention_factor = stated.get("attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1
    return [f / d for f, d in zip(plain, divisors, strict=True)], attention_factor


def _llama3(frequency: float, stated: Mapping[str, Any], original: int) -> float:
    wavelength = 2 * math.pi / frequency
    low, high = stated["low_freq_factor"], stated["high_freq_factor"]
    if wavelength > original / low:
        return frequency / stated["factor"]
    if wavelength < original / high:
        return frequency
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / stated["factor"] + smooth * frequency


def _yarn(
    pair: int, frequency: float, stated: Mapping[str, Any], scale: tuple[float, int, int, float]
) -> float:
    factor, original, rotary_dim, theta = scale

    def bound(rotations: float) -> float:
        turns = original / (rotations * 2 * math.pi)
        return rotary_dim * math.log(turns) / (2 * math.log(theta))

    first, last = bound(stated.get("beta_fast") or 32), bound(stated.get("beta_slow") or 1)
    if stated.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    if first == last:
        last += 0.001
    ramp = min(1.0, max(0.0, (pair - first) / (last - first)))
    return frequency / factor * ramp + frequency * (1 - ramp)


def _yarn_attention_factor(stated: Mapping[str, Any], factor: float) -> float:
    if stated.get("attention_factor") is not None:
        return stated["attention_factor"]

    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1

    if stated.get("mscale") and stated.get("mscale_all_dim"):
        return temperature(stated["mscale"]) / temperature(stated["mscale_all_dim"])
    return temperature(1)
