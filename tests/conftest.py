"""Strict jax for every test: fake CPU devices, no silent broadcasting between ranks.

Set in this process only, never through the environment: Ray workers that tests start must see what
a deployment sees.
"""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

_ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """Directory of the reference checkpoints."""
    return _ROOT / "tests" / "golden"


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The default model, which `make setup` imports."""
    return _ROOT / "models" / "smollm2-135m-instruct"
