"""Same request, same tokens: the share of sequences that stay identical, condition by condition.

    python -m bench.determinism [--weights float32,bfloat16]

The reference is a batch of mixed lengths on a cold cache. Every other condition runs the same
requests, half of them greedy and half with seeded sampling, and is compared token by token: alone,
beside other neighbours, chunks of other sizes, with a warm prefix cache, preempted, in a new
process, with speculation. A condition that did not come about (nobody was preempted, nothing was
cached) counts as failed. Ends with status 1 unless every share is 100%.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import random
import subprocess
import sys
import tempfile
import time
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import report
from bench.arguments import integers
from replicas.config import EngineConfig
from replicas.engine.engine import Engine
from replicas.engine.startup import build_engine
from replicas.wire import GenerateRequest, SamplingParams, SinkAddress

_NO_SINK = SinkAddress(host="", port=0, sink_id="", key=b"")
_LENGTHS = (600, 1, 5, 17, 31, 64, 100, 8, 33, 150, 16, 40, 300, 90, 3, 65)
_SPECULATION_CONCURRENCY = 2
"""Speculation pays while few sequences run, and an engine may leave it off beside many."""
_NOT_BUILT = "not built"

Tokens = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The requests of every condition.

    Attributes:
        num_prompts: sequences.
        num_tokens: output tokens of each.
        max_prompt_tokens: longer prompts are cut.
        has_both_modes: every prompt runs greedy and sampled, instead of one of the two.
    """

    num_prompts: int
    num_tokens: int
    max_prompt_tokens: int
    has_both_modes: bool

    def requests(self, vocab_size: int, *, salt: str) -> list[GenerateRequest]:
        """The same for the same vocabulary; `salt` decides whose cached pages are found."""
        rng = random.Random(0)
        made: list[GenerateRequest] = []
        for i in range(self.num_prompts):
            prompt = self._prompt(rng, i, vocab_size)
            modes = ("greedy", "sampled") if self.has_both_modes else (_mode_of(i),)
            made += [self._request(f"{mode}-{i}", prompt, i, mode, salt) for mode in modes]
        return made

    def _prompt(self, rng: random.Random, index: int, vocab_size: int) -> tuple[int, ...]:
        length = min(_LENGTHS[index % len(_LENGTHS)], self.max_prompt_tokens)
        words = [rng.randrange(3, vocab_size) for _ in range(length)]
        # Every other one repeats itself, as text does that speculation can guess.
        period = max(1, length // 4) if index % 4 < 2 else length
        return tuple(words[j % period] for j in range(length))

    def _request(
        self, request_id: str, prompt: tuple[int, ...], index: int, mode: str, salt: str
    ) -> GenerateRequest:
        sampling = SamplingParams(max_tokens=self.num_tokens, ignore_eos=True)
        if mode == "sampled":
            # The whole vocabulary for one half, the usual filters for the other.
            has_filters = index % 4 == 1
            sampling = dataclasses.replace(
                sampling,
                temperature=0.8,
                top_k=40 if has_filters else 0,
                top_p=0.95 if has_filters else 1.0,
                seed=index,
            )
        return GenerateRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling=sampling,
            sink=_NO_SINK,
            cache_salt=salt,
        )


@dataclass(kw_only=True)
class Row:
    """What one condition gave.

    Attributes:
        weights: variant of the model.
        condition: what was different.
        num_compared: sequences.
        num_identical: of those, equal to the reference in every token.
        first_difference: request and output index of the earliest difference, or None.
        problem: why the condition says nothing, or None.
        seconds: what it took.
    """

    weights: str
    condition: str
    num_compared: int = 0
    num_identical: int = 0
    first_difference: tuple[str, int] | None = None
    problem: str | None = None
    seconds: float = 0.0

    @property
    def is_ok(self) -> bool:
        """Whether it may count as deterministic; a feature that does not exist does not fail."""
        if self.problem is not None:
            return self.problem == _NOT_BUILT
        return self.num_compared > 0 and self.num_identical == self.num_compared

    def to_json(self) -> dict[str, Any]:
        """Plain data, with the share."""
        share = self.num_identical / self.num_compared if self.num_compared else None
        return dataclasses.asdict(self) | {"share": share, "is_ok": self.is_ok}

    def to_cells(self) -> dict[str, Any]:
        """One line of the printed table."""
        share = f"{100 * self.num_identical / max(1, self.num_compared):.1f}%"
        return {
            "weights": self.weights,
            "condition": self.condition,
            "identical": f"{self.num_identical}/{self.num_compared}",
            "share": share if self.problem is None else self.problem,
            "first difference": self.first_difference and "{} @ {}".format(*self.first_difference),
            "s": self.seconds,
        }


