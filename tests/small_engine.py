"""A tiny model's engines, built once in a test run for all files that ask for the same one."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from replicas.config import EngineConfig
from replicas.engine.engine import Engine
from replicas.engine.startup import build_engine
from replicas.wire import TokenDelta
from tests.fake_runner import make_request, run

MODEL = Path(__file__).parent / "golden" / "llama"
PROMPTS = {
    str(i): np.random.default_rng(i).integers(3, 256, n).tolist()
    for i, n in enumerate((1, 9, 33, 40, 5))
}
NUM_TOKENS = 24


@cache
def small_engine(*, num_pages: int = 64, speculation: str = "none") -> Engine:
    """Two programs; with 19 pages long texts preempt each other."""
    return build_engine(
        EngineConfig(
            model=str(MODEL),
            platform="cpu",
            dtype="float32",
            page_size=8,
            num_pages=num_pages,
            max_num_seqs=4,
            max_num_batched_tokens=16,
            max_mixed_tokens=16,
            max_model_len=128,
            speculation=speculation,
        )
    )


def generate(engine: Engine, keys: str = "01234", **sampling: Any) -> dict[str, list[TokenDelta]]:
    """The deltas of these prompts, run together; nothing may compile."""
    num_compiles = engine.load().num_compiles_after_warmup
    for key in keys:
        fields = {"ignore_eos": True, "seed": int(key), **sampling}
        request = make_request(key, PROMPTS[key], NUM_TOKENS, **fields)
        engine.validate(request)
        engine.add(request)
    deltas = run(engine)
    assert engine.load().num_compiles_after_warmup == num_compiles
    assert engine.load().num_free_pages == engine.load().num_pages
    return deltas
