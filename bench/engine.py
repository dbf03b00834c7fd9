"""The bare engine: no HTTP, no Ray. Tokens per second, and where a step's time goes.

`--fake-step-ms` replaces the device by one that takes a constant time, which leaves the host's own
cost per step: everything that the device would wait for.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import report
from bench.measurement import percentile
from replicas.config import EngineConfig
from replicas.engine.buckets import make_buckets, smallest_bucket
from replicas.engine.engine import Engine, StepOutput
from replicas.engine.page_allocator import PageAllocator
from replicas.engine.scheduler import Scheduler, StepPlan
from replicas.engine.step import PackedLayout, SlotTable
from replicas.wire import GenerateRequest, ModelInfo, SamplingParams, SinkAddress

_FAKE_BATCHED_TOKENS = 512
_FAKE_MIXED_TOKENS = 64
_FAKE_BREAK_EVEN_CONTEXT = 4096
_NO_SINK = SinkAddress(host="", port=0, sink_id="", key=b"")


class ConstantTimeRunner:
    """A device on which every step takes the same time; sampled tokens are arbitrary.

    Packs each step as the real runner does, since the device waits for that too.
    """

    num_compiles_after_warmup = 0

    def __init__(self, step_s: float, *, num_slots: int, pages_per_seq: int) -> None:
        self._step_s = step_s
        self._free_at_s = 0.0
        table = SlotTable(num_slots=num_slots, pages_per_seq=pages_per_seq)
        self._buckets = make_buckets(
            max_num_seqs=num_slots,
            max_mixed_tokens=max(_FAKE_MIXED_TOKENS, num_slots),
            max_num_batched_tokens=_FAKE_BATCHED_TOKENS,
        )
        self._layouts = {bucket: PackedLayout(bucket, table) for bucket in self._buckets}

    def launch(self, plan: StepPlan) -> tuple[float, int]:
        """Pack a step and queue it behind the ones before it."""
        bucket = smallest_bucket(
            self._buckets, num_tokens=plan.num_tokens, num_seqs=len(plan.scheduled)
        )
        self._layouts[bucket].pack(plan)
        self._free_at_s = max(self._free_at_s, time.monotonic()) + self._step_s
        return self._free_at_s, len(plan.scheduled)

    def fetch(self, step: tuple[float, int]) -> StepOutput:
        """Sleep until the step is done."""
        ready_at_s, num_rows = step
        time.sleep(max(0.0, ready_at_s - time.monotonic()))
        return StepOutput(token_ids=[[7] for _ in range(num_rows)], num_draft_tokens=0)


def fake_engine(step_s: float, *, max_num_seqs: int) -> Engine[Any]:
    """An engine on a `ConstantTimeRunner`, with pages for all its slots."""
    page_size, pages_per_seq = 16, 64
    num_pages = 1 + max_num_seqs * pages_per_seq
    scheduler = Scheduler(
        PageAllocator(num_pages),
        page_size=page_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=_FAKE_BATCHED_TOKENS,
        max_mixed_tokens=max(_FAKE_MIXED_TOKENS, max_num_seqs),
        break_even_context=_FAKE_BREAK_EVEN_CONTEXT,
    )
    info = ModelInfo(
        model_id="fake",
        max_model_len=pages_per_seq * page_size,
        max_request_tokens=pages_per_seq * page_size,
        vocab_size=32000,
        eos_token_ids=(),
        fingerprint="fake",
    )
    runner = ConstantTimeRunner(step_s, num_slots=max_num_seqs, pages_per_seq=pages_per_seq)
    return Engine(scheduler, runner, model_info=info)


@dataclass
class Measurement:
    """One concurrency's result; times in milliseconds."""

    concurrency: int
    num_requests: int
    seconds: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    decode_step_p50_ms: float
    decode_step_p99_ms: float
    schedule_ms: float
    launch_ms: float
    wait_ms: float
    postprocess_ms: float
    num_steps: int
    num_preemptions: int
    num_compiles: int