def compare(row: Row, reference: Tokens, tokens: Tokens) -> None:
    """Fill a row in; `tokens` may hold some of the requests only."""
    row.num_compared = len(tokens)
    differences: list[tuple[int, str]] = []
    for request_id, ours in tokens.items():
        theirs = reference[request_id]
        if ours != theirs:
            pairs = enumerate(zip(ours, theirs, strict=False))
            index = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
            differences.append((index, request_id))
    row.num_identical = len(tokens) - len(differences)
    if differences:
        index, request_id = min(differences)
        row.first_difference = (request_id, index)


def generate(
    engine: Engine[Any], requests: Sequence[GenerateRequest], *, concurrency: int
) -> Tokens:
    """Run requests closed-loop: a new one enters when one ends."""
    waiting = list(reversed(requests))
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}

    def enter() -> None:
        request = waiting.pop()
        engine.validate(request)
        engine.add(request)

    for _ in range(min(concurrency, len(waiting))):
        enter()
    while engine.has_work:
        for delta in engine.step().deltas:
            tokens[delta.request_id] += delta.token_ids
            if delta.result is not None and waiting:
                enter()
    return {request_id: tuple(ids) for request_id, ids in tokens.items()}


class Suite:
    """All conditions for one variant of the weights."""

    def __init__(
        self,
        weights: str,
        config: dict[str, Any],
        arguments: argparse.Namespace,
        workload: Workload,
    ) -> None:
        self._weights = weights
        self._config = config
        self._arguments = arguments
        self._workload = workload
        self._reference: Tokens = {}

    def run(self) -> Iterator[Row]:
        """Yield a row per condition, the reference excluded."""
        yield from self._on_one_engine()
        for chunk in self._arguments.chunks:
            yield self._measure(f"chunks of {chunk}", lambda _, c=chunk: self._chunked(c))
        yield self._measure("restarted", lambda _: self._restarted())
        yield from self._speculated()

    def _on_one_engine(self) -> Iterator[Row]:
        engine = build_engine(EngineConfig(**self._config))
        begin_s = time.perf_counter()
        self._reference = self._generate(engine, salt="cold")
        print(
            f"{self._weights}: reference of {len(self._reference)} sequences in "
            f"{time.perf_counter() - begin_s:.1f} s",
            file=sys.stderr,
            flush=True,
        )
        conditions: list[tuple[str, Callable[[Engine[Any], Row], Tokens]]] = [
            ("alone", self._alone),
            ("other neighbours, cold", self._shuffled),
            ("prefix-cache hit", self._cached),
            ("preempted", self._preempted),
        ]
        for name, condition in conditions:
            yield self._measure(name, lambda row, c=condition: c(engine, row))

    def _measure(self, condition: str, run: Callable[[Row], Tokens]) -> Row:
        row = Row(weights=self._weights, condition=condition)
        begin_s = time.perf_counter()
        compare(row, self._reference, run(row))
        row.seconds = time.perf_counter() - begin_s
        gc.collect()  # engines are cyclic, and their weights large
        return row

    def _requests(self, engine: Engine[Any], salt: str) -> list[GenerateRequest]:
        return self._workload.requests(engine.model_info.vocab_size, salt=salt)

    def _generate(self, engine: Engine[Any], *, salt: str, concurrency: int = 0) -> Tokens:
        return generate(
            engine,
            self._requests(engine, salt),
            concurrency=concurrency or self._arguments.concurrency,
        )

    def _alone(self, engine: Engine[Any], row: Row) -> Tokens:
        del row
        requests = self._requests(engine, "alone")[: self._arguments.alone]
        return generate(engine, requests, concurrency=1)

    def _shuffled(self, engine: Engine[Any], row: Row) -> Tokens:
        del row
        requests = self._requests(engine, "shuffled")
        random.Random(1).shuffle(requests)
        return generate(engine, requests, concurrency=self._arguments.concurrency)

    def _cached(self, engine: Engine[Any], row: Row) -> Tokens:
        num_cached = engine.load().num_cached_tokens
        # Twice with one salt: the first run's pages may have been evicted by now.
        self._generate(engine, salt="warm")
        tokens = self._generate(engine, salt="warm")
        if engine.load().num_cached_tokens == num_cached:
            row.problem = "nothing was cached"
        return tokens

    def _preempted(self, engine: Engine[Any], row: Row) -> Tokens:
        num_preemptions = engine.load().num_preemptions
        with _few_pages(engine, self._requests(engine, "preempted")):
            tokens = self._generate(engine, salt="preempted")
        if engine.load().num_preemptions == num_preemptions:
            row.problem = "nobody was preempted"
        return tokens

    def _chunked(self, chunk: int) -> Tokens:
        num_seqs = min(self._config["max_num_seqs"], chunk)
        limits: dict[str, Any] = {
            "max_num_seqs": num_seqs,
            "max_num_batched_tokens": chunk,
            "max_mixed_tokens": chunk,
        }
        engine = build_engine(EngineConfig(**(self._config | limits)))
        return self._generate(engine, salt="chunks")

    def _restarted(self) -> Tokens:
        """The reference's run, in a process of its own."""
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "tokens.json"
            task = {
                "config": self._config,
                "workload": dataclasses.asdict(self._workload),
                "concurrency": self._arguments.concurrency,
            }
            subprocess.run(
                [sys.executable, "-m", "bench.determinism", "--worker", str(path)],
                input=json.dumps(task),
                text=True,
                check=True,
                cwd=report.ROOT,
            )
            return {key: tuple(ids) for key, ids in json.loads(path.read_text()).items()}

    def _speculated(self) -> Iterator[Row]:
        values = setting_values("speculation")
        if values is None:
            yield Row(weights=self._weights, condition="speculation", problem=_NOT_BUILT)
            return
        for value in values:
            yield self._measure(
                f"speculation: {value}", lambda row, v=value: self._speculate(v, row)
            )

    def _speculate(self, value: str, row: Row) -> Tokens:
        config: dict[str, Any] = self._config | {"speculation": value}
        engine = build_engine(EngineConfig(**config))
        tokens = self._generate(engine, salt="few", concurrency=_SPECULATION_CONCURRENCY)
        if engine.load().num_draft_tokens == 0:
            row.problem = "nothing was guessed"
        return tokens


