"""How many replicas a load takes on each TPU, and what a million output tokens cost there.

    python -m bench.capacity --rate 30 --prompt 1000 --output 250 --price v6e=2.70

A plan, not a measurement: steps are predicted as `programs check` predicts them, from the model's
config.json and the chips' sizes; what a replica carries within the targets follows from the
autoscaling policy's own queueing model. Prices are the user's, per chip and hour.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from typing import Any

from app.autoscaling.capacity import ReplicaModel, Workload, predict, replicas_needed
from bench import tpu_programs
from bench.report import format_table
from replicas.engine import tpu_topology

SLICES = ("v5e-4", "v5e-8", "v6e-1", "v6e-4", "tpu7x-2")
CHUNK = 448
"""Prompt tokens of a step beside 64 streams, as in docs/tpu.md's table."""
SLOTS = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A model on a slice.

    Attributes:
        name: of the slice.
        chips: that a replica takes.
        generation: key of the price table.
        model: its steps.
        prefill_token_s: that a prompt token adds to a step with streams: little, while the weights
            take longer to read than the tokens to compute.
        mixed_step_s: of a step with all streams and a chunk.
    """

    name: str
    chips: int
    generation: str
    model: ReplicaModel
    prefill_token_s: float
    mixed_step_s: float


def plan_replica(model: str, name: str, quantization: str) -> Replica:
    """Predict a replica's steps from four of them."""
    topology, num_devices = tpu_programs._SLICES[name]
    chip = tpu_topology.chip_of(topology)

    def step(num_seqs: int, context: int, chunk: int = 0) -> tpu_programs.ProgramRow:
        workload = tpu_programs.Workload(
            model=model,
            slice=name,
            quantization=quantization,
            num_seqs=num_seqs,
            context=context,
            chunk=chunk,
        )
        return tpu_programs.measure_workload(workload, compiles=False)

    few, many = step(8, 1024), step(SLOTS, 1024)
    long, mixed = step(SLOTS, 2048), step(SLOTS, 1024, CHUNK)
    context_s = max(long.step_ms - many.step_ms, 0.0) / 1e3 / (SLOTS * 1024)
    row_s = max(many.step_ms - few.step_ms, 0.0) / 1e3 / (SLOTS - 8) - context_s * 1024
    token_s = max(row_s, 0.0)
    return Replica(
        name=name,
        chips=num_devices // chip.devices_per_chip,
        generation=chip.name,
        model=ReplicaModel(
            step_s=few.step_ms / 1e3 - 8 * (token_s + 1024 * context_s),
            token_s=token_s,
            context_s=context_s,
            chunk_tokens=CHUNK,
            num_slots=SLOTS,
            kv_tokens=many.tokens,
        ),
        prefill_token_s=max(mixed.step_ms - many.step_ms, 0.0) / 1e3 / CHUNK,
        mixed_step_s=mixed.step_ms / 1e3,
    )


def load_of(
    replica: Replica, *, rate: float, prompt: int, output: int, hit_share: float
) -> Workload:
    """Return a load in the queueing model's terms."""
    uncached = (1 - hit_share) * prompt
    return Workload(
        requests_per_s=rate,
        prefill_s=uncached * replica.prefill_token_s,
        uncached_tokens=uncached,
        output_tokens=output,
        context_tokens=prompt + output / 2,
    )


def capacity(replica: Replica, load: Workload, *, ttft_s: float, tpot_s: float, kv: float) -> float:
    """Return the most requests per second that one replica serves within the targets; 0: none."""
    low, high = 0.0, 1e4
    for _ in range(60):
        rate = (low + high) / 2
        found = predict(dataclasses.replace(load, requests_per_s=rate), replica.model, 1)
        fits = (
            found.ttft_s <= ttft_s
            and found.tpot_s <= tpot_s
            and found.slot_share <= 1
            and found.kv_share <= kv
        )
        low, high = (rate, high) if fits else (low, rate)
    return low if low > 1e-6 else 0.0


def rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per slice."""
    found: list[dict[str, Any]] = []
    for name in options.slices:
        replica = plan_replica(options.model, name, options.quantization)
        load = load_of(
            replica,
            rate=options.rate,
            prompt=options.prompt,
            output=options.output,
            hit_share=options.hit_share,
        )
        targets = {"ttft_s": options.ttft_s, "tpot_s": options.tpot_s}
        rate = capacity(replica, load, **targets, kv=0.9)
        peak = dataclasses.replace(
            load, requests_per_s=load.requests_per_s * (1 + options.headroom)
        )
        count = None
        if rate:
            count = replicas_needed(peak, replica.model, **targets, kv_share=0.9, max_replicas=4096)
        price = options.prices.get(replica.generation)
        per_million = None
        if count and price is not None:
            tokens = options.rate * options.output * 3600
            per_million = count * replica.chips * price / tokens * 1e6
        found.append(
            {
                "slice": name,
                "chips": replica.chips,
                "step_ms": f"{1e3 * replica.model.step_s:.1f}",
                "prefill_tokens_per_s": f"{CHUNK / replica.mixed_step_s:,.0f}",
                "requests_per_s": f"{rate:.2f}",
                "output_tokens_per_s": f"{rate * options.output:,.0f}",
                "replicas": count,
                "price_per_chip_hour": price,
                "per_million_output_tokens": None if per_million is None else f"{per_million:.2f}",
            }
        )
    return found


def read_price(text: str) -> tuple[str, float]:
    """Read "v6e=2.70"."""
    name, _, price = text.partition("=")
    try:
        value = float(price)
    except ValueError:
        value = math.nan
    if not name or not value >= 0:
        raise argparse.ArgumentTypeError(f'a price is "GENERATION=NUMBER", got {text!r}')
    return name, value


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.capacity", description=__doc__)
    parser.add_argument("--model", choices=list(tpu_programs.MODELS), default="llama-3.1-8b")
    parser.add_argument("--quantization", choices=("none", "int8"), default="none")
    parser.add_argument("--slices", nargs="+", choices=SLICES, default=list(SLICES))
    parser.add_argument("--rate", type=float, required=True, help="requests per second at the peak")
    parser.add_argument("--prompt", type=int, default=1000, help="tokens")
    parser.add_argument("--output", type=int, default=250, help="tokens")
    parser.add_argument("--hit-share", type=float, default=0.0, help="of prompt tokens, cached")
    parser.add_argument("--ttft-s", type=float, default=1.0)
    parser.add_argument("--tpot-s", type=float, default=0.05)
    parser.add_argument("--headroom", type=float, default=0.15)
    parser.add_argument(
        "--price", dest="prices", nargs="+", type=read_price, default=[], metavar="GENERATION=N"
    )
    options = parser.parse_args(arguments)
    options.prices = dict(options.prices)
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    print(format_table(rows(options)))


if __name__ == "__main__":
    main()
