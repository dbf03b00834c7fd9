"""Streams completions from the service under test, and keeps every token id and when it came.

`bench.client` measures tokens per second and keeps counts only; here the tokens themselves are the
result. Times are `time.monotonic` seconds. Knows nothing of what a request is good for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp
import orjson

REFUSALS = ("overloaded", "deadline_exceeded", "engine_not_ready")
"""Codes of refusals; a request that waits has an open stream after some seconds."""

_DONE = b"[DONE]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request.

    Attributes:
        prompt_token_ids: at least one.
        max_tokens: output tokens; exactly as many are produced.
        arrival_s: seconds after the start of the run; for open loops.
        seed: of the draws.
        temperature: 0 is greedy.
        api_key: whose request it is; None: the service has no keys.
        ttft_target_s: wanted time to first token, or None.
    """

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    arrival_s: float = 0.0
    seed: int = 0
    temperature: float = 0.0
    api_key: str | None = None
    ttft_target_s: float | None = None


@dataclass(slots=True, kw_only=True)
class Reply:
    """How one request went.

    Attributes:
        ask: what was asked.
        sent_at: when.
        status: of HTTP; 0 when there was no answer.
        token_ids: all output tokens, in the order of their arrival.
        first_token_at, ended_at: infinity when it never happened.
        num_cached_tokens: prompt tokens that the replica's cache held.
        error: what went wrong, or None.
        code: the service's name for it, where it came within the stream.
    """

    ask: Ask
    sent_at: float = 0.0
    status: int = 0
    token_ids: list[int] = field(default_factory=list)
    first_token_at: float = float("inf")
    ended_at: float = float("inf")
    num_cached_tokens: int = 0
    error: str | None = None
    code: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every token came, and nothing else."""
        return self.error is None and len(self.token_ids) == self.ask.max_tokens

    @property
    def is_refused(self) -> bool:
        """Whether the service had no room, or no time; it may find out after it began to answer."""
        return self.status in (429, 503, 504) or self.code in REFUSALS

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.first_token_at - self.sent_at

    @property
    def duration_s(self) -> float:
        """Time to the end of the answer, whatever it was."""
        return self.ended_at - self.sent_at


class Client:
    """Sends requests to one service."""

    def __init__(self, base_url: str, *, api_key: str | None = None) -> None:
        """Prepare; connections are made inside `async with`.

        Args:
            base_url: without a trailing slash.
            api_key: of requests that carry none themselves.
        """
        self._base_url = base_url
        self._api_key = api_key
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=600, sock_connect=30),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._session.close()

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of GET `path`; (0, b"") when nobody answers."""
        headers = self._headers(self._api_key)
        try:
            async with self._session.get(self._base_url + path, headers=headers) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError):
            return 0, b""

    async def ask(self, ask: Ask) -> Reply:
        """Send one request and take its stream to the end. Failures go into the reply."""
        reply = Reply(ask=ask)
        await self.stream(reply)
        return reply

    async def stream(self, reply: Reply) -> None:
        """Send `reply.ask`, and fill `reply` as tokens come in."""
        ask = reply.ask
        headers = self._headers(ask.api_key or self._api_key)
        if ask.ttft_target_s is not None:
            headers["x-slo-ttft-ms"] = str(round(1e3 * ask.ttft_target_s))
        reply.sent_at = time.monotonic()
        try:
            async with self._session.post(
                f"{self._base_url}/v1/completions", data=_body(ask), headers=headers
            ) as response:
                reply.status = response.status
                if response.status != 200:
                    reply.error = (await response.text())[:300]
                else:
                    await _read(response, reply)
        except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError) as error:
            reply.error = f"{type(error).__name__}: {error}"[:300]
        finally:
            reply.ended_at = time.monotonic()

    async def run_open(self, asks: Sequence[Ask]) -> list[Reply]:
        """Send each request at its arrival time, whatever the service does."""
        replies = [Reply(ask=ask) for ask in asks]
        start = time.monotonic()

        async def arrive(reply: Reply) -> None:
            await asyncio.sleep(start + reply.ask.arrival_s - time.monotonic())
            await self.stream(reply)

        await asyncio.gather(*map(arrive, replies))
        return replies

    async def run_closed(self, asks: Sequence[Ask], *, concurrency: int) -> list[Reply]:
        """Keep `concurrency` requests under way until all are done."""
        replies = [Reply(ask=ask) for ask in asks]
        waiting = iter(replies)

        async def work() -> None:
            for reply in waiting:
                await self.stream(reply)

        await asyncio.gather(*(work() for _ in range(concurrency)))
        return replies

    @staticmethod
    def _headers(api_key: str | None) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        return headers


async def _read(response: aiohttp.ClientResponse, reply: Reply) -> None:
    rest, is_done = b"", False
    async for chunk in response.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == _DONE:
                is_done = True
            else:
                _take(orjson.loads(payload), reply)
    if not is_done and reply.error is None:
        reply.error = "the stream ended without [DONE]"


def _take(event: dict[str, Any], reply: Reply) -> None:
    if error := event.get("error"):
        reply.error = str(error)[:300]
        reply.code = error.get("code")
    if usage := event.get("usage"):
        details = usage.get("prompt_tokens_details") or {}
        reply.num_cached_tokens = details.get("cached_tokens") or 0
    for choice in event.get("choices") or ():
        if token_ids := choice.get("token_ids"):
            reply.first_token_at = min(reply.first_token_at, time.monotonic())
            reply.token_ids += token_ids


def _body(ask: Ask) -> bytes:
    return orjson.dumps(
        {
            "prompt": ask.prompt_token_ids,
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "seed": ask.seed,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
    )
