"""Compares checkpoints with the reference logits and greedy tokens stored beside them.

`python -m bench.golden DIR...` prints one JSON line per directory of config.json, model.safetensors
and golden.npz (prompt_i, logits_i, greedy_i, margin_i). Everything is f32 and paged: prompt logits
by chunked prefill, greedy tokens by the engine itself.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.paged_forward import PagedForward
from replicas.config import EngineConfig
from replicas.engine.startup import build_engine
from replicas.models.registry import UnsupportedModelError
from replicas.wire import GenerateRequest, SamplingParams, SinkAddress

MAX_LOGIT_ERR = 2e-3
"""Largest difference of a logit that passes, f32."""
DECIDED_MARGIN = 5e-3
"""Gap between the two best logits from which on the greedy token must be equal."""

_CHUNK_SIZE = 16
_NO_SINK = SinkAddress(host="", port=0, sink_id="", key=b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenResult:
    """How one checkpoint compares.

    Attributes:
        name: the directory's.
        max_abs_logit_err: over all prompt positions and the vocabulary.
        greedy_match: greedy tokens equal to the reference, of `total`. Tokens after the first
            difference continue another text, so they count as different.
        total: greedy tokens compared; ends at an undecided position where the token differs.
        argmax_match: share of prompt positions with the reference's most likely token.
    """

    name: str
    max_abs_logit_err: float
    greedy_match: int
    total: int
    argmax_match: float

    @property
    def passed(self) -> bool:
        """Whether it meets the bars."""
        return self.max_abs_logit_err <= MAX_LOGIT_ERR and self.greedy_match == self.total


def compare(path: Path) -> GoldenResult:
    """Run one checkpoint directory against its golden.npz.

    Raises:
        UnsupportedModelError: the family or an option is not built.
        CheckpointError: the weights do not fit the config.
    """
    model = PagedForward(path, dtype="float32", chunk_size=_CHUNK_SIZE)
    golden = np.load(path / "golden.npz")
    indices = range(sum(key.startswith("prompt_") for key in golden.files))
    prompts = [golden[f"prompt_{i}"].tolist() for i in indices]
    references = [golden[f"greedy_{i}"].tolist() for i in indices]

    errors: list[float] = []
    argmax_equal: list[npt.NDArray[np.bool_]] = []
    for i in indices:
        logits, reference = model.logits(prompts[i]), golden[f"logits_{i}"]
        errors.append(float(np.abs(logits - reference).max()))
        argmax_equal.append(logits.argmax(-1) == reference.argmax(-1))

    outputs = generate_greedy(path, prompts, [len(tokens) for tokens in references])
    counts = [
        count_equal(output, reference, golden[f"margin_{i}"])
        for i, output, reference in zip(indices, outputs, references, strict=True)
    ]
    return GoldenResult(
        name=path.name,
        max_abs_logit_err=max(errors),
        greedy_match=sum(equal for equal, _ in counts),
        total=sum(total for _, total in counts),
        argmax_match=float(np.concatenate(argmax_equal).mean()),
    )


def count_equal(
    tokens: Sequence[int],
    reference: Sequence[int],
    margins: npt.NDArray[np.floating],
    *,
    decided_margin: float = DECIDED_MARGIN,
) -> tuple[int, int]:
    """Return how many greedy tokens are equal, and of how many that should be.

    The comparison ends where tokens differ at a margin below `decided_margin`: either is right
    there, and what follows is another text.
    """
    for position, (token, expected) in enumerate(zip(tokens, reference, strict=True)):
        if token != expected:
            is_decided = margins[position] >= decided_margin
            return position, len(reference) if is_decided else position
    return len(reference), len(reference)


def generate_greedy(
    path: Path,
    prompts: Sequence[Sequence[int]],
    max_tokens: Sequence[int],
    *,
    dtype: str = "float32",
    chunk_size: int = _CHUNK_SIZE,
) -> list[list[int]]:
    """Return the engine's greedy tokens for each prompt, all running together; ignores EOS."""
    page_size = 16
    longest = max(len(p) + n for p, n in zip(prompts, max_tokens, strict=True))
    engine = build_engine(
        EngineConfig(
            model=str(path),
            dtype="bfloat16" if dtype == "bfloat16" else "float32",
            page_size=page_size,
            num_pages=1 + len(prompts) * -(-longest // page_size),
            max_num_seqs=max(8, len(prompts)),
            max_model_len=longest,
            max_num_batched_tokens=chunk_size,
            max_mixed_tokens=chunk_size,
        )
    )
    for i, (prompt, count) in enumerate(zip(prompts, max_tokens, strict=True)):
        request = GenerateRequest(
            request_id=str(i),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=count, ignore_eos=True),
            sink=_NO_SINK,
        )
        engine.validate(request)
        engine.add(request)
    outputs: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for delta in engine.step().deltas:
            outputs[int(delta.request_id)] += delta.token_ids
    return outputs


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line per directory; return 1 if one that is supported misses the bars."""
    parser = argparse.ArgumentParser(prog="python -m bench.golden", description=__doc__)
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR")
    args = parser.parse_args(argv)
    has_failed = False
    for path in args.directories:
        try:
            result = compare(path)
        except UnsupportedModelError as error:
            print(json.dumps({"name": path.name, "status": f"unsupported: {error}"}), flush=True)
            continue
        has_failed |= not result.passed
        status = "passed" if result.passed else "failed"
        print(json.dumps({**asdict(result), "status": status}), flush=True)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
