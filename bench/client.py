"""Streaming client for an OpenAI-compatible /v1/completions, and the loops that drive it.

Requests are serialised before a run and events parsed after it, so that the client takes little of
the machine that it shares with the server. Its clock is `time.perf_counter`; records are relative
to the start of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import time
from collections.abc import Callable, Generator, Sequence
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp
import httptools
import orjson

from bench.collector import collector_off
from bench.http_stream import ConnectionLost, HttpStream, Piece
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
        self._base_url = base_url
        self.model = model
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._idle: list[HttpStream] = []

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=30),
            headers=self._headers,
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
        for stream in self._idle:
            stream.close()

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
        """One request as it goes over the wire: greedy, streamed, exactly `max_tokens` long."""
        body = orjson.dumps(
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
        parts = urlsplit(self._base_url)
        fields = {"Host": parts.netloc, **self._headers, "Content-Length": str(len(body))}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        path = f"{parts.path}/v1/completions"
        return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body

    async def run_open(
        self, specs: Sequence[RequestSpec], *, limit_s: float
    ) -> list[RequestRecord]:
        """Send each request at its arrival time, whatever the server does (open loop)."""
        requests = [self.encode(spec) for spec in specs]
        records = _blank(specs)
        bodies: list[list[Piece] | None] = [None for _ in specs]
        start = time.perf_counter()

        async def arrive(index: int) -> None:
            await asyncio.sleep(start + specs[index].arrival_s - time.perf_counter())
            bodies[index] = await self._ask(requests[index], records[index], start=start)

        with _quiet_collector():
            await _within(limit_s, [arrive(i) for i in range(len(specs))])
        return _read_all(bodies, records, start, limit_s)

    async def run_closed(
        self, specs: Sequence[RequestSpec], *, concurrency: int, limit_s: float
    ) -> list[RequestRecord]:
        """Keep `concurrency` requests in flight until all are done (closed loop)."""
        requests = [self.encode(spec) for spec in specs]
        records = _blank(specs)
        bodies: list[list[Piece] | None] = [None for _ in specs]
        start = time.perf_counter()
        order = iter(range(len(specs)))

        async def work() -> None:
            for index in order:
                bodies[index] = await self._ask(requests[index], records[index], start=start)

        with _quiet_collector():
            await _within(limit_s, [work() for _ in range(concurrency)])
        return _read_all(bodies, records, start, limit_s)

    async def run_beside(
        self,
        streams: Sequence[RequestSpec],
        intruder: RequestSpec,
        *,
        settle_events: int,
        limit_s: float,
    ) -> tuple[list[RequestRecord], RequestRecord]:
        """Start `streams`, and send `intruder` once each has had `settle_events` events."""
        requests = [self.encode(spec) for spec in streams]
        records = _blank(streams)
        late = _blank([intruder])[0]
        late_request = self.encode(intruder)
        start = time.perf_counter()
        settled = [asyncio.Event() for _ in streams]

        async def intrude() -> None:
            for event in settled:
                await event.wait()
            await self.send(late_request, late, start=start)

        with _quiet_collector():
            sends = [
                self._send_until_settled(request, record, start, settle_events, event)
                for request, record, event in zip(requests, records, settled, strict=True)
            ]
            await _within(limit_s, [*sends, intrude()])
        for record in (*records, late):
            if record.end_s is None and record.error is None:
                record.error = _unfinished(limit_s)
        return records, late

    async def send(self, request: bytes, record: RequestRecord, *, start: float) -> None:
        """Send one request and fill `record` when it has ended. Failures go into the record.

        Args:
            request: of `encode`.
            record: blank.
            start: `time.perf_counter` at the start of the run.
        """
        _read(await self._ask(request, record, start=start), record, start)

    async def _send_until_settled(
        self,
        request: bytes,
        record: RequestRecord,
        start: float,
        num_events: int,
        settled: asyncio.Event,
    ) -> None:
        """Send one request; `settled` is set once it has had so many events, or has ended."""
        num_seen = 0

        def count(piece: Piece) -> None:
            nonlocal num_seen
            num_seen += piece[1].count(b"data:")
            if num_seen >= num_events:
                settled.set()

        try:
            body = await self._ask(request, record, start=start, on_piece=count)
            _read(body, record, start)
        finally:
            settled.set()

    async def _ask(
        self,
        request: bytes,
        record: RequestRecord,
        *,
        start: float,
        on_piece: Callable[[Piece], None] | None = None,
    ) -> list[Piece]:
        """Send a request and wait for its end; returns what came, unread.

        Notes in the record when it was sent, and why it failed if it did.
        """
        record.sent_s = time.perf_counter() - start
        stream: HttpStream | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    is_new = stream is not None or not self._idle
                    stream = (
                        await HttpStream.connect(self._base_url) if is_new else self._idle.pop()
                    )
                    try:
                        await stream.request(request, on_piece)
                        break
                    except ConnectionLost as error:
                        if is_new or not error.is_unused:
                            raise
            if stream.status != 200:
                text = b"".join(body for _, body in stream.pieces).decode(errors="replace")
                record.error = f"{stream.status}: {text[:200]}"
                return []
            return stream.pieces
        except (OSError, ConnectionLost, httptools.HttpParserError, TimeoutError) as error:
            record.error = f"{type(error).__name__}: {error}"[:200]
            return []
        finally:
            if stream is not None and stream.is_open:
                self._idle.append(stream)


def _read_all(
    bodies: Sequence[list[Piece] | None],
    records: list[RequestRecord],
    start: float,
    limit_s: float,
) -> list[RequestRecord]:
    """Read what the requests of a run gave; None: one had not ended at the run's limit."""
    for body, record in zip(bodies, records, strict=True):
        if body is None:
            record.error = record.error or _unfinished(limit_s)
        else:
            _read(body, record, start)
    return records


def _unfinished(limit_s: float) -> str:
    return f"not finished within the run's limit of {limit_s:g} s"


def _read(body: list[Piece], record: RequestRecord, start: float) -> None:
    """Note what a whole body says, and when it said so."""
    if record.error is not None:
        return
    rest = b""
    try:
        for arrived_s, piece in body:
            *lines, rest = (rest + piece).split(b"\n")
            _apply_lines(lines, arrived_s - start, record)
    except orjson.JSONDecodeError as error:
        record.error = f"{type(error).__name__}: {error}"[:200]
    if record.end_s is None and record.error is None:
        record.error = "stream ended without [DONE]"


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


async def _within(limit_s: float, work: list[Any]) -> None:
    """Run `work` together for at most `limit_s`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await asyncio.gather(*work)


@contextlib.contextmanager
def _quiet_collector() -> Generator[None]:
    """No garbage collection inside: a pause would be measured as the server's."""
    gc.collect()
    with collector_off():
        yield


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
