"""Steady streams against the service, each compared with what an undisturbed one got."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.own_time import now

NUM_STREAMS = 6
MAX_TOKENS = 900
NUM_LONG = 2
LONG_TOKENS = 24000
"""Minutes on two cores."""
REQUEST_LIMIT_S = 90.0
LONG_LIMIT_S = 900.0
PAUSE_AFTER_ERROR_S = 0.25


@dataclass
class Answer:
    """One request as its client saw it.

    Attributes:
        sent_at: by `own_time`.
        ended_at: the same.
        tokens: received, in order.
        error: what went wrong, in few words; None: nothing.
        stall_s: longest wait for the next tokens, the first ones included.
    """

    sent_at: float
    ended_at: float = 0.0
    tokens: list[int] = field(default_factory=list)
    error: str | None = None
    stall_s: float = 0.0


def body_of(index: int, *, max_tokens: int | None = None) -> dict[str, Any]:
    """Request number `index`: sampled, so that no token follows from the one before.

    The first `NUM_STREAMS` are short, the others long, unless `max_tokens` says otherwise.
    """
    default = MAX_TOKENS if index < NUM_STREAMS else LONG_TOKENS
    return {
        "prompt": [(index * 37 + i) % 600 + 2 for i in range(20 + index)],
        "max_tokens": default if max_tokens is None else max_tokens,
        "temperature": 1.0,
        "seed": index,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }


async def send(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Answer:
    """Stream one completion."""
    answer = Answer(sent_at=now())
    last_at, is_done = answer.sent_at, False
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                answer.error = f"HTTP {response.status}"
                await response.read()
                return answer
            async for line in response.content:
                if not line.startswith(b"data:"):
                    continue
                payload = line[5:].strip()
                if payload == b"[DONE]":
                    is_done = True
                    continue
                event = json.loads(payload)
                if "error" in event:
                    answer.error = f"in stream: {event['error'].get('code')}"
                    continue
                for choice in event.get("choices") or ():
                    if tokens := choice.get("token_ids"):
                        came_at = now()
                        answer.stall_s = max(answer.stall_s, came_at - last_at)
                        last_at = came_at
                        answer.tokens += tokens
        if not is_done and answer.error is None:
            answer.error = "stream cut"
    except TimeoutError:
        answer.error = "no end within its time"
    except (aiohttp.ClientError, OSError) as error:
        kind = "refused" if isinstance(error, aiohttp.ClientConnectorError) else "stream cut"
        answer.error = kind
    finally:
        answer.ended_at = now()
        answer.stall_s = max(answer.stall_s, answer.ended_at - last_at)
    return answer


def new_session(limit_s: float = REQUEST_LIMIT_S) -> aiohttp.ClientSession:
    """Connections are not reused: a balancer must not hide what happens to new ones."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=limit_s),
    )


class Traffic:
    """Keeps `NUM_STREAMS` streams running, and remembers how each went.

    References beyond those are of long streams, which are sent once, at the start.
    """

    def __init__(self, url: str, references: list[list[int]]) -> None:
        self.answers: list[tuple[int, Answer]] = []
        self._url = url
        self._references = references
        self._is_ending = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._work(i)) for i in range(NUM_STREAMS)]
        for index in range(NUM_STREAMS, len(self._references)):
            self._tasks.append(asyncio.create_task(self._work_once(index)))

    async def stop(self) -> None:
        """Let what runs come to its end."""
        self._is_ending = True
        await asyncio.gather(*self._tasks)

    async def _work(self, index: int) -> None:
        async with new_session() as session:
            while not self._is_ending:
                answer = await send(session, self._url, body_of(index))
                self.answers.append((index, answer))
                if answer.error is not None:
                    await asyncio.sleep(PAUSE_AFTER_ERROR_S)

    async def _work_once(self, index: int) -> None:
        async with new_session(LONG_LIMIT_S) as session:
            self.answers.append((index, await send(session, self._url, body_of(index))))

    def longest_s(self) -> float:
        """How long the longest stream took."""
        return max((a.ended_at - a.sent_at for _, a in self.answers), default=0.0)

    def errors(self) -> Counter[str]:
        """Failed requests by what went wrong."""
        return Counter(a.error for _, a in self.answers if a.error is not None)

    def num_wrong(self) -> int:
        """Streams with a token missing, doubled or other than in the undisturbed run.

        A stream that failed may be short; what it has must be right all the same.
        """
        wrong = 0
        for index, answer in self.answers:
            reference = self._references[index]
            expected = reference if answer.error is None else reference[: len(answer.tokens)]
            wrong += answer.tokens != expected
        return wrong

    def recovery_s(self, fault_at: float) -> float:
        """Seconds from the fault to the end of the last request that failed; 0: none did."""
        ends = [a.ended_at - fault_at for _, a in self.answers if a.error is not None]
        return max(ends, default=0.0)

    def stall_s(self) -> float:
        """Longest wait for tokens in a stream that was completed."""
        return max((a.stall_s for _, a in self.answers if a.error is None), default=0.0)


async def flood(url: str, *, count: int, seed: int) -> None:
    """Open `count` streams and leave each after a random time, before or after its first token."""
    rng = random.Random(seed)

    async def leave(index: int, delay_s: float, stay_s: float) -> None:
        await asyncio.sleep(delay_s)
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
            async with asyncio.timeout(stay_s), new_session() as session:
                await send(session, url, body_of(index % 50, max_tokens=2000))

    await asyncio.gather(
        *(leave(i, rng.uniform(0, 8), rng.uniform(0.005, 0.6)) for i in range(count))
    )
