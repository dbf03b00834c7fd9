"""A random storm of requests on the bare engine: nothing may compile, leak or be lost.

    python -m bench.storm [--requests 2000] [--page-sizes 16,32,64]

Lengths, sampling parameters, stop tokens, priorities, bursts and cancellations are drawn from a
seed; the page pool is small, so that sequences are preempted, too. Ends with status 1 if anything
was compiled after warm-up, a request did not end exactly once, or a page was not given back.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import report
from bench.arguments import integers
from replicas.config import EngineConfig
from replicas.engine.engine import Engine
from replicas.engine.startup import build_engine
from replicas.wire import FinishReason, GenerateRequest, SamplingParams, SinkAddress, StepEvents

_NO_SINK = SinkAddress(host="", port=0, sink_id="", key=b"")
_CANCEL_SHARE = 0.2
_MOST_STEPS_TO_CANCEL = 30
_BURSTS = (0, 0, 0, 1, 1, 2, 8)
"""Requests that arrive between two steps; drawn evenly."""


@dataclass(kw_only=True)
class Outcome:
    """What a storm left behind.

    Attributes:
        page_size: tokens per page.
        num_requests: sent.
        num_ended: endings seen; one per request is right.
        num_cancelled: of those, by a cancellation.
        num_output_tokens: of all.
        num_steps: launched.
        num_preemptions: for want of pages.
        num_compiles: after warm-up.
        num_lost_pages: not free although nothing runs.
        seconds: duration without start-up.
    """

    page_size: int
    num_requests: int = 0
    num_ended: int = 0
    num_cancelled: int = 0
    num_output_tokens: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_compiles: int = 0
    num_lost_pages: int = 0
    seconds: float = 0.0

    @property
    def is_ok(self) -> bool:
        """Whether the engine weathered it."""
        is_complete = self.num_ended == self.num_requests > 0
        return is_complete and self.num_compiles == 0 and self.num_lost_pages == 0


class Storm:
    """Sends random requests to one engine, and cancels some of them."""

    def __init__(self, engine: Engine[Any], *, seed: int, max_tokens: int) -> None:
        """Prepare.

        Args:
            engine: warmed up and idle.
            seed: of everything random.
            max_tokens: longest output; prompts fill up to the engine's limit, most are short.
        """
        self._engine = engine
        self._rng = random.Random(seed)
        self._max_tokens = max_tokens
        self._live: set[str] = set()
        self._cancel_in: dict[str, int] = {}

    def run(self, num_requests: int, *, max_in_flight: int) -> Outcome:
        """Send `num_requests`, never more than `max_in_flight` at once, until all have ended."""
        outcome = Outcome(page_size=self._engine.scheduler.page_size)
        begin_s = time.perf_counter()
        while outcome.num_requests < num_requests or self._engine.has_work:
            for _ in range(self._rng.choice(_BURSTS)):
                if outcome.num_requests < num_requests and len(self._live) < max_in_flight:
                    self._send(outcome.num_requests)
                    outcome.num_requests += 1
            self._cancel_some()
            if self._engine.has_work:
                self._take(self._engine.step(), outcome)
        outcome.seconds = time.perf_counter() - begin_s
        load = self._engine.load()
        outcome.num_steps, outcome.num_preemptions = load.num_steps, load.num_preemptions
        outcome.num_compiles = load.num_compiles_after_warmup
        outcome.num_lost_pages = load.num_pages - load.num_free_pages
        self._engine.scheduler.check_integrity()
        return outcome

    def _send(self, index: int) -> None:
        info, rng = self._engine.model_info, self._rng
        max_tokens = rng.randint(1, self._max_tokens)
        longest = info.max_request_tokens - max_tokens
        # Evenly over orders of magnitude: most prompts are short, some fill the context.
        length = min(longest, int(2 ** rng.uniform(0, longest.bit_length())))
        request = GenerateRequest(
            request_id=str(index),
            prompt_token_ids=tuple(rng.choices(range(info.vocab_size), k=length)),
            sampling=self._sampling(max_tokens, info.vocab_size),
            sink=_NO_SINK,
            priority=rng.choice((0, 0, 0, 1)),
            cache_salt=rng.choice(("", "", "tenant")),
        )
        self._engine.validate(request)
        self._engine.add(request)
        self._live.add(request.request_id)
        if rng.random() < _CANCEL_SHARE:
            self._cancel_in[request.request_id] = rng.randint(0, _MOST_STEPS_TO_CANCEL)

    def _sampling(self, max_tokens: int, vocab_size: int) -> SamplingParams:
        rng = self._rng
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=rng.choice((0.0, 0.0, 0.3, 1.0, 5.0)),
            top_k=rng.choice((0, 0, 1, 40, vocab_size, 10 * vocab_size)),
            top_p=rng.choice((1.0, 1.0, 0.95, 0.5, 1e-6)),
            seed=rng.randint(-(2**63), 2**64 - 1),
            stop_token_ids=tuple(rng.choices(range(vocab_size), k=rng.choice((0, 0, 4)))),
            ignore_eos=rng.random() < 0.5,
        )

    def _cancel_some(self) -> None:
        for request_id, num_steps in list(self._cancel_in.items()):
            self._cancel_in[request_id] = num_steps - 1
            if num_steps <= 0:
                del self._cancel_in[request_id]
                self._engine.abort(request_id)

    def _take(self, events: StepEvents, outcome: Outcome) -> None:
        for delta in events.deltas:
            outcome.num_output_tokens += len(delta.token_ids)
            if delta.result is not None:
                self._live.remove(delta.request_id)
                self._cancel_in.pop(delta.request_id, None)
                outcome.num_ended += 1
                outcome.num_cancelled += delta.result.finish_reason is FinishReason.ABORT


def run(arguments: argparse.Namespace) -> list[Outcome]:
    """One storm per page size, each on an engine of its own."""
    outcomes: list[Outcome] = []
    for page_size in arguments.page_sizes:
        engine = build_engine(
            EngineConfig(
                model=arguments.model,
                platform=arguments.platform,
                dtype=arguments.dtype,
                page_size=page_size,
                num_pages=1 + arguments.pool_tokens // page_size,
                max_model_len=arguments.max_model_len,
                max_num_seqs=arguments.max_num_seqs,
                max_num_batched_tokens=arguments.max_num_batched_tokens,
                max_mixed_tokens=min(64, arguments.max_num_batched_tokens),
                program_store=arguments.program_store,
            )
        )
        storm = Storm(engine, seed=arguments.seed, max_tokens=arguments.max_tokens)
        outcomes.append(storm.run(arguments.requests, max_in_flight=4 * arguments.max_num_seqs))
        print(outcomes[-1], file=sys.stderr, flush=True)
    return outcomes


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.storm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="models/smollm2-135m-instruct")
    add("--platform", default="cpu", choices=["auto", "cpu", "tpu"])
    add("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    add("--requests", type=int, default=2000, help="of each page size")
    add("--page-sizes", type=integers, default=[16, 32, 64])
    add("--pool-tokens", type=int, default=1024, help="KV pages hold so many tokens")
    add("--max-model-len", type=int, default=512)
    add("--max-num-seqs", type=int, default=32)
    add("--max-num-batched-tokens", type=int, default=256)
    add("--max-tokens", type=int, default=32, help="longest output")
    add("--seed", type=int, default=0)
    add("--program-store", default=".cache/programs")
    add("--out", type=Path, help="JSON file; default: a new one under bench/results/")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row per page size and write the report; 1 unless every storm was weathered."""
    arguments = parse_arguments(argv)
    stamp = report.stamp()
    outcomes = run(arguments)
    path: Path = arguments.out or report.result_path("storm")
    rows = [asdict(outcome) | {"is_ok": outcome.is_ok} for outcome in outcomes]
    shown = {key: str(value) for key, value in vars(arguments).items()}
    content = {"kind": "bench.storm", "stamp": stamp, "arguments": shown}
    report.write_json(path, content | {"storms": rows})
    print(report.format_table([{k.removeprefix("num_"): v for k, v in r.items()} for r in rows]))
    print(f"report: {path}")
    return 0 if all(outcome.is_ok for outcome in outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
