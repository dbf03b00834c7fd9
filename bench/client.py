"""Streaming client for an OpenAI-compatible /v1/completions, and the loops that drive it.

Bodies are serialised before a run and events are parsed once, so that the client takes little of
the machine that it shares with the server. Its clock is `time.perf_counter`; records are relative
to the start of the run.
"""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp
import orjson

from bench.measurement import RequestRecord
from bench.workloads import RequestSpec

_DONE = b"[DONE]"


def check_address(url: str, *, allow_remote: bool) -> str:
    """The server's base URL, without a trailing slash or /v1.

    Raises:
        ValueError: not http(s), or not a loopback address while `allow_remote` is False.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"need an http:// or https:// URL, got {url!r}")
    if not allow_remote and not _is_loopback(parts.hostname):
        raise ValueError(
            f"{parts.hostname} is not a loopback address; a load test of another machine needs "
            "--allow-remote"
        )
    return url.rstrip("/").removesuffix("/v1")


class LoadClient:
    """Sends workloads to one server and records what comes back.

    Args:
        base_url: of `check_address`.
        model: model name to ask for; None: the first that the server lists, on entering.
        api_key: bearer token, or None.
        timeout_s: limit for one request.
    """

    def __init__(
        self,
        base_url: str,
        model: str | None,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._url = f"{base_url}/v1/completions"
        self._base_url = base_url
        self.model = model
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=30)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=self._timeout, headers=self._headers
        )
        if self.model is None:
            listed = (await self.get_json("/v1/models") or {}).get("data") or ()
            self.model = next((entry["id"] for entry in listed), None)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def get_json(self, path: str) -> Any:
        """Body of GET `path`, or None where the server has no such JSON route."""
        assert self._session is not None
        try:
            async with self._session.get(self._base_url + path) as response:
                return orjson.loads(await response.read()) if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError):
            return None

    async def get_text(self, path: str) -> str:
        """Body of GET `path`, or "" when it cannot be had."""
        assert self._session is not None
        try:
            async with self._session.get(self._base_url + path) as response:
                return await response.text() if response.status == 200 else ""
        except (aiohttp.ClientError, TimeoutError):
            return ""

    def encode(self, spec: RequestSpec) -> bytes:
        """Body of one request: greedy, streamed, exactly `max_tokens` long."""
        return orjson.dumps(
            {
                "model": self.model,
                "prompt": spec.prompt_token_ids if spec.text is None else spec.text,
                "max_tokens": spec.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )

    async def run_open(
        self, specs: Sequence[RequestSpec], *, limit_s: float
    ) -> list[RequestRecord]:
        """Send each request at its arrival time, whatever the server does (open loop)."""
        bodies = [self.encode(spec) for spec in specs]
        records = _blank(specs)
        start = time.perf_counter()

        async def arrive(index: int) -> None:
            await asyncio.sleep(start + specs[index].arrival_s - time.perf_counter())
            await self.send(bodies[index], records[index], start=start)

        with _quiet_collector():
            await _within(limit_s, records, [arrive(i) for i in range(len(specs))])
        return records

    async def run_closed(
        self, specs: Sequence[RequestSpec], *, concurrency: int, limit_s: float
    ) -> list[RequestRecord]:
        """Keep `concurrency` requests in flight until all are done (closed loop)."""
        bodies = [self.encode(spec) for spec in specs]
        records = _blank(specs)
        start = time.perf_counter()
        order = iter(range(len(specs)))

        async def work() -> None:
            for index in order:
                await self.send(bodies[index], records[index], start=start)

        with _quiet_collector():
            await _within(limit_s, records, [work() for _ in range(concurrency)])
        return records

    async def run_beside(
        self,
        streams: Sequence[RequestSpec],
        intruder: RequestSpec,
        *,
        settle_events: int,
        limit_s: float,
    ) -> tuple[list[RequestRecord], RequestRecord]:
        """Start `streams`, and send `intruder` once each has had `settle_events` events."""
        bodies = [self.encode(spec) for spec in streams]
        records = _blank(streams)
        late = _blank([intruder])[0]
        late_body = self.encode(intruder)
        start = time.perf_counter()
        settled = [asyncio.Event() for _ in streams]

        def notify(record: RequestRecord) -> None:
            has_ended = record.error is not None or record.end_s is not None
            if has_ended or len(record.event_times_s) >= settle_events:
                settled[record.index].set()

        async def intrude() -> None:
            for event in settled:
                await event.wait()
            await self.send(late_body, late, start=start)

        with _quiet_collector():
            sends = [
                self.send(body, record, start=start, notify=notify)
                for body, record in zip(bodies, records, strict=True)
            ]
            await _within(limit_s, [*records, late], [*sends, intrude()])
        return records, late

    async def send(
        self,
        body: bytes,
        record: RequestRecord,
        *,
        start: float,
        notify: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        """Send one request and fill `record` as events come in. Failures go into the record.

        Args:
            body: of `encode`.
            record: blank.
            start: `time.perf_counter` at the start of the run.
            notify: called after each event, and when the request has failed.
        """
        assert self._session is not None
        record.sent_s = time.perf_counter() - start
        try:
            async with self._session.post(self._url, data=body) as response:
                if response.status != 200:
                    text = (await response.text())[:200]
                    record.error = f"{response.status}: {text}"
                    return
                rest = b""
                # To the end of the body, past [DONE]: the connection can then be used again.
                async for chunk in response.content.iter_any():
                    at_s = time.perf_counter() - start
                    *lines, rest = (rest + chunk).split(b"\n")
                    _apply_lines(lines, at_s, record)
                    if notify is not None:
                        notify(record)
            if record.end_s is None and record.error is None:
                record.error = "stream ended without [DONE]"
        except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError) as error:
            record.error = f"{type(error).__name__}: {error}"[:200]
        finally:
            if notify is not None:
                notify(record)


def _apply_lines(lines: Sequence[bytes], at_s: float, record: RequestRecord) -> None:
    """Note what server-sent lines say; comments and blank lines say nothing."""
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        payload = line[5:].strip()
        if payload == _DONE:
            record.end_s = at_s
        else:
            _apply(orjson.loads(payload), at_s, record)


def _apply(event: dict[str, Any], at_s: float, record: RequestRecord) -> None:
    if error := event.get("error"):
        record.error = f"in stream: {error}"[:200]
        return
    if usage := event.get("usage"):
        record.num_output_tokens = usage.get("completion_tokens") or record.num_output_tokens
        record.num_prompt_tokens = usage.get("prompt_tokens") or record.num_prompt_tokens
        details = usage.get("prompt_tokens_details") or {}
        record.num_cached_tokens = details.get("cached_tokens") or 0
    for choice in event.get("choices") or ():
        # A token that is half a character has no text yet, and no finish reason either.
        if choice.get("text") or choice.get("finish_reason") is None:
            record.event_times_s.append(at_s)
            if not usage:
                record.num_output_tokens += 1


async def _within(limit_s: float, records: Sequence[RequestRecord], work: list[Any]) -> None:
    """Run `work` together for at most `limit_s`; what is unfinished then becomes an error."""
    try:
        async with asyncio.timeout(limit_s):
            await asyncio.gather(*work)
    except TimeoutError:
        for record in records:
            if record.end_s is None and record.error is None:
                record.error = f"not finished within the run's limit of {limit_s:g} s"


@contextmanager
def _quiet_collector() -> Generator[None]:
    """No garbage collection inside: a pause would be measured as the server's."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _blank(specs: Sequence[RequestSpec]) -> list[RequestRecord]:
    return [
        RequestRecord(index=i, sent_s=0.0, num_prompt_tokens=len(spec.prompt_token_ids))
        for i, spec in enumerate(specs)
    ]


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
