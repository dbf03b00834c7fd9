"""What a replica tells the routers: its load, whenever it changes, over links they asked for.

With it goes what became of the pages of its prefix cache.

A subscription is a lease: a router renews it every second through Serve, which reaches only the
replicas that Serve routes to. A replica that Serve is draining therefore lets its leases lapse and
closes the links, and the routers stop sending to it. Each connection begins with a report; its
events carry consecutive sequence numbers after the report's. A router that finds a gap drops the
connection, and the link that is re-established begins with a report again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from replicas.frames import FrameError, pack_event, pack_report
from replicas.sink_link import SinkLink
from replicas.wire import CacheChange, ModelInfo, ReplicaLoad, ReplicaReport, SinkAddress

LEASE_S = 3.0
MIN_INTERVAL_S = 0.02
PROGRESS_INTERVAL_S = 0.1
"""For what a router expects to happen: prompts are computed, pages taken."""
MAX_INTERVAL_S = 1.0
PAGE_NEWS_DIVISOR = 64
"""A change of more than one page in so many is sent soon; less waits for the next event."""
MAX_BUFFERED_BYTES = 8 << 20
"""Room for a report of every cached page, and the events after it."""
NO_CHANGE = CacheChange()
MAX_PENDING_KEYS = 1 << 14
"""Changed pages that wait for the next event; with more it is sent at once."""


class _Subscriber:
    __slots__ = ("expires_at", "link")

    def __init__(self) -> None:
        self.expires_at = 0.0
        self.link: SinkLink


class LoadEvents:
    """Pushes one replica's load to its subscribers: at most every 20 ms, at least every second.

    What goes on as expected is told every 0.1 s: each event costs a router 0.4 ms.
    """

    def __init__(
        self,
        replica_id: str,
        model_info: ModelInfo,
        read_load: Callable[[], ReplicaLoad],
        *,
        lease_s: float = LEASE_S,
    ) -> None:
        """Nothing starts until the first subscription.

        Args:
            replica_id: who reports.
            model_info: what it serves.
            read_load: returns the load now; cheap and thread-safe.
            lease_s: seconds that a subscription lasts without renewal.
        """
        self._replica_id = replica_id
        self._model_info = model_info
        self._read_load = read_load
        self._lease_s = lease_s
        self._sequence = 0
        self._sent_load = ReplicaLoad()
        self._cached: dict[bytes, None] = {}
        self._changed: dict[bytes, bool] = {}
        self._sent_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._due_at = 0.0
        self._subscribers: dict[str, _Subscriber] = {}

    @property
    def num_subscribers(self) -> int:
        """Routers that listen."""
        return len(self._subscribers)

    def subscribe(self, address: SinkAddress) -> None:
        """Begin or renew a router's lease; idempotent. The report comes over the link."""
        loop = asyncio.get_running_loop()
        subscriber = self._subscribers.get(address.sink_id)
        if subscriber is None:
            subscriber = self._add_subscriber(address)
        subscriber.expires_at = loop.time() + self._lease_s
        if self._timer is None:
            self._sent_load, self._sent_at = self._read_load(), loop.time()
            self._changed.clear()  # the report will say it
            self._arm(MAX_INTERVAL_S)

    def on_step(self, load: ReplicaLoad, cache: CacheChange = NO_CHANGE) -> None:
        """Note that the load may have changed; send it now, or as soon as the last is old enough.

        A page that was stored or dropped goes with the next event, but is no news by itself.
        """
        self._note(cache)
        interval_s = _least_interval_s(self._sent_load, load)
        if len(self._changed) > MAX_PENDING_KEYS:
            interval_s = MIN_INTERVAL_S
        if self._timer is None or interval_s is None:
            return
        loop = asyncio.get_running_loop()
        due_at = self._sent_at + interval_s
        if loop.time() >= due_at:
            self._flush()
        elif self._due_at > due_at:
            self._arm(due_at - loop.time())

    def shutdown(self) -> None:
        """Close every link: the routers stop sending."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for subscriber in self._subscribers.values():
            subscriber.link.close()
        self._subscribers.clear()

    def _arm(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._due_at = loop.time() + delay_s
        self._timer = loop.call_later(delay_s, self._flush)

    def _flush(self) -> None:
        """Send one event to every subscriber whose lease holds."""
        now = asyncio.get_running_loop().time()
        self._sent_load, self._sent_at = self._read_load(), now
        self._sequence += 1
        stored = tuple(key for key, is_held in self._changed.items() if is_held)
        dropped = tuple(key for key, is_held in self._changed.items() if not is_held)
        self._changed.clear()
        frame = pack_event(self._sequence, self._sent_load, CacheChange(stored, dropped))
        for sink_id, subscriber in tuple(self._subscribers.items()):
            if now > subscriber.expires_at:
                del self._subscribers[sink_id]
                subscriber.link.close()
            elif subscriber.link.is_ready and not subscriber.link.write(frame):
                subscriber.link.reset()  # too far behind: it will find the gap and ask again
        if self._subscribers:
            self._arm(MAX_INTERVAL_S)
        else:
            assert self._timer is not None
            self._timer.cancel()
            self._timer = None

    def _note(self, cache: CacheChange) -> None:
        for key in cache.stored:
            self._cached[key] = None
        for key in cache.dropped:
            self._cached.pop(key, None)
        if self._timer is not None:
            self._changed.update(dict.fromkeys(cache.stored, True))
            self._changed.update(dict.fromkeys(cache.dropped, False))

    def _add_subscriber(self, address: SinkAddress) -> _Subscriber:
        subscriber = _Subscriber()

        def refuse(frame: list[Any]) -> None:
            raise FrameError(f"a router's event sink sends no frame of kind {frame[0]}")

        subscriber.link = SinkLink(
            address,
            self._replica_id,
            on_welcome=lambda _: self._report(subscriber.link),
            on_frame=refuse,
            on_closed=lambda _: self._drop(address.sink_id, subscriber),
            is_wanted=lambda: True,
            max_buffered_bytes=MAX_BUFFERED_BYTES,
            retry_for_s=self._lease_s,
        )
        self._subscribers[address.sink_id] = subscriber
        return subscriber

    def _report(self, link: SinkLink) -> None:
        report = ReplicaReport(
            replica_id=self._replica_id,
            sequence=self._sequence,
            load=self._read_load(),
            model_info=self._model_info,
            cached_pages=tuple(self._cached),
        )
        link.write(pack_report(report))

    def _drop(self, sink_id: str, subscriber: _Subscriber) -> None:
        if self._subscribers.get(sink_id) is subscriber:
            del self._subscribers[sink_id]


def _least_interval_s(sent: ReplicaLoad, load: ReplicaLoad) -> float | None:
    """How long the last event suffices; None: as long as nothing else happens.

    Decoding takes a page in most steps; a router that knows the requests counts on that.
    """
    if (
        sent.num_running != load.num_running
        or sent.num_waiting != load.num_waiting
        or sent.num_pending_prefill_tokens < load.num_pending_prefill_tokens
    ):
        return MIN_INTERVAL_S
    if (
        abs(sent.num_free_pages - load.num_free_pages) > load.num_pages // PAGE_NEWS_DIVISOR
        or sent.num_pending_prefill_tokens != load.num_pending_prefill_tokens
    ):
        return PROGRESS_INTERVAL_S
    return None
