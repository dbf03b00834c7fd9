"""Choices of the random checkpoints from one seed, and those that all families have in common."""

from __future__ import annotations

from typing import Any

import numpy as np

ACTIVATIONS = ("silu", "silu", "gelu", "gelu_pytorch_tanh", "relu")


class Draw:
    """Choices from one seed, other ones for each family."""

    def __init__(self, family: str, seed: int) -> None:
        self._rng = np.random.default_rng([seed, *family.encode()])

    def one(self, *options: Any) -> Any:
        """One of the options."""
        return options[int(self._rng.integers(len(options)))]

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return bool(self._rng.random() < probability)

    def number(self, low: float, high: float) -> float:
        """A number in [low, high)."""
        return round(float(self._rng.uniform(low, high)), 3)


def draw_scaling(kind: str, num_pairs: int, draw: Draw) -> dict[str, Any]:
    """Return the parameters of a kind of rotary scaling."""
    scaling: dict[str, Any] = {"rope_type": kind}
    if kind in ("linear", "dynamic", "llama3", "yarn"):
        scaling["factor"] = draw.one(2.0, 4.0)
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        scaling["original_max_position_embeddings"] = 32
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = 32
        if draw.chance(0.5):
            scaling |= {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": draw.chance(0.5)}
        if draw.chance(0.4):
            scaling |= draw.one({"attention_factor": 1.3}, {"mscale": 0.7, "mscale_all_dim": 1.2})
    if kind == "longrope":
        scaling["short_factor"] = [draw.number(1, 2) for _ in range(num_pairs)]
        scaling["long_factor"] = [draw.number(2, 4) for _ in range(num_pairs)]
        scaling["original_max_position_embeddings"] = draw.one(32, 112)
    return scaling
