"""Load events from a replica to a router over real sockets: report, changes, lapse."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable

import pytest

from app.router.event_sink import EventSink, LoadEvent
from app.router.events import LoadChanged, ReplicaReported, ReplicaSuspected
from app.token_sink import TokenSink
from replicas.frames import FrameKind, pack_frame
from replicas.load_events import PROGRESS_INTERVAL_S, LoadEvents
from replicas.wire import CacheChange, ModelInfo, ReplicaLoad
from tests.fakes import TcpProxy

MODEL = ModelInfo(
    model_id="m",
    max_model_len=10,
    max_request_tokens=10,
    vocab_size=5,
    eos_token_ids=(1, 2),
    fingerprint="f",
)


async def until(condition: Callable[[], bool], timeout_s: float = 5) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at
        await asyncio.sleep(0.002)


class Subscription:
    def __init__(self, proxy: TcpProxy, sink: EventSink, heard: list[LoadEvent]) -> None:
        self.proxy = proxy
        self.sink = sink
        self.heard = heard
        self.load = ReplicaLoad(num_slots=4)
        self.events = LoadEvents("replica", MODEL, lambda: self.load, lease_s=0.5)

    def set_running(self, num_running: int) -> None:
        self.load = self.load._replace(num_running=num_running)
        self.events.on_step(self.load)


@pytest.fixture
async def subscription() -> AsyncIterator[Subscription]:
    heard: list[LoadEvent] = []
    sink = EventSink(heard.append, host="127.0.0.1")
    await sink.start()
    proxy = TcpProxy("127.0.0.1", sink.address.port)
    subscription = Subscription(proxy, sink, heard)
    subscription.events.subscribe(dataclasses.replace(sink.address, port=await proxy.start()))
    await until(lambda: len(heard) == 1)
    yield subscription
    subscription.events.shutdown()
    await proxy.close()
    await sink.close()


async def test_a_link_begins_with_a_report(subscription: Subscription) -> None:
    assert subscription.heard == [ReplicaReported("replica", 0, ReplicaLoad(num_slots=4))]
    assert subscription.sink.model_info == MODEL


async def test_changes_follow_numbered_and_thinned(subscription: Subscription) -> None:
    for number in range(1, 101):
        subscription.set_running(number)
        await asyncio.sleep(0.001)
    await until(lambda: subscription.heard[-1].load.num_running == 100)  # type: ignore[union-attr]
    changes = subscription.heard[1:]
    assert all(isinstance(change, LoadChanged) for change in changes)
    sequences = [change.sequence for change in changes]  # type: ignore[union-attr]
    assert sequences == list(range(1, len(changes) + 1))
    assert len(changes) < 50, "at most one in 20 ms"


async def test_no_change_no_event(subscription: Subscription) -> None:
    for _ in range(20):
        subscription.events.on_step(subscription.load)
        await asyncio.sleep(0.005)
    assert len(subscription.heard) == 1


async def test_a_page_for_the_next_token_is_no_news_but_a_share_of_them_is(
    subscription: Subscription,
) -> None:
    def set_free_pages(num_free_pages: int) -> None:
        subscription.load = ReplicaLoad(
            num_slots=4, num_pages=640, num_free_pages=num_free_pages, num_running=1
        )
        subscription.events.on_step(subscription.load)

    set_free_pages(640)
    await until(lambda: len(subscription.heard) == 2)
    await asyncio.sleep(0.05)
    set_free_pages(630)
    await asyncio.sleep(0.12)
    assert len(subscription.heard) == 2
    set_free_pages(629)
    await until(lambda: len(subscription.heard) == 3)
    latest = subscription.heard[-1]
    assert isinstance(latest, LoadChanged)
    assert latest.load.num_free_pages == 629


async def test_a_prompt_that_is_computed_is_told_less_often_than_one_that_arrives(
    subscription: Subscription,
) -> None:
    def set_pending(num_tokens: int) -> None:
        subscription.load = ReplicaLoad(num_slots=4, num_pending_prefill_tokens=num_tokens)
        subscription.events.on_step(subscription.load)

    set_pending(100)
    await until(lambda: len(subscription.heard) == 2)
    begin_s = time.monotonic()
    for number in range(1, 31):
        set_pending(100 - number)
        await asyncio.sleep(0.01)
    duration_s = time.monotonic() - begin_s
    num_told = len(subscription.heard) - 2
    assert 1 <= num_told <= duration_s / PROGRESS_INTERVAL_S
    set_pending(200)
    told_at = time.monotonic()
    await until(lambda: subscription.heard[-1].load == subscription.load)  # type: ignore[union-attr]
    assert time.monotonic() - told_at < PROGRESS_INTERVAL_S


async def test_page_changes_go_with_events_and_a_report_names_every_page(
    subscription: Subscription,
) -> None:
    first, second = b"a" * 16, b"b" * 16
    subscription.load = subscription.load._replace(num_running=1)
    subscription.events.on_step(subscription.load, CacheChange((first, second)))
    await until(lambda: len(subscription.heard) == 2)
    subscription.load = subscription.load._replace(num_running=2)
    subscription.events.on_step(subscription.load, CacheChange(dropped=(first,)))
    await until(lambda: len(subscription.heard) == 3)
    changes = [event.cache for event in subscription.heard[1:]]  # type: ignore[union-attr]
    assert changes == [CacheChange((first, second)), CacheChange(dropped=(first,))]
    subscription.sink.reset("replica")
    await until(lambda: len(subscription.heard) == 4)
    report = subscription.heard[3]
    assert isinstance(report, ReplicaReported)
    assert report.cached_pages == (second,)


async def test_a_reset_link_comes_back_with_a_report(subscription: Subscription) -> None:
    subscription.set_running(3)
    await until(lambda: len(subscription.heard) == 2)
    subscription.sink.reset("replica")
    await until(lambda: len(subscription.heard) == 3)
    assert subscription.heard[2] == ReplicaReported("replica", 1, subscription.load)


async def test_a_lost_link_makes_the_replica_suspect(subscription: Subscription) -> None:
    subscription.proxy.is_open = False
    subscription.proxy.cut()
    await until(lambda: subscription.heard[-1] == ReplicaSuspected("replica"))


async def test_a_lease_that_is_not_renewed_lapses(subscription: Subscription) -> None:
    await until(lambda: subscription.heard[-1] == ReplicaSuspected("replica"))
    assert subscription.events.num_subscribers == 0
    subscription.set_running(1)  # nobody listens; nothing breaks


async def test_a_renewed_lease_holds_on_one_connection(subscription: Subscription) -> None:
    address = subscription.sink.address
    for _ in range(8):
        subscription.events.subscribe(address)
        await asyncio.sleep(0.2)
    assert not [e for e in subscription.heard if isinstance(e, ReplicaSuspected)]
    assert subscription.proxy.num_connections == 1


async def test_tokens_sent_to_an_event_sink_close_the_link(subscription: Subscription) -> None:
    (subscriber,) = subscription.events._subscribers.values()
    subscriber.link.write(pack_frame(FrameKind.TOKENS, []))
    await until(lambda: ReplicaSuspected("replica") in subscription.heard)


async def test_events_sent_to_a_token_sink_close_the_link() -> None:
    sink = TokenSink(host="127.0.0.1")
    await sink.start()
    proxy = TcpProxy("127.0.0.1", sink.address.port)
    events = LoadEvents("replica", MODEL, ReplicaLoad, lease_s=0.5)
    events.subscribe(dataclasses.replace(sink.address, port=await proxy.start()))
    await until(lambda: proxy.num_connections >= 2)  # each report is answered by a reset
    events.shutdown()
    await proxy.close()
    await sink.close()
