"""Traces as requests: whole public traces, sped up, superposed, with their ties spread.

A page key is 8 bytes of a block's identity: the traces say which prompts share which blocks. The
Azure traces do not, so there every block is its own. Same arguments, same requests.
"""

from __future__ import annotations

import csv
import functools
import io
import json
import lzma
import random
from dataclasses import dataclass
from datetime import datetime

from bench.workloads import MOONCAKE_TICK_S, TRACES

PAGE_SIZE = 512
"""Tokens of a Mooncake block, and of a page here."""

NAMES = {
    "conversation": "full_mooncake_conversation.jsonl.xz",
    "synthetic": "full_mooncake_synthetic.jsonl.xz",
    "azure-conv": "full_azure_conv_2023.csv.xz",
    "azure-code": "full_azure_code_2023.csv.xz",
}


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace file.

    Attributes:
        at: seconds after the trace's start.
        num_prompt_tokens: >= 1.
        num_output_tokens: >= 1.
        blocks: one id per page of the prompt, the last partial; empty where unknown.
    """

    at: float
    num_prompt_tokens: int
    num_output_tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request of a run.

    Attributes:
        request_id: its number in the run.
        arrived_at: seconds.
        num_prompt_tokens: >= 1.
        num_output_tokens: >= 1.
        page_keys: of the prompt's full pages but for the last token's.
    """

    request_id: str
    arrived_at: float
    num_prompt_tokens: int
    num_output_tokens: int
    page_keys: tuple[bytes, ...]


@functools.cache
def load(name: str) -> tuple[TraceRow, ...]:
    """Read one of `NAMES`, in order of arrival."""
    text = lzma.decompress((TRACES / NAMES[name]).read_bytes()).decode()
    if NAMES[name].endswith(".jsonl.xz"):
        rows = [_mooncake_row(json.loads(line)) for line in text.splitlines()]
    else:
        rows = _azure_rows(text)
    return tuple(sorted(rows, key=lambda row: row.at))


def replay(
    name: str, *, rate: float, num_requests: int, copies: int = 1, seed: int = 0
) -> list[SimRequest]:
    """Requests of a trace at a mean rate.

    Args:
        name: one of `NAMES`.
        rate: requests per second, all copies together.
        num_requests: the first so many; the trace is repeated with fresh blocks when it is short.
        copies: traces that are superposed, each shifted in time and with blocks of its own, so
            independent tenants; the block that all requests of a trace share stays shared.
        seed: of jitter and shifts.
    """
    rows = load(name)
    rng = random.Random(seed)
    is_quantised = name == "conversation"
    span = rows[-1].at - rows[0].at + (MOONCAKE_TICK_S if is_quantised else 0)
    speed = rate / copies / (len(rows) / span)
    needed = -(-num_requests // copies)
    shared = set(rows[0].blocks[:1])
    found: list[tuple[float, int, TraceRow]] = []
    for copy in range(copies):
        start = rng.randrange(len(rows)) if copies > 1 or seed else 0
        for number in range(needed):
            lap, index = divmod(start + number, len(rows))
            row = rows[index]
            at = row.at - rows[start].at + lap * span
            if is_quantised:
                at += rng.uniform(0, MOONCAKE_TICK_S)
            found.append((at / speed, copy * 1000 + lap, row))
    found.sort(key=lambda item: item[0])
    requests: list[SimRequest] = []
    for number, (at, world, row) in enumerate(found[:num_requests]):
        count = (row.num_prompt_tokens - 1) // PAGE_SIZE
        if row.blocks:
            keys = tuple(
                (block if block in shared else (world << 24) + block).to_bytes(8, "little")
                for block in row.blocks[:count]
            )
        else:
            first = (1 << 60) + (number << 12)
            keys = tuple((first + page).to_bytes(8, "little") for page in range(count))
        requests.append(
            SimRequest(str(number), at, row.num_prompt_tokens, row.num_output_tokens, keys)
        )
    return requests


def _mooncake_row(fields: dict[str, object]) -> TraceRow:
    match fields:
        case {
            "timestamp": int(ms),
            "input_length": int(prompt),
            "output_length": int(output),
            "hash_ids": list(blocks),
        }:
            return TraceRow(ms / 1e3, prompt, max(1, output), tuple(blocks))
        case _:
            raise ValueError(f"not a row of a Mooncake trace: {fields}")


def _azure_rows(text: str) -> list[TraceRow]:
    rows: list[TraceRow] = []
    start: datetime | None = None
    for row in csv.DictReader(io.StringIO(text)):
        at = datetime.fromisoformat(row["TIMESTAMP"][:26])
        start = start or at
        seconds = (at - start).total_seconds()
        rows.append(
            TraceRow(seconds, max(1, int(row["ContextTokens"])), int(row["GeneratedTokens"]), ())
        )
    return rows
