"""`bench.serve` against a small real server on loopback that speaks the protocol."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from bench import processes, report, serve
from bench.client import LoadClient, check_address
from bench.workloads import Shape, fixed

STEP_S = 0.002


class FakeServer:
    """Streams `max_tokens` events, a few ms apart, one request's step shared by none.

    Attributes:
        url: base URL.
        bodies: request bodies in order of arrival.
        most_in_flight: largest number of requests at one time.
        quorum: no request is answered before so many were in flight together.
    """

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.most_in_flight = 0
        self.quorum = 1
        self._in_flight = 0
        self._has_quorum = asyncio.Event()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization"))
        if body["model"] != "toy":
            error = {"message": "no such model", "code": "model_not_found"}
            return web.json_response({"error": error}, status=404)
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        if self.most_in_flight >= self.quorum:
            self._has_quorum.set()
        try:
            await self._has_quorum.wait()
            return await self._stream(request, body)
        finally:
            self._in_flight -= 1

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": keep-alive\n\n")
        num_tokens = body["max_tokens"]
        for i in range(num_tokens):
            await asyncio.sleep(STEP_S)
            reason = "length" if i == num_tokens - 1 else None
            choice = {"index": 0, "text": " x", "finish_reason": reason}
            event = b"data: " + json.dumps({"choices": [choice], "usage": None}).encode() + b"\n\n"
            # An event may be torn anywhere.
            await response.write(event[:20])
            await response.write(event[20:])
        usage = {
            "prompt_tokens": len(body["prompt"]),
            "completion_tokens": num_tokens,
            "prompt_tokens_details": {"cached_tokens": 3},
        }
        await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


@asynccontextmanager
async def fake_server() -> AsyncGenerator[FakeServer]:
    server = FakeServer()

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "toy"}, {"id": "other"}]})

    async def version(_: web.Request) -> web.Response:
        return web.json_response({"version": "0"})

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text='# HELP x\nsystole_compiles_after_warmup{replica="a"} 0.0\n')

    app = web.Application()
    app.router.add_post("/v1/completions", server.complete)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/version", version)
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}"
    try:
        yield server
    finally:
        await runner.cleanup()


def arguments(url: str, *more: str) -> Any:
    return serve.parse_arguments(
        [url, "--model", "toy", "--max-seconds", "20", "--idle-s", "0", *more]
    )


async def test_every_mode_measures_and_the_report_round_trips(tmp_path: Path) -> None:
    async with fake_server() as server:
        result = await serve.run(
            arguments(
                server.url,
                *("--mode", "sweep,poisson,trace,burst,staggered,beside"),
                *("--concurrency", "1,2,4", "--requests-per-stream", "1", "--min-requests", "4"),
                *("--prompt-tokens", "16", "--max-tokens", "5", "--requests", "4"),
                *("--rate", "200", "--speed", "1000", "--length-scale", "0.02"),
                *("--burst", "12", "--streams", "6", "--stagger-s", "0.1"),
                *("--beside-streams", "3", "--beside-max-tokens", "60", "--long-prompt", "300"),
            )
        )
    report.write_json(tmp_path / "report.json", result)
    assert json.loads((tmp_path / "report.json").read_text())["kind"] == "bench.serve"
    assert [run["mode"] for run in result["runs"]] == [
        *("sweep", "sweep", "sweep", "poisson", "trace", "burst", "staggered", "beside")
    ]
    for run in result["runs"]:
        summary = run["summary"]
        assert summary["num_failed"] == 0, summary["errors"]
        assert summary["ttft_ms"]["p50"] >= STEP_S * 1e3
        assert summary["output_tokens"] == sum(r["num_output_tokens"] for r in run["requests"])
    assert result["knee"] in (1, 2, 4)
    assert result["server"]["version"] == {"version": "0"}
    assert result["server"]["compiles_after_warmup"] == 0.0
    beside = result["runs"][-1]
    assert beside["intruder"]["num_prompt_tokens"] == 300
    assert beside["stall"]["largest_itl_steps"] > 0
    assert beside["streams_running_at_first_token"] == 3
    report.plot_sweep(tmp_path / "sweep.png", result["runs"][:3], result["knee"])
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert "tok/s" in report.format_table([serve.table_row(run) for run in result["runs"]])


async def test_closed_loop_keeps_exactly_that_many_in_flight() -> None:
    async with fake_server() as server, LoadClient(server.url, "toy") as client:
        server.quorum = 3
        specs = fixed(9, Shape(prompt_tokens=4, max_tokens=10))
        records = await client.run_closed(specs, concurrency=3, limit_s=10)
    assert server.most_in_flight == 3
    assert [r.num_output_tokens for r in records] == [10] * 9


async def test_a_burst_is_in_flight_all_at_once_and_tokens_are_counted_once() -> None:
    async with fake_server() as server, LoadClient(server.url, "toy") as client:
        server.quorum = 40
        specs = fixed(40, Shape(prompt_tokens=4, max_tokens=8))
        records = await client.run_open(specs, limit_s=60)
    assert server.most_in_flight == 40
    assert all(len(r.event_times_s) == r.num_output_tokens == 8 for r in records)
    assert all(r.num_cached_tokens == 3 for r in records)


async def test_requests_are_greedy_streams_that_ignore_eos() -> None:
    async with fake_server() as server, LoadClient(server.url, "toy", api_key="k") as client:
        (spec,) = fixed(1, Shape(prompt_tokens=7, max_tokens=2))
        await client.run_open([spec], limit_s=10)
    (body,) = server.bodies
    assert body["prompt"] == list(spec.prompt_token_ids)
    assert body["temperature"] == 0
    assert body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert server.keys == ["Bearer k"]


async def test_without_a_name_the_first_listed_model_is_asked_for() -> None:
    async with fake_server() as server:
        result = await serve.run(
            serve.parse_arguments(
                [server.url, "--concurrency", "1", "--max-tokens", "2", "--idle-s", "0.1"]
            )
        )
    assert result["model"] == "toy"
    assert {body["model"] for body in server.bodies} == {"toy"}


async def test_a_run_ends_at_its_limit_and_says_so() -> None:
    async with fake_server() as server, LoadClient(server.url, "toy") as client:
        specs = fixed(2, Shape(prompt_tokens=4, max_tokens=10_000))
        records = await client.run_closed(specs, concurrency=1, limit_s=0.2)
    assert all("limit of 0.2 s" in (r.error or "") for r in records)


async def test_a_refused_request_is_a_failed_record_and_ends_the_bench() -> None:
    async with fake_server() as server:
        async with LoadClient(server.url, "other") as client:
            (record,) = await client.run_open(fixed(1, Shape()), limit_s=10)
        assert (record.error or "").startswith("404")
        wrong = arguments(server.url)
        wrong.model = "other"
        with pytest.raises(SystemExit, match="404"):
            await serve.run(wrong)


async def test_nobody_listening_is_a_failed_record() -> None:
    async with LoadClient("http://127.0.0.1:9", "toy") as client:
        (record,) = await client.run_open(fixed(1, Shape()), limit_s=10)
    assert record.error is not None
    assert not record.is_ok


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8000/", "http://localhost:8000/v1", "http://[::1]:8000"]
)
def test_loopback_is_allowed(url: str) -> None:
    assert not check_address(url, allow_remote=False).endswith(("/", "/v1"))


@pytest.mark.parametrize("url", ["http://10.0.0.1:8000", "http://example.com", "http://0.0.0.0:1"])
def test_other_machines_need_permission(url: str) -> None:
    with pytest.raises(ValueError, match="allow-remote"):
        check_address(url, allow_remote=False)
    assert check_address(url, allow_remote=True) == url


def test_not_a_url_is_refused() -> None:
    with pytest.raises(ValueError, match="http"):
        check_address("127.0.0.1:8000", allow_remote=True)


@pytest.mark.parametrize(
    ("title", "group"),
    [
        ("ray::ServeReplica:default:Engine", "replica:Engine"),
        ("ray::ServeReplica:my-app:Ingress.handle_request", "replica:Ingress"),
        ("ray::ServeController.listen_for_change", "actor:ServeController"),
        ("ray::ProxyActor", "actor:ProxyActor"),
        ("/opt/x/haproxy -f /a/b.cfg", "haproxy"),
        ("/usr/lib/ray/raylet --raylet_socket_name=/a", "raylet"),
        ("/usr/bin/python3.12 -u /a/dashboard.py --host=127.0.0.1", "python3.12:dashboard.py"),
        ("", "unknown"),
    ],
)
def test_processes_are_grouped_by_their_title(title: str, group: str) -> None:
    assert processes.group_of(title) == group


def test_the_server_is_found_by_its_port_and_its_cpu_time_is_seen() -> None:
    burn = (
        "import socket, time\n"
        "s = socket.create_server(('127.0.0.1', 0))\n"
        "print(s.getsockname()[1], flush=True)\n"
        "end = time.process_time() + 0.3\n"
        "input()\n"
        "while time.process_time() < end: pass\n"
        "print('done', flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        found = processes.find_server(int(child.stdout.readline()))
        assert [process.pid for process in found] == [child.pid]
        meter = processes.CpuMeter(found)
        meter.start()
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "done\n"
        cpu = meter.stop()
        threads = processes.thread_cpu_s(child.pid)
        child.communicate("\n", timeout=10)
    assert 0.15 < cpu[found[0].group] < 2
    assert threads["main"] > 0.15
    assert processes.cpu_s(child.pid) is None


def test_a_port_that_nobody_holds_has_no_server() -> None:
    assert processes.find_server(1) == []


def test_this_process_is_never_counted_as_the_server() -> None:
    assert os.getpid() not in {p.pid for p in processes.match_processes("python|pytest")}


def test_cpu_outside_the_engine_leaves_out_engine_and_client() -> None:
    cpu = {"client": 9.0, "replica:Engine": 5.0, "replica:Ingress": 0.2, "haproxy": 0.1}
    outside = processes.outside_engine_us_per_token(cpu, 1000, engine="replica:Engine")
    assert outside == pytest.approx(300)
    above_idle = processes.outside_engine_us_per_token(
        cpu,
        1000,
        engine="replica:Engine",
        idle_share={"haproxy": 0.01, "replica:Ingress": 0.5, "replica:Engine": 1.0},
        wall_s=2.0,
    )
    assert above_idle == pytest.approx(80)  # 0.1 - 2 x 0.01 of haproxy; the ingress was only idle
    assert processes.outside_engine_us_per_token({"client": 1.0}, 1000, engine="x") is None
    assert processes.outside_engine_us_per_token(cpu, 0, engine="replica:Engine") is None


def test_the_client_counts_its_own_cpu() -> None:
    meter = processes.CpuMeter([])
    meter.start()
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    assert meter.stop()["client"] == pytest.approx(0.1, abs=0.08)


def test_a_stamp_names_versions_but_neither_host_nor_path() -> None:
    stamp = report.stamp()
    assert stamp["packages"]["ray"]
    assert stamp["num_cpus"] >= 1
    text = json.dumps(stamp)
    assert os.uname().nodename not in text
    assert str(report.ROOT) not in text


class RawServer:
    """Answers each request with given bytes, or closes the connection instead.

    Attributes:
        url: base URL.
        num_connections: opened so far.
    """

    def __init__(self, *answers: bytes) -> None:
        self.url = ""
        self.num_connections = 0
        self._answers = list(answers)
        self._writers: list[asyncio.StreamWriter] = []

    async def drop_connections(self) -> None:
        """Close all, as a server does with those that nobody has used for a while."""
        for writer in self._writers:
            writer.close()
            await writer.wait_closed()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._writers.append(writer)
        while self._answers and await reader.readline():
            length = 0
            while (line := await reader.readline()) not in (b"\r\n", b""):
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            await reader.readexactly(length)
            answer = self._answers.pop(0)
            writer.write(answer)
            if not answer or b"Connection: close" in answer:
                break
        writer.close()


@asynccontextmanager
async def raw_server(*answers: bytes) -> AsyncGenerator[RawServer]:
    server = RawServer(*answers)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with listener:
        yield server


def chunked(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"


TOKENS = b'data: {"choices": [{"text": "x", "finish_reason": null}]}\n\n' * 3
WHOLE = TOKENS + b"data: [DONE]\n\n"


async def ask_raw(*answers: bytes, count: int = 1) -> tuple[list[Any], RawServer]:
    async with raw_server(*answers) as server, LoadClient(server.url, "toy") as client:
        specs = fixed(count, Shape(prompt_tokens=4, max_tokens=3))
        return await client.run_closed(specs, concurrency=1, limit_s=10), server


async def test_a_connection_is_used_again_and_one_closed_meanwhile_is_replaced() -> None:
    records, server = await ask_raw(chunked(WHOLE), chunked(WHOLE), b"", chunked(WHOLE), count=3)
    assert [record.num_output_tokens for record in records] == [3, 3, 3]
    assert all(record.is_ok for record in records)
    assert server.num_connections == 2


async def test_a_connection_that_the_server_closed_while_it_was_idle_is_not_waited_for() -> None:
    answers = [chunked(WHOLE)] * 3
    async with raw_server(*answers) as server, LoadClient(server.url, "toy") as client:
        specs = fixed(1, Shape(prompt_tokens=4, max_tokens=3))
        await client.run_closed(specs, concurrency=1, limit_s=10)
        await server.drop_connections()
        await asyncio.sleep(0.1)  # the client sees the end
        (record,) = await client.run_closed(specs, concurrency=1, limit_s=10)
    assert record.is_ok
    assert server.num_connections == 2


async def test_a_body_may_end_with_the_connection() -> None:
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
    (record,), _ = await ask_raw(head + WHOLE)
    assert record.is_ok
    assert record.num_output_tokens == 3


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", "the connection was closed"),
        (chunked(WHOLE)[:-40] + b"Connection: close", "closed"),
        (chunked(TOKENS), "stream ended without"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\nConnection: close\r\n\r\n" + WHOLE, "closed"),
        (b"no HTTP at all, Connection: close\r\n\r\n", "Error"),
        (chunked(b"data: {torn\n\n"), "JSONDecodeError"),
        (b"HTTP/1.1 503 No\r\nContent-Length: 4\r\n\r\nbusy", "503: busy"),
    ],
)
async def test_what_is_no_whole_stream_is_a_failed_record(answer: bytes, error: str) -> None:
    (record,), _ = await ask_raw(answer)
    assert error in record.error
    assert not record.is_ok