@contextmanager
def _few_pages(engine: Engine[Any], requests: Sequence[GenerateRequest]) -> Iterator[None]:
    """Take pages out of circulation, but for what the largest request needs."""
    scheduler = engine.scheduler
    most_tokens = max(len(r.prompt_token_ids) + r.sampling.max_tokens for r in requests)
    num_left = -(-most_tokens // scheduler.page_size)
    taken = scheduler.allocator.allocate(scheduler.allocator.num_free - num_left)
    assert taken is not None
    try:
        yield
    finally:
        scheduler.allocator.release(taken)


def _mode_of(index: int) -> str:
    return "greedy" if index % 2 == 0 else "sampled"


def setting_values(name: str) -> tuple[str, ...] | None:
    """What an engine setting may be besides its default; None where there is no such setting."""
    fields = {field.name: field for field in dataclasses.fields(EngineConfig)}
    if name not in fields:
        return None
    values = typing.get_args(typing.get_type_hints(EngineConfig)[name])
    usual = (fields[name].default, "auto", "none", None, type(None))
    return tuple(str(value) for value in values if value not in usual)


def variants(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Engine settings by name of the weights: a dtype, or a quantization beside bfloat16.

    Raises:
        ValueError: the engine has no such weights.
    """
    quantizations = setting_values("quantization") or ()
    known: dict[str, dict[str, Any]] = {"float32": {"dtype": "float32"}}
    known["bfloat16"] = {"dtype": "bfloat16"}
    known |= {name: {"dtype": "bfloat16", "quantization": name} for name in quantizations}
    chosen = list(names) or list(known)
    if unknown := sorted(set(chosen) - set(known)):
        raise ValueError(f"unknown weights {unknown[0]!r}, have {', '.join(known)}")
    return {name: known[name] for name in chosen}


def run(arguments: argparse.Namespace) -> list[Row]:
    """All conditions of all variants."""
    workload = Workload(
        num_prompts=arguments.prompts,
        num_tokens=arguments.tokens,
        max_prompt_tokens=arguments.max_model_len - arguments.tokens,
        has_both_modes=arguments.both_modes,
    )
    budget = max(arguments.chunks)
    rows: list[Row] = []
    for weights, settings in variants(arguments.weights).items():
        config: dict[str, Any] = {
            "model": str(Path(arguments.model).resolve()),
            "platform": arguments.platform,
            "max_num_seqs": arguments.concurrency,
            "max_num_batched_tokens": max(budget, arguments.concurrency),
            "max_mixed_tokens": max(min(64, budget), arguments.concurrency),
            "max_model_len": arguments.max_model_len,
            "program_store": arguments.program_store
            and str(Path(arguments.program_store).resolve()),
        }
        for row in Suite(weights, config | settings, arguments, workload).run():
            rows.append(row)
            print(json.dumps(row.to_json()), file=sys.stderr, flush=True)
    return rows


def work(path: Path) -> None:
    """Run the reference in this process; what to run comes as JSON on standard input."""
    task = json.load(sys.stdin)
    engine = build_engine(EngineConfig(**task["config"]))
    requests = Workload(**task["workload"]).requests(engine.model_info.vocab_size, salt="cold")
    path.write_text(json.dumps(generate(engine, requests, concurrency=task["concurrency"])))


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.determinism",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="models/smollm2-135m-instruct")
    add("--platform", default="cpu", choices=["auto", "cpu", "tpu"])
    add("--weights", type=_names, default=[], help="default: all that the engine has")
    add("--prompts", type=int, default=64)
    add("--tokens", type=int, default=64, help="output tokens of each")
    add("--concurrency", type=int, default=32, help="of the batch")
    add("--alone", type=int, default=16, help="how many also run alone, which takes longest")
    add("--both-modes", action="store_true", help="every prompt greedy and sampled, not in turn")
    add("--chunks", type=integers, default=[16, 64, 512])
    add("--max-model-len", type=int, default=1024)
    add("--program-store", default=".cache/programs")
    add("--out", type=Path, help="JSON file; default: a new one under bench/results/")
    add("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _names(text: str) -> list[str]:
    return text.split(",")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, write the report; 1 unless every condition is identical."""
    arguments = parse_arguments(argv)
    if arguments.worker is not None:
        work(arguments.worker)
        return 0
    stamp = report.stamp()
    try:
        rows = run(arguments)
    except ValueError as error:
        raise SystemExit(f"bench.determinism: {error}") from None
    path: Path = arguments.out or report.result_path("determinism")
    shown = {key: str(value) for key, value in vars(arguments).items() if key != "worker"}
    content = {"kind": "bench.determinism", "stamp": stamp, "arguments": shown}
    report.write_json(path, content | {"rows": [row.to_json() for row in rows]})
    print(report.format_table([row.to_cells() for row in rows]))
    print(f"report: {path}")
    return 0 if all(row.is_ok for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
