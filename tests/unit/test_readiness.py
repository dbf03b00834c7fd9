"""What the launcher learns about a start over HTTP, and how it shows it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from app.launch import StatusLine, describe
from app.readiness import Progress, StartFailed, read_progress

UNREACHABLE = "http://127.0.0.1:9"


class Server:
    """A small HTTP server that answers paths from a table and remembers the headers it got."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.tokens: list[str | None] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.tokens.append(self.headers.get("Authorization"))
                status, body = outer.answers.get(self.path, (404, b"not found"))
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def answer(self, path: str, body: object, status: int = 200) -> None:
        self.answers[path] = (status, json.dumps(body).encode())


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "auth_token"))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    server = Server()
    thread = threading.Thread(target=server.server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.server.shutdown()
    server.server.server_close()
    thread.join()


def test_nothing_answers_while_ray_starts(server: Server) -> None:
    assert read_progress(UNREACHABLE, UNREACHABLE) == Progress(is_ready=False, stage="")


def test_a_ready_service_is_ready_whatever_the_dashboard_says(server: Server) -> None:
    server.answer("/ready", {"ready": True, "model": "toy"})
    progress = read_progress(server.url, UNREACHABLE)
    assert progress == Progress(is_ready=True, stage="ready", model="toy")


def test_the_stage_of_a_service_that_is_not_ready_is_passed_on(server: Server) -> None:
    server.answer("/ready", {"ready": False, "stage": "compile", "done": 3, "total": 9}, status=503)
    progress = read_progress(server.url, UNREACHABLE)
    assert progress == Progress(is_ready=False, stage="compile", done=3, total=9)


def test_serve_speaks_for_a_service_that_does_not_answer(server: Server, tmp_path: Path) -> None:
    (tmp_path / "auth_token").write_text("secret\n")
    server.answer("/api/serve/applications/", {"applications": {"llm": {"status": "DEPLOYING"}}})
    assert read_progress(UNREACHABLE, server.url).stage == "starting replicas"
    assert server.tokens == ["Bearer secret"]


def test_a_page_that_is_no_json_is_no_answer(server: Server) -> None:
    server.answers["/ready"] = (503, b"<html>Service Unavailable</html>")
    assert read_progress(server.url, UNREACHABLE).stage == ""


def test_a_port_that_sends_the_request_back_is_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def send_back() -> None:
            for _ in range(2):  # the service's /ready, then the dashboard
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(connection.recv(1 << 16))

        thread = threading.Thread(target=send_back)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert read_progress(url, url) == read_progress(UNREACHABLE, UNREACHABLE)
        thread.join()


@pytest.mark.parametrize("service_answers", [True, False])
def test_an_application_that_serve_gave_up_ends_the_start(
    server: Server, service_answers: bool
) -> None:
    if service_answers:
        server.answer("/ready", {"ready": False}, status=503)
    engine = {"status": "UNHEALTHY", "message": "FileNotFoundError: models/none"}
    failed = {"status": "DEPLOY_FAILED", "message": "gave up", "deployments": {"Engine": engine}}
    server.answer("/api/serve/applications/", {"applications": {"llm": failed}})
    with pytest.raises(StartFailed, match=r"'llm':\ngave up\nFileNotFoundError: models/none$"):
        read_progress(server.url, server.url)


def test_progress_is_shown_in_words() -> None:
    assert describe(Progress(is_ready=False, stage="starting Ray")) == "Starting Ray ..."
    half = Progress(is_ready=False, stage="programs", done=2, total=4)
    assert describe(half) == "Programs [##########----------] 2/4"
    whole = Progress(is_ready=False, stage="weights", done=269030016, total=269030016)
    assert describe(whole) == "Weights [####################] 269/269 MB"


def test_a_line_is_printed_per_stage_and_silence_does_not_set_it_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = StatusLine()
    for stage in ("", "", "starting replicas", "", "programs", "programs"):
        line.show(Progress(is_ready=False, stage=stage), elapsed_s=2.0)
    assert capsys.readouterr().out.splitlines() == [
        "Starting Ray ... (2 s)",
        "Starting replicas ... (2 s)",
        "Programs ... (2 s)",
    ]
