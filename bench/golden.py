"""Compares checkpoints with the reference logits and greedy tokens stored beside them.

`python -m bench.golden DIR...` prints one JSON line per directory of config.json, model.safetensors
and golden.npz (prompt_i, logits_i, greedy_i, margin_i). Everything is f32 and paged: prompt logits
by chunked prefill, greedy tokens by the engine itself. With `--quantization int8` matmuls are W8A8
and the bars wider; `--table` prints the table of docs/models.md, of both.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import numpy as np
import numpy.typing as npt

from bench.paged_forward import PagedForward
from replicas.config import EngineConfig, ModelConfig, Quantization
from replicas.engine.startup import build_engine
from replicas.models import hf_config
from replicas.models.registry import UnsupportedModelError, load_model_config
from replicas.wire import GenerateRequest, SamplingParams, SinkAddress

MAX_LOGIT_ERR = {"none": 2e-3, "int8": 0.15}
"""Largest difference of a logit that passes, by quantization."""
DECIDED_MARGIN = {"none": 5e-3, "int8": 0.3}
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
        quantization: of matmul weights and their inputs.
    """

    name: str
    max_abs_logit_err: float
    greedy_match: int
    total: int
    argmax_match: float
    quantization: Quantization = "none"

    @property
    def passed(self) -> bool:
        """Whether it meets the bars."""
        return (
            self.max_abs_logit_err <= MAX_LOGIT_ERR[self.quantization]
            and self.greedy_match == self.total
        )


def compare(
    path: Path, *, quantization: Quantization = "none", tensor_parallel: int = 1
) -> GoldenResult:
    """Run one checkpoint directory against its golden.npz.

    Args:
        path: the directory.
        quantization: of the weights.
        tensor_parallel: devices that the engine draws its tokens on; logits are of one device.

    Raises:
        UnsupportedModelError: the family or an option is not built.
        CheckpointError: the weights do not fit the config.
    """
    config = load_model_config(path)
    golden = np.load(path / "golden.npz")
    indices = range(sum(key.startswith("prompt_") for key in golden.files))
    prompts = [golden[f"prompt_{i}"].tolist() for i in indices]
    references = [golden[f"greedy_{i}"].tolist() for i in indices]
    longest = max(len(p) + len(r) for p, r in zip(prompts, references, strict=True))
    if longest > config.max_position_embeddings:
        hf_config.refuse(
            "max_position_embeddings",
            config.max_position_embeddings,
            f"a golden text has {longest} tokens",
        )

    errors: list[float] = []
    argmax_equal: list[npt.NDArray[np.bool_]] = []
    counts: list[tuple[int, int]] = []
    for members, max_len in _length_groups(config, prompts):
        model = PagedForward(
            path,
            dtype="float32",
            quantization=quantization,
            chunk_size=_CHUNK_SIZE,
            max_len=min(max_len, longest),
        )
        for i in members:
            logits, reference = model.logits(prompts[i]), golden[f"logits_{i}"]
            errors.append(float(np.abs(logits - reference).max()))
            argmax_equal.append(logits.argmax(-1) == reference.argmax(-1))
        max_tokens = {i: min(len(references[i]), max_len - len(prompts[i])) for i in members}
        members = [i for i in members if max_tokens[i] > 0]
        outputs = generate_greedy(
            path,
            [prompts[i] for i in members],
            [max_tokens[i] for i in members],
            quantization=quantization,
            tensor_parallel=tensor_parallel,
        )
        counts += [
            count_equal(
                output,
                references[i][: max_tokens[i]],
                golden[f"margin_{i}"],
                decided_margin=DECIDED_MARGIN[quantization],
            )
            for i, output in zip(members, outputs, strict=True)
        ]
    return GoldenResult(
        name=path.name,
        max_abs_logit_err=max(errors),
        greedy_match=sum(equal for equal, _ in counts),
        total=sum(total for _, total in counts),
        argmax_match=float(np.concatenate(argmax_equal).mean()),
        quantization=quantization,
    )


