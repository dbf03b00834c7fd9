"""`bench.peers` with two tiny real servers: it alternates, compares, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench import peers
from bench.server_process import ServerCommand, ServerFailed, running

SERVER = Path(__file__).parents[1] / "tiny_server.py"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def command(port: int, step_s: float, journal: Path, mode: str = "") -> str:
    return f"{sys.executable} {SERVER} {port} {step_s} {journal} {mode}"


def read(journal: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in journal.read_text().splitlines()]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def wait_until_gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 10
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(is_alive(pid) for pid in pids)


def test_two_servers_are_measured_in_turn_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal, (ours, peer) = tmp_path / "journal", (free_port(), free_port())
    out = tmp_path / "out.json"
    status = peers.main(
        [
            *("--ours-command", f"TINY_FLAG=1 {command(ours, 0.001, journal)}"),
            *("--ours-url", f"http://127.0.0.1:{ours}", "--ours-ready", "/v1/models"),
            *("--peer-command", command(peer, 0.02, journal)),
            *("--peer-url", f"http://127.0.0.1:{peer}/v1"),
            *("--rounds", "2", "--concurrency", "1,3", "--requests-per-stream", "1"),
            *("--min-requests", "2", "--prompt-tokens", "8", "--max-tokens", "4"),
            *("--shared-prefix", "0.5", "--out", str(out)),
        ]
    )
    assert status == 0
    events = read(journal)
    lives = [(e["event"], e["port"]) for e in events if e["event"] != "request"]
    assert lives == [(what, p) for p in (ours, peer) * 2 for what in ("started", "stopped")]
    assert [e["flag"] for e in events if e["event"] == "started"] == ["1", None, "1", None]
    pids = [e[key] for e in events if e["event"] == "started" for key in ("pid", "child")]
    assert wait_until_gone(pids), "servers and their children"

    prompts = {
        port: [e["prompt"] for e in events if e["event"] == "request" and e["port"] == port]
        for port in (ours, peer)
    }
    assert sorted(prompts[ours]) == sorted(prompts[peer])
    assert {e["model"] for e in events if e["event"] == "request"} == {
        f"tiny-{ours}",
        f"tiny-{peer}",
    }

    report = json.loads(out.read_text())
    assert [row["concurrency"] for row in report["comparison"]] == [1, 3]
    assert len(report["runs"]) == 2 * 2 * 2
    for row in report["comparison"]:
        assert row["failed"] == {"ours": 0, "peer": 0}
        for figure in ("output_tokens_per_s", "total_tokens_per_s", "ttft_p50_ms"):
            values = row[figure]
            assert values["ratio"] == values["ours"]["median"] / values["peer"]["median"] > 0
    assert out.with_suffix(".png").stat().st_size > 0
    assert "tok/s ratio" in capsys.readouterr().out


def test_another_client_can_drive_the_load(tmp_path: Path) -> None:
    client = tmp_path / "client.py"
    client.write_text(
        "import json, sys\n"
        "print('progress')\n"
        "print(json.dumps({'output_tokens_per_s': int(sys.argv[2]) * 10.0, 'url': sys.argv[1]}))\n"
    )
    journal, (ours, peer) = tmp_path / "journal", (free_port(), free_port())
    common = [
        *("--ours-command", command(ours, 0, journal), "--ours-url", f"http://127.0.0.1:{ours}"),
        *("--ours-ready", "/v1/models", "--peer-command", command(peer, 0, journal)),
        *("--peer-url", f"http://127.0.0.1:{peer}", "--rounds", "1", "--concurrency", "2"),
        *("--no-plot", "--out", str(tmp_path / "out.json")),
    ]
    load = f"{sys.executable} {client} {{url}} {{concurrency}}"
    assert peers.main([*common, "--load-command", load]) == 0
    (row,) = json.loads((tmp_path / "out.json").read_text())["comparison"]
    assert row["output_tokens_per_s"]["ratio"] == 1
    assert "ttft_p50_ms" not in row
    with pytest.raises(SystemExit, match="must end with a JSON object"):
        peers.main([*common, "--load-command", f"{sys.executable} -c print(5)"])
    started = [e for e in read(journal) if e["event"] == "started"]
    assert wait_until_gone([e[key] for e in started for key in ("pid", "child")])


def server(port: int, text: str, **limits: float) -> ServerCommand:
    url = f"http://127.0.0.1:{port}"
    return ServerCommand(name="s", command=text, url=url, ready_url=f"{url}/v1/models", **limits)


def test_a_server_that_ignores_sigterm_is_killed_with_its_children(tmp_path: Path) -> None:
    journal, port = tmp_path / "journal", free_port()
    stubborn = server(port, command(port, 0, journal, "stubborn"), stop_limit_s=0.2)
    with running(stubborn, log=tmp_path / "log", directory=tmp_path):
        (start,) = read(journal)
        assert is_alive(start["child"])
    assert wait_until_gone([start["pid"], start["child"]])


def test_a_server_that_does_not_start_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    journal, port = tmp_path / "journal", free_port()
    broken = server(port, command(port, 0, journal, "broken"))
    with (
        pytest.raises(ServerFailed, match=r"status 1:\nno such model"),
        running(broken, log=tmp_path / "log", directory=tmp_path),
    ):
        pass
    silent = server(port, f"{sys.executable} -c 'import time; time.sleep(60)'", start_limit_s=0.3)
    with (
        pytest.raises(ServerFailed, match=r"not ready .* after 0\.3 s"),
        running(silent, log=tmp_path / "log", directory=tmp_path),
    ):
        pass
    with (
        pytest.raises(ServerFailed, match="does not start"),
        running(server(port, "/nowhere/x"), log=tmp_path / "log", directory=tmp_path),
    ):
        pass


def test_a_port_that_is_taken_is_refused_and_its_owner_left_alone(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        taken = server(listener.getsockname()[1], command(1, 0, tmp_path / "journal"))
        with (
            pytest.raises(ServerFailed, match="listens at"),
            running(taken, log=tmp_path / "log", directory=tmp_path),
        ):
            pass
        assert not (tmp_path / "journal").exists()


@pytest.mark.parametrize("text", ["", "A=1 B=2", "'x"])
def test_a_command_without_a_program_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"program|quotation"):
        server(1, text).parse()


def test_ratios_are_of_medians() -> None:
    def entry(name: str, rate: float, ttft: float | None) -> dict[str, Any]:
        figures = {"output_tokens_per_s": rate, "failed": 1}
        figures |= {} if ttft is None else {"ttft_p50_ms": ttft}
        return {"server": name, "concurrency": 4, "figures": figures}

    runs = [entry("ours", rate, 10) for rate in (100, 90, 500)]
    runs += [entry("peer", rate, None) for rate in (50, 40, 1)]
    (row,) = peers.compare(runs, ("ours", "peer"))
    assert row["output_tokens_per_s"]["ratio"] == 100 / 40
    assert row["output_tokens_per_s"]["ours"] == {"median": 100, "low": 90, "high": 500}
    assert "ttft_p50_ms" not in row, "one of them has none"
    assert row["failed"] == {"ours": 3, "peer": 3}
    cells = peers.table_row(row, ("ours", "peer"))
    assert (cells["tok/s ratio"], cells["ttft ratio"], cells["failed"]) == ("2.50", None, 6)


def test_prompts_of_words_are_sent_as_text() -> None:
    arguments = peers.parse_arguments(["--peer-command", "x", "--text", "--prompt-tokens", "12"])
    first, second = peers.make_specs(arguments, seed=1, count=2)
    assert first.text is not None
    assert len(first.text.split()) == 12
    assert first.text != second.text
    assert peers.make_specs(arguments, seed=1, count=2) == (first, second)


def test_a_bench_that_is_told_to_end_stops_its_server_first(tmp_path: Path) -> None:
    journal, port = tmp_path / "journal", free_port()
    bench = subprocess.Popen(
        [
            *(sys.executable, "-m", "bench.peers", "--peer-command", "unused"),
            *("--ours-command", command(port, 60, journal), "--ours-ready", "/v1/models"),
            *("--ours-url", f"http://127.0.0.1:{port}", "--out", str(tmp_path / "out.json")),
        ],
        cwd=SERVER.parents[1],
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not (journal.exists() and len(read(journal)) > 1) and time.monotonic() < deadline:
        time.sleep(0.05)
    start, *_ = read(journal)
    bench.terminate()
    assert bench.wait(timeout=60) == 128 + signal.SIGTERM
    assert wait_until_gone([start["pid"], start["child"]])
