"""Speculation against plain decoding on the bare engine: speed, acceptance, equality of tokens.

Two engines of one model in one process, one with prompt lookup, answer the same chats in turn.
Copy-heavy chats ask for a text again with one word changed; copy-poor ones are open questions,
sampled, so that the answers repeat little.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.chat_message import ChatMessage
from app.tokenizer import Tokenizer
from bench import report
from replicas.config import EngineConfig
from replicas.engine.engine import Engine
from replicas.engine.startup import build_engine
from replicas.wire import GenerateRequest, SamplingParams, SinkAddress

_NO_SINK = SinkAddress(host="", port=0, sink_id="", key=b"")

_TEXTS = (
    "The harbour of Lindau lies at the eastern end of the lake. Every morning before six, the "
    "first boats leave the quay with nets and empty crates, and by noon most of them are back with "
    "their catch. The market opens at one. Restaurants from the old town send their cooks early, "
    "because the best whitefish is gone within the hour. In winter the ice sometimes closes the "
    "harbour for a week, and the crews repair nets, paint hulls and wait for the wind to turn.",
    "A good recipe for bread needs only flour, water, salt and time. Mix five hundred grams of "
    "flour with three hundred and fifty grams of water and let it rest for thirty minutes. Add ten "
    "grams of salt and a spoon of old dough, fold it four times within two hours, and keep it in "
    "the cold overnight. In the morning shape a loaf, let it rise once more, and bake it in a very "
    "hot oven for forty minutes until the crust is dark and the bottom sounds hollow.",
    "The committee met on Tuesday to discuss the new library. The architect presented two plans: "
    "one keeps the old reading room and adds a glass hall on the south side, the other replaces "
    "the building by a tower of nine floors. The mayor preferred the first plan because it costs "
    "less, while the librarians asked for more shelves and a quiet room for children. A vote was "
    "postponed to the next meeting, when the cost of heating will be known.",
)
_COPY_TASKS = (
    "Repeat the following text exactly, but replace the word '{old}' by '{new}':\n\n{text}",
    "Rewrite this text with '{old}' changed to '{new}'. Keep everything else:\n\n{text}",
)
_WORDS = (("nets", "ropes"), ("flour", "rye"), ("plan", "design"))
_QUESTIONS = (
    "Tell me a strange story about a lighthouse keeper and a whale.",
    "What would a city look like if nobody ever slept? Describe one day in it.",
    "Invent a board game, with its pieces, its rules and the history behind it.",
    "Write a letter from a gardener on Mars to her brother on Earth.",
    "Explain how a violin is built to somebody who has never seen wood.",
    "Give me an unusual plan for a week of holidays without money.",
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One kind of chats at one concurrency, medians over the rounds.

    Attributes:
        kind: "copy-heavy" or "copy-poor".
        concurrency: chats that run at once.
        plain_tokens_per_s: decoding speed without speculation, prefill excluded.
        tokens_per_s: with it.
        ratio: of the two.
        tokens_per_step: output tokens of a decode step, with speculation.
        acceptance: share of the verified drafts that were right.
        identical: all tokens are those of plain decoding.
    """

    kind: str
    concurrency: int
    plain_tokens_per_s: float
    tokens_per_s: float
    ratio: float
    tokens_per_step: float
    acceptance: float | None
    identical: bool


@dataclass(slots=True)
class _Tally:
    """What one engine has done: answers by request, and decode steps with their time."""

    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    num_tokens: int = 0
    num_steps: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Speed of decode steps."""
        return self.num_tokens / self.seconds


def make_requests(tokenizer: Tokenizer, kind: str, max_tokens: int) -> list[GenerateRequest]:
    """The chats of a kind, as prompts of the model's own template."""
    if kind == "copy-heavy":
        chats = [
            task.format(old=old, new=new, text=text)
            for task in _COPY_TASKS
            for text, (old, new) in zip(_TEXTS, _WORDS, strict=True)
        ]
        sampling = SamplingParams(max_tokens=max_tokens)
    else:
        chats = list(_QUESTIONS)
        sampling = SamplingParams(max_tokens=max_tokens, temperature=1.0, top_p=0.95)
    assert tokenizer.chat_template is not None, "the bench needs a model with a chat template"
    requests: list[GenerateRequest] = []
    for index, chat in enumerate(chats):
        text = tokenizer.chat_template.render(
            [ChatMessage.model_validate({"role": "user", "content": chat})]
        )
        requests.append(
            GenerateRequest(
                request_id=str(index),
                prompt_token_ids=tuple(tokenizer.encode(text, add_special_tokens=False)),
                sampling=dataclasses.replace(sampling, seed=index),
                sink=_NO_SINK,
            )
        )
    return requests