def _length_groups(
    config: ModelConfig, prompts: Sequence[Sequence[int]]
) -> list[tuple[list[int], int]]:
    """Return prompts that one engine serves as the reference does, and its longest sequence.

    All of them, but for longrope: the reference takes the frequencies by the length of each text,
    an engine by the longest that it admits (`ModelConfig.for_length`).
    """
    original = config.rope.original_max_position_embeddings
    if config.rope.kind != "longrope":
        return [(list(range(len(prompts))), config.max_position_embeddings)]
    is_long = [len(prompt) > original for prompt in prompts]
    groups = (
        ([i for i, long in enumerate(is_long) if not long], original),
        ([i for i, long in enumerate(is_long) if long], config.max_position_embeddings),
    )
    return [(members, max_len) for members, max_len in groups if members]


def count_equal(
    tokens: Sequence[int],
    reference: Sequence[int],
    margins: npt.NDArray[np.floating],
    *,
    decided_margin: float = DECIDED_MARGIN["none"],
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
    quantization: Quantization = "none",
    tensor_parallel: int = 1,
    chunk_size: int = _CHUNK_SIZE,
) -> list[list[int]]:
    """Return the engine's greedy tokens for each prompt, all running together; ignores EOS."""
    if not prompts:
        return []
    page_size = 16
    longest = max(len(p) + n for p, n in zip(prompts, max_tokens, strict=True))
    engine = build_engine(
        EngineConfig(
            model=str(path),
            dtype="bfloat16" if dtype == "bfloat16" else "float32",
            quantization=quantization,
            tensor_parallel=tensor_parallel,
            page_size=page_size,
            # For all, on each of the devices where these hold pages of their own.
            num_pages=tensor_parallel * (1 + len(prompts) * -(-longest // page_size)),
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


def make_table(directories: Sequence[Path]) -> str:
    """Return the table of docs/models.md: each checkpoint in f32 and in int8.

    Raises:
        UnsupportedModelError: the family or an option of one is not built.
    """
    rows = [
        "| checkpoint | family | largest logit error, f32 | greedy, f32 | int8 | greedy, int8 |",
        "|---|---|---|---|---|---|",
    ]
    for path in directories:
        family = load_model_config(path).family
        rows.append(table_row(family, compare(path), compare(path, quantization="int8")))
    return "\n".join(rows)


def table_row(family: str, exact: GoldenResult, quantized: GoldenResult) -> str:
    """Return a row of `make_table`."""
    cells = (
        exact.name,
        f"`{family}`",
        f"{exact.max_abs_logit_err:.1e}",
        f"{exact.greedy_match} of {exact.total}",
        f"{quantized.max_abs_logit_err:.3f}",
        f"{quantized.greedy_match} of {quantized.total}",
    )
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line per directory; return 1 if one that is supported misses the bars."""
    parser = argparse.ArgumentParser(prog="python -m bench.golden", description=__doc__)
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR")
    parser.add_argument("--quantization", choices=list(MAX_LOGIT_ERR), default="none")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="devices of the engine")
    parser.add_argument("--table", action="store_true", help="print the table of docs/models.md")
    args = parser.parse_args(argv)
    if args.table:
        print(make_table(args.directories))
        return 0
    if args.tensor_parallel > 1:
        jax.config.update("jax_num_cpu_devices", args.tensor_parallel)
    has_failed = False
    for path in args.directories:
        try:
            result = compare(
                path, quantization=args.quantization, tensor_parallel=args.tensor_parallel
            )
        except UnsupportedModelError as error:
            print(json.dumps({"name": path.name, "status": f"unsupported: {error}"}), flush=True)
            continue
        has_failed |= not result.passed
        status = "passed" if result.passed else "failed"
        print(json.dumps({**asdict(result), "status": status}), flush=True)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
