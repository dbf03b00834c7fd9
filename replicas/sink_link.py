"""The connecting end of the data plane: a persistent connection to one sink, restored when lost.

Knows neither tokens nor load. Invariant: `write` never waits and never buffers more than its bound.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, cast, override

from replicas.frames import (
    MAX_FRAME_BYTES,
    MAX_HANDSHAKE_FRAME_BYTES,
    NONCE_BYTES,
    PROTOCOL_VERSION,
    FrameBuffer,
    FrameError,
    FrameKind,
    handshake_mac,
    make_nonce,
    pack_frame,
    verify_mac,
)
from replicas.wire import SinkAddress

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 2.0
FIRST_RETRY_S = 0.02
MAX_RETRY_S = 1.0
PING_INTERVAL_S = 1.0

WelcomeHandler = Callable[[Mapping[str, int]], None]
FrameHandler = Callable[[list[Any]], None]


class SinkConnection(asyncio.Protocol):
    """One TCP connection, from connect to loss.

    Attributes:
        lost: done when the connection is gone.
        was_welcomed: whether the sink proved that it holds the key.
    """

    def __init__(
        self,
        address: SinkAddress,
        replica_id: str,
        on_welcome: WelcomeHandler,
        on_frame: FrameHandler,
    ) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.was_welcomed = False
        self._address = address
        self._replica_id = replica_id
        self._on_welcome = on_welcome
        self._on_frame = on_frame
        self._buffer = FrameBuffer(MAX_HANDSHAKE_FRAME_BYTES)
        self._nonce = make_nonce()
        self._sink_nonce: bytes | None = None
        self._transport: asyncio.Transport | None = None

    @property
    def is_ready(self) -> bool:
        """Whether frames may be written."""
        return self.was_welcomed and not self.lost.done()

    def write(self, frame: bytes) -> None:
        """Hand a frame to the transport."""
        assert self._transport is not None
        self._transport.write(frame)

    def num_buffered_bytes(self) -> int:
        """Return what the kernel has not taken yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def abort(self) -> None:
        """Close at once, dropping what is buffered."""
        if self._transport is not None:
            self._transport.abort()

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Serve runs uvloop, whose transports do not inherit asyncio's. Both set TCP_NODELAY.
        self._transport = cast(asyncio.Transport, transport)

    @override
    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._buffer.feed(data):
                if self.was_welcomed:
                    self._on_frame(frame)
                elif self._sink_nonce is None:
                    self._answer_challenge(frame)
                else:
                    self._accept_welcome(frame)
        except FrameError as error:
            logger.warning("closing the connection to sink %s: %s", self._address.sink_id, error)
            self.abort()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)

    def _mac(self, role: str) -> bytes:
        assert self._sink_nonce is not None
        return handshake_mac(
            self._address.key,
            role,
            sink_id=self._address.sink_id,
            replica_id=self._replica_id,
            sink_nonce=self._sink_nonce,
            replica_nonce=self._nonce,
        )

    def _answer_challenge(self, frame: list[Any]) -> None:
        match frame:
            case [FrameKind.CHALLENGE, int(version), bytes(nonce)] if len(nonce) == NONCE_BYTES:
                if version != PROTOCOL_VERSION:
                    raise FrameError(f"the sink speaks version {version}, we {PROTOCOL_VERSION}")
                self._sink_nonce = nonce
            case _:
                raise FrameError("the first frame is not CHALLENGE")
        sink_id = self._address.sink_id
        self.write(
            pack_frame(
                FrameKind.HELLO, sink_id, self._replica_id, self._nonce, self._mac("replica")
            )
        )
        # WELCOME lists every open request of the sink.
        self._buffer.max_frame_bytes = MAX_FRAME_BYTES

    def _accept_welcome(self, frame: list[Any]) -> None:
        match frame:
            case [FrameKind.WELCOME, bytes(mac), dict(next_indices)]:
                if not verify_mac(self._mac("sink"), mac):
                    raise FrameError("the sink does not hold the key")
            case _:
                raise FrameError("expected WELCOME")
        self.was_welcomed = True
        self._on_welcome(next_indices)


