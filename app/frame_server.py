"""The listening end of the data plane: accepts replicas, authenticates them, hands their frames on.

Knows neither tokens nor load; a `FrameReceiver` does. Invariant: a receiver hears only from peers
that proved to hold this boot's key: for each peer `connected`, then frames, then `disconnected`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
from typing import Any, Protocol, cast, override

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

HANDSHAKE_TIMEOUT_S = 5.0
SILENCE_LIMIT_S = 10.0
"""A live replica pings every second; after this long without a byte its connection is dead."""
MAX_UNAUTHENTICATED = 64
PortRange = tuple[int, int]
"""First and last."""


class FrameReceiver(Protocol):
    """What a `FrameServer` delivers to. Called on the event loop; must not block."""

    def connected(self, peer: ReplicaPeer) -> dict[str, int]:
        """Greet a replica; return the next output index of each request that it may be running."""
        ...

    def received(self, peer: ReplicaPeer, frame: list[Any]) -> None:
        """Take one frame; raise `FrameError` to have the connection closed."""
        ...

    def disconnected(self, peer: ReplicaPeer) -> None:
        """Learn that no more frames come from this connection."""
        ...


class ReplicaPeer(asyncio.Protocol):
    """One accepted connection.

    Attributes:
        replica_id: who it is; empty until authenticated.
    """

    def __init__(self, server: FrameServer) -> None:
        self.replica_id = ""
        self._server = server
        self._buffer = FrameBuffer(MAX_HANDSHAKE_FRAME_BYTES)
        self._nonce = make_nonce()
        self._loop = asyncio.get_running_loop()
        self._received_at = self._loop.time()
        self._transport: asyncio.Transport | None = None

    @property
    def is_authenticated(self) -> bool:
        """Whether the peer has proved that it holds the key."""
        return bool(self.replica_id)

    def send(self, frame: bytes) -> None:
        """Write a frame; dropped when the connection is gone."""
        if self._transport is not None:
            self._transport.write(frame)

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def silence_s(self) -> float:
        """Return the seconds since the last byte."""
        return self._loop.time() - self._received_at

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Serve runs uvloop, whose transports do not inherit asyncio's. Both set TCP_NODELAY.
        tcp_transport = cast(asyncio.Transport, transport)
        if not self._server.admit(self):
            tcp_transport.abort()
            return
        self._transport = tcp_transport
        self.send(pack_frame(FrameKind.CHALLENGE, PROTOCOL_VERSION, self._nonce))

    @override
    def data_received(self, data: bytes) -> None:
        self._received_at = self._loop.time()
        try:
            for frame in self._buffer.feed(data):
                if self.is_authenticated:
                    if frame[0] != FrameKind.PING:
                        self._server.receiver.received(self, frame)
                else:
                    self._authenticate(frame)
        except FrameError as error:
            logger.warning(
                "closing the connection of %s: %s", self.replica_id or "a stranger", error
            )
            self.abort()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._server.forget(self)
        if self.is_authenticated:
            self._server.receiver.disconnected(self)

    def _authenticate(self, frame: list[Any]) -> None:
        address = self._server.address
        try:
            kind, sink_id, replica_id, replica_nonce, mac = frame
        except ValueError:
            raise FrameError("the first frame is not HELLO") from None
        if (
            kind != FrameKind.HELLO
            or sink_id != address.sink_id
            or not isinstance(replica_id, str)
            or not replica_id
            or not isinstance(replica_nonce, bytes)
            or len(replica_nonce) != NONCE_BYTES
        ):
            raise FrameError("malformed HELLO, or one for another sink")

        def mac_of(role: str) -> bytes:
            return handshake_mac(
                address.key,
                role,
                sink_id=sink_id,
                replica_id=replica_id,
                sink_nonce=self._nonce,
                replica_nonce=replica_nonce,
            )

        if not verify_mac(mac_of("replica"), mac):
            raise FrameError("wrong key")
        self.replica_id = replica_id
        self._buffer.max_frame_bytes = MAX_FRAME_BYTES
        next_indices = self._server.receiver.connected(self)
        self.send(pack_frame(FrameKind.WELCOME, mac_of("sink"), next_indices))


class FrameServer:
    """An authenticated listener on one free port of the node.

    Attributes:
        receiver: where the frames go.
    """

    def __init__(
        self, receiver: FrameReceiver, *, host: str, ports: PortRange | None = None
    ) -> None:
        """Nothing listens before `start`.

        Args:
            receiver: where the frames go.
            host: address of this node that replicas can reach.
            ports: first and last of those that may be bound; None: any free one.
        """
        self.receiver = receiver
        self._host = host
        self._ports = ports
        self._address: SinkAddress | None = None
        self._server: asyncio.Server | None = None
        self._reaper: asyncio.Task[None] | None = None
        self._peers: set[ReplicaPeer] = set()

    @property
    def address(self) -> SinkAddress:
        """Where replicas connect; valid after `start`."""
        assert self._address is not None, "the server has not started"
        return self._address

    async def start(self) -> None:
        """Bind a free port and draw this boot's id and key.

        Raises:
            OSError: the host is not an address of this node, or no port of the range is free.
        """
        self._server = await self._listen()
        self._address = SinkAddress(
            host=self._host,
            port=self._server.sockets[0].getsockname()[1],
            sink_id=secrets.token_hex(8),
            key=secrets.token_bytes(32),
        )
        self._reaper = asyncio.create_task(self._reap())

    async def _listen(self) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        first, last = self._ports or (0, 0)
        for port in range(first, last + 1):
            try:
                return await loop.create_server(lambda: ReplicaPeer(self), self._host, port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
        raise OSError(
            errno.EADDRINUSE,
            f"no port of sink_ports {first}-{last} is free on {self._host}; give a wider range",
        )

    async def close(self) -> None:
        """Stop listening and drop every connection."""
        if self._reaper is not None:
            self._reaper.cancel()
        if self._server is not None:
            self._server.close()
        for peer in tuple(self._peers):
            peer.abort()
        await asyncio.sleep(0)  # lets the transports report that they are gone

    def admit(self, peer: ReplicaPeer) -> bool:
        """Register a new connection, or refuse it when too many strangers are connected."""
        if sum(not other.is_authenticated for other in self._peers) >= MAX_UNAUTHENTICATED:
            return False
        self._peers.add(peer)
        return True

    def forget(self, peer: ReplicaPeer) -> None:
        """Unregister a connection that is gone."""
        self._peers.discard(peer)

    async def _reap(self) -> None:
        """Close what is silent for too long: half-open links, strangers who never say HELLO."""
        while True:
            await asyncio.sleep(1.0)
            for peer in tuple(self._peers):
                limit_s = SILENCE_LIMIT_S if peer.is_authenticated else HANDSHAKE_TIMEOUT_S
                if peer.silence_s() > limit_s:
                    peer.abort()