def answer(engine: Engine[Any], requests: Sequence[GenerateRequest], tally: _Tally) -> None:
    """Answer chats at once; counts what comes after the step that ends the last prompt."""
    outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    started_s: float | None = None
    while engine.has_work:
        is_decode = started_s is not None
        tally.num_steps += is_decode
        for delta in engine.step().deltas:
            outputs[delta.request_id] += delta.token_ids
            tally.num_tokens += is_decode * len(delta.token_ids)
        if started_s is None and all(outputs.values()):
            started_s = time.perf_counter()
    assert started_s is not None
    tally.seconds += time.perf_counter() - started_s
    tally.outputs |= {request_id: tuple(tokens) for request_id, tokens in outputs.items()}


def compare(
    plain: Engine[Any],
    speculating: Engine[Any],
    requests: Sequence[GenerateRequest],
    *,
    kind: str,
    concurrency: int,
    num_rounds: int,
) -> Result:
    """Let both engines answer each group of chats, one right after the other."""
    before = speculating.load()
    rounds: list[tuple[_Tally, _Tally]] = []
    for _ in range(num_rounds):
        base, fast = _Tally(), _Tally()
        for first in range(0, len(requests), concurrency):
            group = requests[first : first + concurrency]
            answer(plain, group, base)
            answer(speculating, group, fast)
        rounds.append((base, fast))
    after = speculating.load()
    num_drafts = after.num_draft_tokens - before.num_draft_tokens
    num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
    last = rounds[-1][1]
    return Result(
        kind=kind,
        concurrency=concurrency,
        plain_tokens_per_s=statistics.median(base.tokens_per_s for base, _ in rounds),
        tokens_per_s=statistics.median(fast.tokens_per_s for _, fast in rounds),
        ratio=statistics.median(fast.tokens_per_s / base.tokens_per_s for base, fast in rounds),
        tokens_per_step=last.num_tokens / last.num_steps,
        acceptance=num_accepted / num_drafts if num_drafts else None,
        identical=all(base.outputs == fast.outputs for base, fast in rounds),
    )


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.speculation", description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m-instruct"))
    parser.add_argument("--platform", default="cpu", choices=["auto", "cpu", "tpu"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--kinds", default="copy-heavy,copy-poor")
    parser.add_argument("--concurrency", default="1", help="e.g. 1,2,4")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--drafts", type=int, default=7)
    parser.add_argument("--min-ngram", type=int, default=2)
    parser.add_argument("--max-ngram", type=int, default=4)
    parser.add_argument("--program-store", default=".cache/programs")
    parser.add_argument("--output", type=Path, help="write all results as JSON")
    return parser.parse_args()


def main() -> None:
    """Print one line of JSON for each kind and concurrency."""
    args = parse_args()
    concurrencies = [int(value) for value in args.concurrency.split(",")]
    config = EngineConfig(
        model=str(args.model),
        platform=args.platform,
        dtype=args.dtype,
        max_num_seqs=8,
        max_mixed_tokens=16,
        max_num_batched_tokens=128,
        max_model_len=2048,
        kv_cache_bytes=1 << 28,
        num_speculative_tokens=args.drafts,
        prompt_lookup_min=args.min_ngram,
        prompt_lookup_max=args.max_ngram,
        program_store=args.program_store,
    )
    plain = build_engine(config)
    speculating = build_engine(dataclasses.replace(config, speculation="prompt_lookup"))
    tokenizer = Tokenizer.load(args.model)
    results: list[Result] = []
    for kind in args.kinds.split(","):
        requests = make_requests(tokenizer, kind, args.max_tokens)
        for concurrency in concurrencies:
            result = compare(
                plain,
                speculating,
                requests,
                kind=kind,
                concurrency=concurrency,
                num_rounds=args.rounds,
            )
            results.append(result)
            print(json.dumps(dataclasses.asdict(result)), flush=True)
    if args.output is not None:
        arguments = {key: str(value) for key, value in vars(args).items()}
        measured = {"arguments": arguments, "results": [dataclasses.asdict(r) for r in results]}
        report.write_json(args.output, {"stamp": report.stamp()} | measured)


if __name__ == "__main__":
    main()
