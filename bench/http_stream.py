"""One HTTP/1.1 connection that notes when each piece of a streamed body arrived.

Made for load clients that share a machine with the server: a piece costs one callback, without a
task to be woken. Knows nothing of what the body says.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

import httptools

Piece = tuple[float, bytes]
"""`time.perf_counter` at its arrival, and part of a body."""


class ConnectionLost(Exception):
    """The server closed the connection before the response was complete.

    Attributes:
        is_unused: not a byte of a response came: a kept-alive connection that the server had
            closed by then looks like that.
    """

    def __init__(self, message: str, *, is_unused: bool) -> None:
        super().__init__(message)
        self.is_unused = is_unused


class HttpStream(asyncio.Protocol):
    """A connection; at most one request at a time.

    Attributes:
        status: of the latest response.
        pieces: its body so far.
    """

    def __init__(self) -> None:
        self.status = 0
        self.pieces: list[Piece] = []
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._done: asyncio.Future[None] | None = None
        self._on_piece: Callable[[Piece], None] | None = None
        self._now = 0.0
        self._has_begun = False
        self._ends_with_connection = False

    @classmethod
    async def connect(cls, url: str) -> HttpStream:
        """Open a connection to the host of a URL.

        Raises:
            OSError: nobody listens there.
        """
        parts = urlsplit(url)
        context = ssl.create_default_context() if parts.scheme == "https" else None
        assert parts.hostname is not None, url
        port = parts.port or (443 if context else 80)
        loop = asyncio.get_running_loop()
        _, protocol = await loop.create_connection(cls, parts.hostname, port, ssl=context)
        return protocol

    @property
    def is_open(self) -> bool:
        """Whether it can take a request."""
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        """Drop the connection, whatever it is at."""
        if self._transport is not None:
            self._transport.abort()

    async def request(
        self, head_and_body: bytes, on_piece: Callable[[Piece], None] | None = None
    ) -> None:
        """Send a request and wait for the end of its response.

        Args:
            head_and_body: as it goes over the wire.
            on_piece: called with each piece of a body of status 200.

        Raises:
            ConnectionLost: it was closed too early.
            httptools.HttpParserError: what came is no HTTP.
        """
        assert self._transport is not None
        if not self.is_open:  # no callback will come from it any more
            raise ConnectionLost("the connection was closed while it was idle", is_unused=True)
        self.status, self.pieces, self._has_begun = 0, [], False
        self._on_piece = on_piece
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(head_and_body)
        try:
            await self._done
        except BaseException:
            self.close()  # the rest of a response must not meet the next request
            raise

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Note the time, and parse."""
        self._now = time.perf_counter()
        self._has_begun = True
        if self._parser is None:
            self.close()  # nothing was asked for
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request that was under way, mostly in failure."""
        if exc is None and self._ends_with_connection:
            self._finish()
            return
        reason = f": {exc}" if exc else ""
        is_unused = not self._has_begun
        self._fail(ConnectionLost(f"the connection was closed{reason}", is_unused=is_unused))

    # What the parser calls.

    def on_message_begin(self) -> None:
        """Nothing says yet how long the body is."""
        self._ends_with_connection = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note whether the body's end will be seen."""
        del value
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        """Take the status."""
        assert self._parser is not None
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Keep a piece."""
        piece = self._now, body
        self.pieces.append(piece)
        if self._on_piece is not None and self.status == 200:
            self._on_piece(piece)

    def on_message_complete(self) -> None:
        """End the request."""
        assert self._parser is not None
        if not self._parser.should_keep_alive():
            self.close()
        self._finish()

    def _finish(self) -> None:
        self._parser, self._ends_with_connection = None, False
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
