"""The default model against its reference continuations, in f32 and bf16, through the engine."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from bench.golden import count_equal, generate_greedy
from bench.paged_forward import PagedForward
from replicas.config import Quantization


@dataclass(frozen=True)
class Continuation:
    prompt: list[int]
    greedy: list[int]
    margins: np.ndarray
    top5_ids: np.ndarray
    top5_logprobs: np.ndarray


@cache
def continuations(path: Path) -> list[Continuation]:
    items = json.loads(path.read_text())["items"]
    return [
        Continuation(
            prompt=item["prompt_token_ids"],
            greedy=item["greedy_token_ids"],
            margins=np.array(item["margins"]),
            top5_ids=np.array([[i for i, _ in row] for row in item["top5_logprobs"]]),
            top5_logprobs=np.array([[p for _, p in row] for row in item["top5_logprobs"]]),
        )
        for item in items
    ]


def divergence(logits: np.ndarray, reference: Continuation) -> np.ndarray:
    """KL(reference || ours) of each position over six events: the five best tokens, the rest."""
    logits = logits.astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    ours = np.exp(np.take_along_axis(logprobs, reference.top5_ids, axis=1))
    theirs = np.exp(reference.top5_logprobs)
    ours = np.append(ours, np.maximum(1 - ours.sum(axis=1, keepdims=True), 1e-9), axis=1)
    theirs = np.append(theirs, np.maximum(1 - theirs.sum(axis=1, keepdims=True), 1e-9), axis=1)
    return (theirs * np.log(theirs / ours)).sum(axis=1)


@pytest.mark.parametrize(("dtype", "decided_margin"), [("float32", 0.01), ("bfloat16", 0.25)])
def test_the_engine_continues_like_the_reference(
    golden_dir: Path, smollm2_dir: Path, dtype: str, decided_margin: float
) -> None:
    references = continuations(golden_dir / "smollm2_135m.json")
    outputs = generate_greedy(
        smollm2_dir,
        [reference.prompt for reference in references],
        [len(reference.greedy) for reference in references],
        dtype=dtype,
        chunk_size=32,
    )
    for output, reference in zip(outputs, references, strict=True):
        equal, total = count_equal(
            output, reference.greedy, reference.margins, decided_margin=decided_margin
        )
        assert equal == total


@pytest.mark.parametrize(
    ("dtype", "quantization", "min_agreement", "max_divergence"),
    [
        ("float32", "none", 1.0, 1e-4),
        ("bfloat16", "none", 0.97, 0.003),
        ("bfloat16", "int8", 0.95, 0.015),
    ],
)
def test_teacher_forced_distributions_stay_close(
    golden_dir: Path,
    smollm2_dir: Path,
    dtype: str,
    quantization: Quantization,
    min_agreement: float,
    max_divergence: float,
) -> None:
    references = continuations(golden_dir / "smollm2_135m.json")
    model = PagedForward(smollm2_dir, dtype=dtype, quantization=quantization, chunk_size=32)
    agreements: list[np.ndarray] = []
    divergences: list[np.ndarray] = []
    for reference in references:
        logits = model.logits(reference.prompt + reference.greedy[:-1])
        logits = logits[len(reference.prompt) - 1 :]
        agreements.append(logits.argmax(axis=1) == reference.greedy)
        divergences.append(divergence(logits, reference))
    assert np.concatenate(agreements).mean() >= min_agreement
    assert np.concatenate(divergences).mean() <= max_divergence
