"""Engines of a tiny random model with a tokenizer, for outputs that follow grammars."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from replicas.config import EngineConfig
from replicas.engine.engine import Engine
from replicas.engine.startup import build_engine
from replicas.wire import GenerateRequest
from tests.checkpoints import write_checkpoint
from tests.fake_runner import make_request
from tests.tiny_tokenizer import write_model_dir

EOS = 1
VOCAB_SIZE = 640
"""More than the tokenizer's."""
MAX_MODEL_LEN = 128


@cache
def model_dir() -> Path:
    """A checkpoint of which every run has the same weights."""
    path = write_model_dir(Path(tempfile.mkdtemp(prefix="guided")))
    write_checkpoint(path, {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS}, seed=5)
    return path


@cache
def tokenizer() -> tokenizers.Tokenizer:
    """The model's."""
    return tokenizers.Tokenizer.from_file(str(model_dir() / "tokenizer.json"))


@cache
def guided_engine(**overrides: Any) -> Engine[Any]:
    """An engine with few and small programs; the same one for the same arguments."""
    fields: dict[str, Any] = {
        "model": str(model_dir()),
        "platform": "cpu",
        "dtype": "float32",
        "page_size": 8,
        "num_pages": 256,
        "max_num_seqs": 10,
        "max_num_batched_tokens": 16,
        "max_mixed_tokens": 16,
        "max_model_len": MAX_MODEL_LEN,
    }
    return build_engine(EngineConfig(**(fields | overrides)))


def prompt_of(seed: int, length: int = 12) -> list[int]:
    """A prompt without special tokens."""
    return np.random.default_rng(seed).integers(2, 500, length).tolist()


def add(engine: Engine[Any], request_id: str, seed: int, **fields: Any) -> GenerateRequest:
    """Queue a request at temperature 1 as a replica does."""
    prompt = fields.pop("prompt", None) or prompt_of(seed)
    request = make_request(
        request_id, prompt, **{"max_tokens": 60, "temperature": 1.0, "seed": seed, **fields}
    )
    engine.validate(request)
    engine.add(request, engine.make_matcher(request))
    return request


def text_of(token_ids: list[int]) -> str:
    """Text of an output, without special tokens."""
    return tokenizer().decode(token_ids)