class SinkLink:
    """Keeps a connection to a sink for as long as its owner wants one.

    Attributes:
        address: the sink.
    """

    def __init__(
        self,
        address: SinkAddress,
        replica_id: str,
        *,
        on_welcome: WelcomeHandler,
        on_frame: FrameHandler,
        on_closed: Callable[[str], None],
        is_wanted: Callable[[], bool],
        max_buffered_bytes: int,
        retry_for_s: float,
    ) -> None:
        """Start to connect. `on_closed(reason)` is called once, when the link has given up.

        Args:
            address: where to connect.
            replica_id: who we are.
            on_welcome: called after each handshake with what the sink expects next.
            on_frame: called with each later frame of the sink.
            on_closed: called once when the sink left and nothing is wanted of it, or when it could
                not be reached for `retry_for_s`; not after `close`.
            is_wanted: whether a lost connection is to be re-established.
            max_buffered_bytes: bytes that may wait for a slow reader.
            retry_for_s: seconds without a connection after which the link gives up.
        """
        self.address = address
        self._replica_id = replica_id
        self._on_welcome = on_welcome
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._is_wanted = is_wanted
        self._max_buffered_bytes = max_buffered_bytes
        self._retry_for_s = retry_for_s
        self._loop = asyncio.get_running_loop()
        self._written_at = 0.0
        self._connection: SinkConnection | None = None
        self._task = self._loop.create_task(self._run())

    @property
    def is_ready(self) -> bool:
        """Whether `write` reaches the sink."""
        return self._connection is not None and self._connection.is_ready

    @property
    def num_buffered_bytes(self) -> int:
        """What the kernel has not taken yet; 0 without a connection."""
        return 0 if self._connection is None else self._connection.num_buffered_bytes()

    def write(self, frame: bytes) -> bool:
        """Send a frame on a ready link.

        Returns:
            False when the reader is more than the bound behind; the frame is not sent then.
        """
        connection = self._connection
        assert connection is not None
        if connection.num_buffered_bytes() + len(frame) > self._max_buffered_bytes:
            return False
        self._written_at = self._loop.time()
        connection.write(frame)
        return True

    def reset(self) -> None:
        """Drop the connection, and what it has buffered; it is re-established when wanted."""
        if self._connection is not None:
            self._connection.abort()

    def close(self) -> None:
        """Drop the connection for good."""
        self._task.cancel()
        self.reset()

    async def _run(self) -> None:
        give_up_at = self._loop.time() + self._retry_for_s
        delay_s = FIRST_RETRY_S
        reason = "the sink left"
        while True:
            connection = await self._connect()
            if connection is not None:
                await self._stay_connected(connection)
                if connection.was_welcomed:
                    give_up_at = self._loop.time() + self._retry_for_s
                    delay_s = FIRST_RETRY_S
            if not self._is_wanted():
                break
            if self._loop.time() + delay_s > give_up_at:
                reason = f"the sink could not be reached for {self._retry_for_s:.0f} s"
                break
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_RETRY_S)
        self._connection = None
        self._on_closed(reason)

    async def _connect(self) -> SinkConnection | None:
        address = self.address

        def make_connection() -> SinkConnection:
            # Set here: the sink's first frames may arrive before create_connection returns.
            self._connection = SinkConnection(
                address, self._replica_id, self._on_welcome, self._on_frame
            )
            return self._connection

        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await self._loop.create_connection(
                    make_connection, address.host, address.port
                )
                return connection
        except (OSError, TimeoutError) as error:
            logger.debug("cannot connect to sink %s: %s", address.sink_id, error)
            return None

    async def _stay_connected(self, connection: SinkConnection) -> None:
        """Return when the connection is gone; ping while nothing else is written."""
        connected_at = self._loop.time()
        try:
            while not connection.lost.done():
                await asyncio.wait((connection.lost,), timeout=PING_INTERVAL_S)
                now = self._loop.time()
                if connection.is_ready:
                    if now - self._written_at >= PING_INTERVAL_S:
                        self.write(pack_frame(FrameKind.PING))
                elif now - connected_at > CONNECT_TIMEOUT_S:
                    connection.abort()  # accepted, but no handshake
        finally:
            connection.abort()
