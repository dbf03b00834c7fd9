"""What lower precision costs: `python -m bench.quality MODEL_DIR`.

Teacher-forced: every row reads the same tokens, and its distribution over the next one is compared
with that of the f32 model. Texts are the greedy continuations of tests/golden (made by
SmolLM2-135M, but any model of its tokenizer can be asked) and this project's licence, Apache-2.0.
Everything runs paged and in chunks, with the kernels that serve.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from bench import report
from bench.paged_forward import PagedForward

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden" / "smollm2_135m.json"
LONG_TEXT = ROOT / "LICENSE"
RECIPES: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, int8 KV": {"dtype": "bfloat16", "kv_dtype": "int8"},
    "int8, no rotation": {"dtype": "bfloat16", "quantization": "int8", "rotates": False},
    "int8, all layers": {"dtype": "bfloat16", "quantization": "int8", "keeps_first": False},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int8, int8 KV": {"dtype": "bfloat16", "quantization": "int8", "kv_dtype": "int8"},
}
_CHUNK_SIZE = 128
_WINDOW = 512
"""Tokens of the long text in one sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Tokens, and from which of them on the next one's distribution is compared.

    Attributes:
        token_ids: what the model reads.
        first: first position that is compared.
    """

    token_ids: list[int]
    first: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """How close a recipe stays to f32.

    Attributes:
        recipe: its name.
        text: which texts.
        num_positions: distributions compared.
        agreement: share of positions with the same most likely token.
        mean_kl: mean of KL(f32 || recipe) over the whole vocabulary, nats.
        max_kl: the largest.
    """

    recipe: str
    text: str
    num_positions: int
    agreement: float
    mean_kl: float
    max_kl: float


def load_continuations(path: Path = GOLDEN) -> list[Text]:
    """Prompts with their greedy continuations; positions that chose a token are compared."""
    items = json.loads(path.read_text(encoding="utf-8"))["items"]
    return [
        Text(
            token_ids=item["prompt_token_ids"] + item["greedy_token_ids"][:-1],
            first=len(item["prompt_token_ids"]) - 1,
        )
        for item in items
    ]


def load_long_text(model: Path, path: Path = LONG_TEXT, *, max_tokens: int) -> list[Text]:
    """The beginning of a text file, in windows of 512 tokens."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    encoded = tokenizer.encode(path.read_text(encoding="utf-8"), add_special_tokens=False)
    ids = encoded.ids[:max_tokens]
    return [Text(token_ids=ids[i : i + _WINDOW]) for i in range(0, len(ids), _WINDOW)]


def log_softmax(logits: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Log probabilities of each row, f64."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def compare(
    model: PagedForward,
    items: Sequence[Text],
    references: Sequence[npt.NDArray[np.floating]],
    *,
    recipe: str,
    text: str,
) -> Quality:
    """Compare a model's logits with the f32 logits of the same positions."""
    equal: list[npt.NDArray[np.bool_]] = []
    divergences: list[npt.NDArray[np.float64]] = []
    for reference, item in zip(references, items, strict=True):
        logits = model.logits(item.token_ids)[item.first :]
        expected, ours = log_softmax(reference), log_softmax(logits)
        divergences.append((np.exp(expected) * (expected - ours)).sum(axis=1))
        equal.append(reference.argmax(axis=1) == logits.argmax(axis=1))
    kl = np.concatenate(divergences)
    return Quality(
        recipe=recipe,
        text=text,
        num_positions=len(kl),
        agreement=float(np.concatenate(equal).mean()),
        mean_kl=float(kl.mean()),
        max_kl=float(kl.max()),
    )


def measure(
    path: Path, texts: dict[str, list[Text]], recipes: dict[str, dict[str, Any]] = RECIPES
) -> list[Quality]:
    """Run every recipe over every text."""
    sizes: dict[str, Any] = {"chunk_size": _CHUNK_SIZE, "max_len": _WINDOW}
    exact = PagedForward(path, dtype="float32", **sizes)
    references = {
        name: [exact.logits(item.token_ids)[item.first :] for item in items]
        for name, items in texts.items()
    }
    results: list[Quality] = []
    for recipe, options in recipes.items():
        model = PagedForward(path, **options, **sizes)
        results += [
            compare(model, items, references[name], recipe=recipe, text=name)
            for name, items in texts.items()
        ]
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table and write JSON; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL_DIR")
    parser.add_argument("--max-tokens", type=int, default=1024, help="of the long text")
    parser.add_argument("--output", type=Path, default=Path("bench/results/quality.json"))
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    texts = {
        "continuations": load_continuations(),
        "licence": load_long_text(args.model, max_tokens=args.max_tokens),
    }
    results = measure(args.model, texts)
    print(f"{'':20}{'text':16}{'positions':>10}{'top-1':>8}{'mean KL':>9}{'max KL':>9}")
    for r in results:
        print(
            f"{r.recipe:20}{r.text:16}{r.num_positions:10}{r.agreement:8.1%}"
            f"{r.mean_kl:9.4f}{r.max_kl:9.3f}"
        )
    report.write_json(
        args.output, {"stamp": report.stamp(), "results": [asdict(r) for r in results]}
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
