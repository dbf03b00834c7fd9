"""Where the replicas' load events arrive at a router: decodes frames into events of the core.

Knows no policy. Invariant: of one replica the core hears a report first, then its events in the
order in which they were sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from app.frame_server import FrameServer, PortRange, ReplicaPeer
from app.router.events import LoadChanged, ReplicaReported, ReplicaSuspected
from replicas.frames import FrameError, FrameKind, unpack_event, unpack_report
from replicas.wire import ModelInfo, SinkAddress

LoadEvent = ReplicaReported | LoadChanged | ReplicaSuspected


class EventSink:
    """The listening end of the load events of every replica.

    Attributes:
        model_info: what the replicas serve, as last reported; None before the first report.
    """

    def __init__(
        self,
        on_event: Callable[[LoadEvent], None],
        *,
        host: str,
        ports: PortRange | None = None,
    ) -> None:
        self.model_info: ModelInfo | None = None
        self._on_event = on_event
        self._server = FrameServer(self, host=host, ports=ports)
        self._peers: dict[str, ReplicaPeer] = {}

    @property
    def address(self) -> SinkAddress:
        """Goes into every subscription; valid after `start`."""
        return self._server.address

    async def start(self) -> None:
        """Bind and listen."""
        await self._server.start()

    async def close(self) -> None:
        """Stop listening and drop every connection."""
        await self._server.close()

    def reset(self, replica_id: str) -> None:
        """Drop a replica's connection; a live replica comes back at once with a report."""
        peer = self._peers.pop(replica_id, None)
        if peer is not None:
            peer.abort()

    def connected(self, peer: ReplicaPeer) -> dict[str, int]:
        """Remember the connection; nothing is to be resent."""
        stale = self._peers.get(peer.replica_id)
        self._peers[peer.replica_id] = peer
        if stale is not None:
            stale.abort()
        return {}

    def disconnected(self, peer: ReplicaPeer) -> None:
        """Suspect the replica, unless it has already come back."""
        if self._peers.get(peer.replica_id) is peer:
            del self._peers[peer.replica_id]
            self._on_event(ReplicaSuspected(peer.replica_id))

    def received(self, peer: ReplicaPeer, frame: list[Any]) -> None:
        """Decode a report or a load event."""
        if self._peers.get(peer.replica_id) is not peer:
            return  # what a connection that was reset had still in flight
        match frame:
            case [FrameKind.EVENT, *_]:
                sequence, load, cache = unpack_event(frame)
                self._on_event(LoadChanged(peer.replica_id, sequence, load, cache))
            case [FrameKind.REPORT, *_]:
                report = unpack_report(frame, replica_id=peer.replica_id)
                self.model_info = report.model_info
                self._on_event(
                    ReplicaReported(
                        report.replica_id, report.sequence, report.load, report.cached_pages
                    )
                )
            case _:
                raise FrameError(f"an event sink takes no frame of kind {frame[0]}")
