"""The bare engine: no HTTP, no Ray. Tokens per second, and where a step's time goes.

`--fake-step-ms` replaces the device by one that takes a constant time, which leaves the host's own
cost per step: everything that the device would wait for. `--host-path` measures that cost at 32 and
256 sequences, and with many waiting; `--spread` measures how evenly decode steps take their time,
beside a fixed loop on the same machine.
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

from bench import host_path, report, spread
from bench.constant_time import fake_engine
from bench.measurement import percentile
from replicas.config import EngineConfig
from replicas.engine.engine import Engine
from replicas.wire import GenerateRequest, SamplingParams, SinkAddress

_NO_SINK = SinkAddress(host="", port=0, sink_id="", key=b"")


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


class Arrivals:
    """Lets requests into an engine: closed-loop, or each at its own time.

    Attributes:
        entered_at: `time.perf_counter()` by request id.
        num_ended: requests that have ended; whoever drives the engine counts them.
    """

    def __init__(
        self,
        engine: Engine[Any],
        requests: list[GenerateRequest],
        concurrency: int,
        interval_s: float | None,
    ) -> None:
        """Begin now; see `measure` for the arguments."""
        self.entered_at: dict[str, float] = {}
        self.num_ended = 0
        self._engine = engine
        self._requests = requests
        self._concurrency = concurrency
        self._interval_s = interval_s
        self._begin = time.perf_counter()

    def enter_due(self) -> bool:
        """Let in who is due, waiting for the next when there is nothing else; False after all."""
        while (index := len(self.entered_at)) < len(self._requests):
            if self._interval_s is None:
                if index - self.num_ended >= self._concurrency:
                    return True
            elif (early_s := self._begin + self._interval_s * index - time.perf_counter()) > 0:
                if self._engine.has_work:
                    return True
                time.sleep(early_s)
            request = self._requests[index]
            self._engine.validate(request)
            self._engine.add(request)
            self.entered_at[request.request_id] = time.perf_counter()
        return False


def measure(
    engine: Engine[Any],
    requests: list[GenerateRequest],
    concurrency: int,
    *,
    interval_s: float | None = None,
) -> Measurement:
    """Run requests: a new one enters when one ends or, with `interval_s`, at its own time.

    Args:
        engine: warmed up and idle.
        requests: in the order of their arrival.
        concurrency: how many start at once and then run; only reported when there is an interval.
        interval_s: seconds between two arrivals, whatever has ended.
    """
    arrivals = Arrivals(engine, requests, concurrency, interval_s)
    first_at: dict[str, float] = {}
    ttfts: list[float] = []
    tpots: list[float] = []
    steps: list[tuple[float, Any, bool]] = []
    num_output = 0
    begin = time.perf_counter()
    while arrivals.enter_due() or engine.has_work:
        is_decode = engine.load().num_pending_prefill_tokens == 0
        step_begin = time.perf_counter()
        events = engine.step()
        now = time.perf_counter()
        steps.append((now - step_begin, engine.times, is_decode and len(events.deltas) > 0))
        for delta in events.deltas:
            num_output += len(delta.token_ids)
            if delta.request_id not in first_at:
                first_at[delta.request_id] = now
                ttfts.append(now - arrivals.entered_at[delta.request_id])
            if delta.result is not None:
                num_later = max(1, delta.result.num_output_tokens - 1)
                tpots.append((now - first_at[delta.request_id]) / num_later)
                arrivals.num_ended += 1
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


def measure_shares(
    engine: Engine[Any], args: argparse.Namespace, config: EngineConfig, concurrencies: list[int]
) -> list[dict[str, Any]]:
    """Measure and print the share of memory bandwidth that decode steps use."""
    from bench.memory_share import measure_share

    shares: list[dict[str, Any]] = []
    for concurrency in concurrencies:
        vocab_size = engine.model_info.vocab_size
        requests = make_requests(args, concurrency, vocab_size, seed=10**6 + concurrency)
        shares.append(asdict(measure_share(engine, requests, config)))
        rounded = {k: round(v, 3) for k, v in shares[-1].items()}
        print("memory:", json.dumps(rounded), flush=True)
    return shares


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
    parser.add_argument("--quantization", default="none", choices=["none", "int8"])
    parser.add_argument("--kv-cache-dtype", default="auto", choices=["auto", "int8"])
    parser.add_argument("--attention", default="auto", choices=["auto", "native", "reference"])
    parser.add_argument("--matmul", default="auto", choices=["auto", "native", "xla"])
    parser.add_argument("--concurrency", default="1,4,16,32")
    parser.add_argument("--requests-per", type=int, default=2, help="requests per concurrency unit")
    parser.add_argument(
        "--stagger-s",
        type=float,
        help="one request per concurrency unit, arriving over so many seconds",
    )
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--shared-tokens", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument(
        "--memory-share",
        action="store_true",
        help="also measure the share of the memory bandwidth that decode steps use",
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--program-store", default=".cache/programs")
    parser.add_argument("--fake-step-ms", type=float, help="replace the device; measures the host")
    parser.add_argument(
        "--host-path", action="store_true", help="measure the host and nothing else"
    )
    parser.add_argument("--spread", type=int, metavar="N", help="then N steady decode steps at 16")
    parser.add_argument("--output", type=Path, help="write all measurements as JSON")
    return parser.parse_args()


def main() -> None:
    """Measure each concurrency and print one line of JSON for each."""
    args = parse_args()
    if args.host_path:
        rows = host_path.measure_all((args.fake_step_ms or 5.0) / 1e3)
        print(report.format_table(rows))
        _write(args, {"host_path": rows})
        return
    concurrencies = [int(c) for c in args.concurrency.split(",")]
    config = None
    if args.fake_step_ms is not None:
        engine = fake_engine(args.fake_step_ms / 1e3, max_num_seqs=max(concurrencies))
    else:
        from replicas.engine.startup import build_engine

        config = EngineConfig(
            model=args.model,
            platform=args.platform,
            dtype=args.dtype,
            quantization=args.quantization,
            kv_cache_dtype=args.kv_cache_dtype,
            attention=args.attention,
            matmul=args.matmul,
            max_model_len=args.max_model_len,
            max_num_seqs=args.max_num_seqs,
            max_mixed_tokens=max(64, args.max_num_seqs),
            program_store=args.program_store,
        )
        engine = build_engine(config, show_progress)
    vocab_size = engine.model_info.vocab_size
    measure(engine, make_requests(args, 2, vocab_size, seed=10**6), 2)
    results: list[Measurement] = []
    for concurrency in concurrencies:
        if args.stagger_s is None:
            interval_s, count = None, max(2, concurrency * args.requests_per)
        else:
            interval_s, count = args.stagger_s / concurrency, concurrency
        requests = make_requests(args, count, vocab_size, seed=concurrency)
        results.append(measure(engine, requests, concurrency, interval_s=interval_s))
        rounded = {
            k: round(v, 3) if isinstance(v, float) else v for k, v in asdict(results[-1]).items()
        }
        print(json.dumps(rounded), flush=True)
    measured: dict[str, Any] = {"results": [asdict(r) for r in results]}
    if config is not None and args.memory_share:
        measured["memory"] = measure_shares(engine, args, config, concurrencies)
    if args.spread:
        measured["spread"] = spread.measure(engine, num_steps=args.spread)
        print(json.dumps({"spread": measured["spread"]}), flush=True)
    _write(args, measured)


def _write(args: argparse.Namespace, measured: dict[str, Any]) -> None:
    if args.output is not None:
        arguments = {k: None if v is None else str(v) for k, v in vars(args).items()}
        stamped = {"stamp": report.stamp(), "arguments": arguments}
        report.write_json(args.output, stamped | measured)


if __name__ == "__main__":
    main()