def make_requests(
    args: argparse.Namespace, count: int, vocab_size: int, seed: int
) -> list[GenerateRequest]:
    """Random prompts that share their first `--shared-tokens`; generation ignores EOS."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, vocab_size) for _ in range(args.shared_tokens)]
    requests: list[GenerateRequest] = []
    for i in range(count):
        own = [rng.randrange(3, vocab_size) for _ in range(args.prompt_tokens - len(shared))]
        requests.append(
            GenerateRequest(
                request_id=f"{seed}-{i}",
                prompt_token_ids=tuple(shared + own),
                sampling=SamplingParams(
                    max_tokens=args.max_tokens,
                    temperature=args.temperature,
                    seed=i,
                    ignore_eos=True,
                ),
                sink=_NO_SINK,
            )
        )
    return requests


def measure(engine: Engine[Any], requests: list[GenerateRequest], concurrency: int) -> Measurement:
    """Run the requests closed-loop: a new one enters when one ends."""
    queue = list(reversed(requests))
    started_at: dict[str, float] = {}
    first_at: dict[str, float] = {}
    ttfts: list[float] = []
    tpots: list[float] = []
    steps: list[tuple[float, Any, bool]] = []
    num_output = 0
    begin = time.perf_counter()

    def enter() -> None:
        request = queue.pop()
        engine.validate(request)
        engine.add(request)
        started_at[request.request_id] = time.perf_counter()

    for _ in range(min(concurrency, len(queue))):
        enter()
    while engine.has_work:
        is_decode = engine.load().num_pending_prefill_tokens == 0
        step_begin = time.perf_counter()
        events = engine.step()
        now = time.perf_counter()
        steps.append((now - step_begin, engine.times, is_decode and len(events.deltas) > 0))
        for delta in events.deltas:
            num_output += len(delta.token_ids)
            if delta.request_id not in first_at:
                first_at[delta.request_id] = now
                ttfts.append(now - started_at[delta.request_id])
            if delta.result is not None:
                num_later = max(1, delta.result.num_output_tokens - 1)
                tpots.append((now - first_at[delta.request_id]) / num_later)
                if queue:
                    enter()
    seconds = time.perf_counter() - begin
    decode = [s for s, _, is_decode in steps if is_decode]
    load = engine.load()
    num_prompt = sum(len(r.prompt_token_ids) for r in requests)

    def median_ms(field: str) -> float:
        return statistics.median(getattr(t, field) for _, t, _ in steps) * 1e3

    return Measurement(
        concurrency=concurrency,
        num_requests=len(requests),
        seconds=seconds,
        output_tokens_per_s=num_output / seconds,
        total_tokens_per_s=(num_output + num_prompt) / seconds,
        ttft_p50_ms=percentile(ttfts, 0.5) * 1e3,
        ttft_p99_ms=percentile(ttfts, 0.99) * 1e3,
        tpot_p50_ms=percentile(tpots, 0.5) * 1e3,
        tpot_p99_ms=percentile(tpots, 0.99) * 1e3,
        decode_step_p50_ms=percentile(decode, 0.5) * 1e3,
        decode_step_p99_ms=percentile(decode, 0.99) * 1e3,
        schedule_ms=median_ms("schedule"),
        launch_ms=median_ms("launch"),
        wait_ms=median_ms("wait"),
        postprocess_ms=median_ms("postprocess"),
        num_steps=len(steps),
        num_preemptions=load.num_preemptions,
        num_compiles=load.num_compiles_after_warmup,
    )


def show_progress(stage: str, done: int, total: int) -> None:
    """Name each stage once it is complete."""
    if done == total:
        print(f"{stage}: {total}", flush=True)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__)
    parser.add_argument("--model", default="models/smollm2-135m-instruct")
    parser.add_argument("--platform", default="cpu", choices=["auto", "cpu", "tpu"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--attention", default="auto", choices=["auto", "native", "reference"])
    parser.add_argument("--matmul", default="auto", choices=["auto", "native", "xla"])
    parser.add_argument("--concurrency", default="1,4,16,32")
    parser.add_argument("--requests-per", type=int, default=2, help="requests per concurrency unit")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--shared-tokens", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--program-store", default=".cache/programs")
    parser.add_argument("--fake-step-ms", type=float, help="replace the device; measures the host")
    parser.add_argument("--output", type=Path, help="write all measurements as JSON")
    return parser.parse_args()


def main() -> None:
    """Measure each concurrency and print one line of JSON for each."""
    args = parse_args()
    concurrencies = [int(c) for c in args.concurrency.split(",")]
    if args.fake_step_ms is not None:
        engine = fake_engine(args.fake_step_ms / 1e3, max_num_seqs=max(concurrencies))
    else:
        from replicas.engine.startup import build_engine

        engine = build_engine(
            EngineConfig(
                model=args.model,
                platform=args.platform,
                dtype=args.dtype,
                attention=args.attention,
                matmul=args.matmul,
                max_model_len=args.max_model_len,
                max_num_seqs=args.max_num_seqs,
                max_mixed_tokens=max(64, args.max_num_seqs),
                program_store=args.program_store,
            ),
            show_progress,
        )
    vocab_size = engine.model_info.vocab_size
    measure(engine, make_requests(args, 2, vocab_size, seed=10**6), 2)
    results: list[Measurement] = []
    for concurrency in concurrencies:
        count = max(2, concurrency * args.requests_per)
        requests = make_requests(args, count, vocab_size, seed=concurrency)
        results.append(measure(engine, requests, concurrency))
        rounded = {
            k: round(v, 3) if isinstance(v, float) else v for k, v in asdict(results[-1]).items()
        }
        print(json.dumps(rounded), flush=True)
    if args.output is not None:
        arguments = {k: str(v) for k, v in vars(args).items()}
        measured = {"arguments": arguments, "results": [asdict(r) for r in results]}
        report.write_json(args.output, {"stamp": report.stamp()} | measured)


if __name__ == "__main__":
    main()
