"""The device thread: hands requests in and events out, and says so when it dies."""

import threading
import time

import pytest

from replicas.engine.engine_loop import EngineLoop
from replicas.engine.step_trace import Profiler, StepTrace
from replicas.errors import EngineDead, EngineNotReady, InvalidRequest
from replicas.wire import FinishReason, StepEvents
from tests.fake_runner import make_engine, make_request, naive_tokens


class Collector:
    """Keeps deltas by request and lets a test wait for an ending."""

    def __init__(self):
        self.tokens: dict[str, list[int]] = {}
        self.results = {}
        self.changed = threading.Condition()

    def __call__(self, events: StepEvents) -> None:
        with self.changed:
            for delta in events.deltas:
                self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
                if delta.result is not None:
                    self.results[delta.request_id] = delta.result
            self.changed.notify_all()

    def wait(self, request_id: str):
        with self.changed:
            assert self.changed.wait_for(lambda: request_id in self.results, timeout=10)
            return self.results[request_id]


@pytest.fixture
def started():
    engine, runner = make_engine()
    collector = Collector()
    loop = EngineLoop(engine, collector, max_silence_s=0.3)
    loop.start()
    yield loop, collector, runner
    loop.stop()


def test_requests_from_many_threads_complete(started):
    loop, collector, _ = started
    threads = [
        threading.Thread(target=loop.submit, args=(make_request(str(i), [i + 1, 2, 3], 20),))
        for i in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(20):
        assert collector.wait(str(i)).num_output_tokens == 20
        assert collector.tokens[str(i)] == naive_tokens([i + 1, 2, 3], 20)
    assert loop.load().num_running == 0


def test_abort_ends_the_request(started):
    loop, collector, _ = started
    loop.submit(make_request("a", [1, 2], max_tokens=450))
    loop.abort("a")
    assert collector.wait("a").finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)


def test_impossible_request_and_duplicate_id_are_refused_at_once(started):
    loop, collector, runner = started
    with pytest.raises(InvalidRequest, match="empty"):
        loop.submit(make_request("a", []))
    gate = threading.Event()
    launch = runner.launch
    runner.launch = lambda plan: (gate.wait(10), launch(plan))[1]
    loop.submit(make_request("b", [1]))
    with pytest.raises(InvalidRequest, match="in use"):
        loop.submit(make_request("b", [1]))
    gate.set()
    collector.wait("b")
    loop.submit(make_request("b", [1]))


def test_a_failing_device_is_reported(started):
    loop, _, runner = started

    def fail(plan):
        raise RuntimeError("device lost")

    runner.launch = fail
    loop.submit(make_request("a", [1]))
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            loop.check_health()
        except EngineDead:
            break
        time.sleep(0.01)
    with pytest.raises(EngineDead, match="device lost"):
        loop.check_health()
    with pytest.raises(EngineDead):
        loop.submit(make_request("b", [1]))


def test_a_hung_device_is_reported(started):
    loop, _, runner = started
    gate = threading.Event()
    launch = runner.launch
    runner.launch = lambda plan: (gate.wait(10), launch(plan))[1]
    loop.check_health()
    loop.submit(make_request("a", [1]))
    time.sleep(0.5)
    with pytest.raises(EngineDead, match="silent"):
        loop.check_health()
    gate.set()


def test_time_in_which_the_whole_process_was_stopped_is_no_silence():
    engine, runner = make_engine()
    now = [0.0]
    loop = EngineLoop(engine, Collector(), max_silence_s=15.0, clock=lambda: now[0])
    entered, gate = threading.Event(), threading.Event()
    launch = runner.launch
    runner.launch = lambda plan: (entered.set(), gate.wait(30), launch(plan))[2]
    loop.start()
    loop.submit(make_request("a", [1]))
    assert entered.wait(10)
    loop.check_health()  # sees the last sign of life
    now[0] += 600  # SIGSTOP, a paused machine
    loop.check_health()
    for _ in range(12):
        now[0] += 1
        loop.check_health()
    now[0] += 3
    with pytest.raises(EngineDead, match="silent"):
        loop.check_health()
    began = time.monotonic()
    loop.stop()  # a thread that hangs is not waited for
    assert time.monotonic() - began < 5
    gate.set()


class FakeProfiler:
    def __init__(self):
        self.events = []

    def start(self, directory):
        self.events.append(("start", directory))

    def stop(self):
        self.events.append(("stop",))


def traced_loop(start=None):
    engine, _ = make_engine()
    fake = FakeProfiler()
    collector = Collector()
    loop = EngineLoop(engine, collector, profiler=Profiler(start or fake.start, fake.stop))
    loop.start()
    return loop, collector, fake


def test_a_trace_holds_as_many_steps_as_it_was_asked_for(tmp_path):
    loop, collector, fake = traced_loop()
    trace = StepTrace(directory=tmp_path / "t", num_steps=5, max_s=60)
    loop.trace_steps(trace)
    second = StepTrace(directory=tmp_path / "u", num_steps=5, max_s=60)
    loop.trace_steps(second)
    with pytest.raises(RuntimeError, match="another trace"):
        second.done.result(timeout=10)
    loop.submit(make_request("a", [1, 2], 20))
    assert trace.done.result(timeout=10) == 5
    collector.wait("a")
    assert fake.events == [("start", str(tmp_path / "t")), ("stop",)]
    loop.stop()


def test_a_trace_of_an_idle_engine_ends_by_its_time_or_with_the_loop(tmp_path):
    loop, _, fake = traced_loop()
    trace = StepTrace(directory=tmp_path, num_steps=5, max_s=0.1)
    loop.trace_steps(trace)
    assert trace.done.result(timeout=10) == 0
    given_up = StepTrace(directory=tmp_path, num_steps=5, max_s=60)
    given_up.done.cancel()
    loop.trace_steps(given_up)
    trace = StepTrace(directory=tmp_path, num_steps=5, max_s=60)
    loop.trace_steps(trace)
    loop.stop()
    assert not trace.done.cancel()
    assert trace.done.result(timeout=10) == 0
    assert fake.events[-1] == ("stop",)


def test_a_profiler_that_fails_harms_nothing(started, tmp_path):
    def fail(directory):
        raise OSError("disk full")

    loop, collector, _ = traced_loop(fail)
    trace = StepTrace(directory=tmp_path, num_steps=5, max_s=60)
    loop.trace_steps(trace)
    with pytest.raises(RuntimeError, match="does not start: disk full"):
        trace.done.result(timeout=10)
    loop.submit(make_request("a", [1, 2], 20))
    collector.wait("a")
    loop.stop()
    without, _, _ = started
    trace = StepTrace(directory=tmp_path, num_steps=5, max_s=60)
    without.trace_steps(trace)
    with pytest.raises(RuntimeError, match="no profiler"):
        trace.done.result(timeout=10)


def test_a_stopped_loop_refuses_requests(started):
    loop, _, _ = started
    loop.stop()
    with pytest.raises(EngineNotReady):
        loop.submit(make_request("a", [1]))
