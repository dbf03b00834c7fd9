"""Seeded workloads: which requests are sent, and when.

A workload is a tuple of `RequestSpec`, ordered by arrival; the same arguments give the same one, on
any machine. Knows nothing of HTTP or of the engine: `bench.serve` and `bench.engine` drive the same
specs. Prompts are token ids, so their length is exact whatever the tokenizer.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

TRACES = Path(__file__).parent / "traces"
TRACE_FILES = {
    "azure-conv": TRACES / "azure_conv_2023.csv",
    "azure-code": TRACES / "azure_code_2023.csv",
    "mooncake": TRACES / "mooncake_conversation.jsonl",
}
MOONCAKE_BLOCK = 512  # prompt tokens per hash id
MOONCAKE_TICK_S = 3.0  # resolution of its timestamps
_WORD_LIST = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work night point "
    "home water room mother area money story fact month lot right study book eye job word business "
    "issue side kind head house service friend father power hour game line end member law car city"
)
_WORDS = tuple(_WORD_LIST.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """One request of a workload.

    Attributes:
        arrival_s: seconds after the start of the run; ignored by closed-loop drivers.
        prompt_token_ids: at least one, but where there is a text.
        max_tokens: output tokens; drivers set ignore_eos, so exactly as many are produced.
        text: sent instead of token ids, to servers that take none.
    """

    arrival_s: float
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Half-open range [low, high) of token ids that prompts are drawn from.

    The default avoids the special tokens at the start of common vocabularies and fits all but the
    smallest.
    """

    low: int = 1000
    high: int = 30000

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise ValueError(f"need 0 <= low < high, got [{self.low}, {self.high})")

    def draw(self, rng: random.Random, count: int) -> tuple[int, ...]:
        """`count` ids, uniform."""
        return tuple(rng.choices(range(self.low, self.high), k=count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Lengths of synthetic requests.

    Attributes:
        prompt_tokens: prompt length, >= 1.
        max_tokens: output length, >= 1.
        shared_prefix: fraction in [0, 1) of each prompt that all requests of a seed share.
    """

    prompt_tokens: int = 128
    max_tokens: int = 128
    shared_prefix: float = 0.0

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.max_tokens < 1:
            raise ValueError(f"lengths must be >= 1, got {self.prompt_tokens}, {self.max_tokens}")
        if not 0 <= self.shared_prefix < 1:
            raise ValueError(f"shared_prefix must be in [0, 1), got {self.shared_prefix}")


def fixed(
    count: int,
    shape: Shape,
    *,
    seed: int = 0,
    interval_s: float = 0.0,
    vocabulary: Vocabulary | None = None,
) -> tuple[RequestSpec, ...]:
    """`count` equal requests, one every `interval_s` seconds (0: all at once, a burst).

    With an interval this is the staggered pattern: request i arrives at i * interval_s.
    """
    return tuple(
        RequestSpec(arrival_s=i * interval_s, prompt_token_ids=prompt, max_tokens=shape.max_tokens)
        for i, prompt in enumerate(_prompts(count, shape, seed, vocabulary or Vocabulary()))
    )


def fixed_text(count: int, shape: Shape, *, seed: int = 0) -> tuple[RequestSpec, ...]:
    """`fixed` with words for token ids, one or two tokens each for most tokenizers."""
    words = Vocabulary(low=0, high=len(_WORDS))
    return tuple(
        dataclasses.replace(spec, text=" ".join(_WORDS[i] for i in spec.prompt_token_ids))
        for spec in fixed(count, shape, seed=seed, vocabulary=words)
    )


def poisson(
    count: int,
    shape: Shape,
    *,
    rate: float,
    seed: int = 0,
    vocabulary: Vocabulary | None = None,
) -> tuple[RequestSpec, ...]:
    """`count` equal requests with exponential gaps of mean 1 / `rate` seconds."""
    if rate <= 0:
        raise ValueError(f"rate must be > 0 requests/s, got {rate}")
    rng = random.Random(f"arrivals-{seed}")
    arrival_s = 0.0
    specs: list[RequestSpec] = []
    for prompt in _prompts(count, shape, seed, vocabulary or Vocabulary()):
        arrival_s += rng.expovariate(rate)
        specs.append(
            RequestSpec(arrival_s=arrival_s, prompt_token_ids=prompt, max_tokens=shape.max_tokens)
        )
    return tuple(specs)


def trace(
    name: str,
    *,
    count: int,
    seed: int = 0,
    speed: float = 1.0,
    length_scale: float = 1.0,
    max_prompt_tokens: int | None = None,
    max_output_tokens: int | None = None,
    vocabulary: Vocabulary | None = None,
) -> tuple[RequestSpec, ...]:
    """The first `count` requests of a public trace.

    Args:
        name: a key of `TRACE_FILES`.
        count: rows to replay; the excerpt may hold fewer.
        seed: of prompt tokens and, for Mooncake, of the jitter inside a timestamp bin.
        speed: > 1 replays faster.
        length_scale: multiplies prompt and output lengths (also Mooncake's block, so that the share
            of reused prefix stays), to fit a small model or machine.
        max_prompt_tokens: longer prompts are cut.
        max_output_tokens: longer outputs are cut.
        vocabulary: where prompt tokens come from.

    Raises:
        ValueError: unknown name, or a speed or scale that is not positive.
    """
    if name not in TRACE_FILES:
        raise ValueError(f"unknown trace {name!r}, have {', '.join(sorted(TRACE_FILES))}")
    if speed <= 0 or length_scale <= 0:
        raise ValueError(f"speed and length_scale must be > 0, got {speed}, {length_scale}")
    vocabulary = vocabulary or Vocabulary()
    read = _read_mooncake if name == "mooncake" else _read_azure
    specs: list[RequestSpec] = []
    for row in read(TRACE_FILES[name], count, seed):
        num_prompt = max(1, round(row.prompt_tokens * length_scale))
        num_output = max(1, round(row.output_tokens * length_scale))
        num_prompt = min(num_prompt, max_prompt_tokens or num_prompt)
        num_output = min(num_output, max_output_tokens or num_output)
        block = max(1, round(MOONCAKE_BLOCK * length_scale))
        specs.append(
            RequestSpec(
                arrival_s=row.arrival_s / speed,
                prompt_token_ids=_block_prompt(row.blocks, num_prompt, block, seed, vocabulary),
                max_tokens=num_output,
            )
        )
    specs.sort(key=lambda spec: spec.arrival_s)
    start_s = specs[0].arrival_s if specs else 0.0
    return tuple(dataclasses.replace(spec, arrival_s=spec.arrival_s - start_s) for spec in specs)


@dataclass(frozen=True, slots=True)
class _TraceRow:
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[str, ...]  # identity of each block of the prompt


def _read_azure(path: Path, count: int, seed: int) -> Iterator[_TraceRow]:
    del seed  # timestamps are exact
    start: datetime | None = None
    with path.open(newline="") as file:
        for index, row in zip(range(count), csv.DictReader(file), strict=False):
            # Seven digits of a second; datetime takes six.
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])
            start = start or at
            yield _TraceRow(
                arrival_s=(at - start).total_seconds(),
                prompt_tokens=int(row["ContextTokens"]),
                output_tokens=int(row["GeneratedTokens"]),
                blocks=(f"row-{index}",),
            )


def _read_mooncake(path: Path, count: int, seed: int) -> Iterator[_TraceRow]:
    rng = random.Random(f"jitter-{seed}")
    with path.open() as file:
        for _, line in zip(range(count), file, strict=False):
            row = json.loads(line)
            yield _TraceRow(
                arrival_s=row["timestamp"] / 1000 + rng.uniform(0, MOONCAKE_TICK_S),
                prompt_tokens=row["input_length"],
                output_tokens=row["output_length"],
                blocks=tuple(str(block) for block in row["hash_ids"]),
            )


def _block_prompt(
    blocks: Sequence[str], length: int, block: int, seed: int, vocabulary: Vocabulary
) -> tuple[int, ...]:
    """A prompt whose tokens depend on the identity of its blocks only.

    Blocks past the last id (an unshared prompt has one) are drawn from the last one's stream.
    """
    ids: list[int] = []
    for index, name in enumerate(blocks):
        remaining = length - len(ids)
        if remaining <= 0:
            break
        is_last = index == len(blocks) - 1
        rng = random.Random(f"block-{seed}-{name}")
        ids.extend(vocabulary.draw(rng, remaining if is_last else min(block, remaining)))
    return tuple(ids)


def _prompts(
    count: int, shape: Shape, seed: int, vocabulary: Vocabulary
) -> Iterator[tuple[int, ...]]:
    num_shared = int(shape.prompt_tokens * shape.shared_prefix)
    shared = vocabulary.draw(random.Random(f"shared-{seed}"), num_shared)
    for i in range(count):
        rng = random.Random(f"prompt-{seed}-{i}")
        yield shared + vocabulary.draw(rng, shape.prompt_tokens - num_shared)


def total_tokens(specs: Iterable[RequestSpec]) -> int:
    """Prompt and output tokens of a workload."""
    return sum(len(spec.prompt_token_ids) + spec.max_tokens for spec in specs)
