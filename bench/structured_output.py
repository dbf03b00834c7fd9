"""What following a grammar costs: time per token of guided and of plain streams, bare engine.

Short bursts of decode steps of the same streams, guided in one engine and plain in another, take
turns; medians of their steps are compared, because a shared machine's speed changes by the second.
And how long the worst grammars hold up the process that tries them out.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from app.grammar_checker import GrammarChecker
from app.output_grammar import Constraint, JsonSchema, Lark, Regex, write_grammar
from bench import report
from replicas.config import EngineConfig
from replicas.engine.engine import Engine
from replicas.engine.startup import build_engine
from replicas.errors import InvalidRequest
from replicas.wire import GenerateRequest, ModelInfo, SamplingParams, SinkAddress

_NO_SINK = SinkAddress(host="", port=0, sink_id="", key=b"")
_PROMPT_TOKENS = 64
_MAX_MODEL_LEN = 1024
_STEPS_PER_ROUND = 6
_UNTIMED_STEPS = 2
"""At a burst's begin: one that was computed during the other's burst, and one beside its last."""


def _persons(name: dict[str, Any]) -> Constraint:
    """A list of JSON objects, so long that no stream ends while it is measured."""
    person = {
        "type": "object",
        "properties": {
            "name": name,
            "age": {"type": "integer", "minimum": 0},
            "tags": {"type": "array", "items": {"enum": ["old", "new", "other"]}},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
    return JsonSchema({"type": "array", "items": person, "minItems": 500})


GRAMMARS: dict[str, Constraint] = {
    "json": _persons({"type": "string"}),
    "json, short strings": _persons({"type": "string", "maxLength": 40}),
    # Dear: no part of the vocabulary is allowed as a whole, and each count is a state of its own.
    "regex": Regex("([a-z]{1,12} ){2000}"),
}


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for level in range(depth):
        wrapped = {"type": "object", "properties": {f"k{level}": schema}}
        schema = {"anyOf": [schema, wrapped]}
    return schema


BOMBS: dict[str, Constraint] = {
    "doubling schema": JsonSchema(_nested(11)),
    "3,000 properties": JsonSchema(
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}}
    ),
    "repeats of repeats": Regex("(a{1000}){1000}"),
    "long repeat": Regex("a{100000}"),
    "ambiguous rules": Lark('start: a\na: a a | "x" | "xx" | /[a-z]/\n'),
    "7,000 texts": JsonSchema({"enum": [f"item number {i} of them" for i in range(7000)]}),
}


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """One grammar at one concurrency; medians over all steps.

    Attributes:
        grammar: which.
        temperature: of guided and plain streams alike.
        concurrency: streams that run at once.
        plain_ms: a decode step without grammars, that is a token of each stream.
        guided_ms: one in which every stream follows the grammar.
        overhead: guided over plain, minus 1.
        masks_ms: of the guided step, host time behind the fetch: masks and bookkeeping.
    """

    grammar: str
    temperature: float
    concurrency: int
    plain_ms: float
    guided_ms: float
    overhead: float
    masks_ms: float


def start_streams(
    engine: Engine[Any], grammar: str, *, temperature: float, args: argparse.Namespace
) -> None:
    """Bring streams to where each step gives a token of each."""
    for stream in range(args.concurrency):
        request = GenerateRequest(
            request_id=str(stream),
            prompt_token_ids=tuple(range(1000 + stream, 1000 + stream + _PROMPT_TOKENS)),
            sampling=SamplingParams(
                max_tokens=_MAX_MODEL_LEN - _PROMPT_TOKENS,
                temperature=temperature,
                seed=stream,
                ignore_eos=True,
                grammar=grammar,
            ),
            sink=_NO_SINK,
        )
        engine.add(request, engine.make_matcher(request))
    while engine.load().num_pending_prefill_tokens or engine.load().num_waiting:
        engine.step()


def measure(
    engines: Mapping[bool, Engine[Any]],
    name: str,
    grammar: str,
    *,
    temperature: float,
    args: argparse.Namespace,
) -> Overhead:
    """Run bursts of both kinds in turn; `engines[True]` is the one with the grammar."""
    times: dict[bool, list[float]] = {False: [], True: []}
    masks: list[float] = []
    for is_guided, engine in engines.items():
        start_streams(engine, grammar if is_guided else "", temperature=temperature, args=args)
    for round_index in range(args.rounds):
        for is_guided in (False, True) if round_index % 2 else (True, False):
            engine = engines[is_guided]
            for _ in range(_UNTIMED_STEPS):
                engine.step()
            for _ in range(_STEPS_PER_ROUND):
                begin_s = time.perf_counter()
                events = engine.step()
                times[is_guided].append(time.perf_counter() - begin_s)
                assert len(events.deltas) == args.concurrency
                if is_guided:
                    masks.append(engine.times.postprocess)
    for engine in engines.values():
        for stream in range(args.concurrency):
            engine.abort(str(stream))
        while engine.has_work:
            engine.step()
    plain, guided = (statistics.median(times[is_guided]) for is_guided in (False, True))
    return Overhead(
        grammar=name,
        temperature=temperature,
        concurrency=args.concurrency,
        plain_ms=1e3 * plain,
        guided_ms=1e3 * guided,
        overhead=guided / plain - 1,
        masks_ms=1e3 * statistics.median(masks),
    )


async def try_bombs(model_dir: Path, info: ModelInfo) -> dict[str, dict[str, Any]]:
    """Have every bomb refused; return in which time, and what is said of it."""
    checker = GrammarChecker(model_dir)
    special = await checker.special_tokens(info)
    results: dict[str, dict[str, Any]] = {}
    for name, bomb in BOMBS.items():
        begin_s = time.perf_counter()
        verdict = "taken"
        try:
            await checker.check(write_grammar(bomb, special=special), info, param="grammar")
        except InvalidRequest as error:
            verdict = error.message
        seconds = time.perf_counter() - begin_s
        results[name] = {"seconds": round(seconds, 3), "verdict": verdict}
        print(f"{name}: {seconds:.2f} s, {verdict}")
    await checker.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=96)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    config = EngineConfig(
        model=args.model,
        dtype=args.dtype,
        max_num_seqs=args.concurrency,
        max_num_batched_tokens=max(64, args.concurrency),
        max_mixed_tokens=max(64, args.concurrency),
        max_model_len=_MAX_MODEL_LEN,
        enable_prefix_caching=False,
        program_store=".cache/programs",
    )
    engines = {is_guided: build_engine(config) for is_guided in (False, True)}
    overheads: list[Overhead] = []
    for name, constraint in GRAMMARS.items():
        for temperature in (0.0, 1.0):
            grammar = write_grammar(constraint, special={})
            result = measure(engines, name, grammar, temperature=temperature, args=args)
            overheads.append(result)
            print(
                f"{name}, temperature {temperature}, c={args.concurrency}: plain "
                f"{result.plain_ms:.2f} ms, guided {result.guided_ms:.2f} ms a token "
                f"({result.overhead:+.1%}); host behind the fetch {result.masks_ms:.2f} ms",
                flush=True,
            )
    bombs = asyncio.run(try_bombs(Path(args.model), engines[True].model_info))
    if args.output is not None:
        arguments = {key: str(value) for key, value in vars(args).items()}
        measured = {
            "arguments": arguments,
            "overheads": [asdict(result) for result in overheads],
            "bombs": bombs,
        }
        report.write_json(args.output, {"stamp": report.stamp()} | measured)


if __name__ == "__main__":
    main()
