"""A tiny OpenAI-compatible server in one file of standard library, for benches that start servers.

    python tests/tiny_server.py PORT STEP_S JOURNAL [stubborn|broken]

Streams `max_tokens` tokens, STEP_S apart, has a child process as real servers have, and notes its
life in JOURNAL. "stubborn" ignores SIGTERM; "broken" ends before it is ready.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PORT, STEP_S, JOURNAL = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
MODE = sys.argv[4] if len(sys.argv) > 4 else ""


def note(event: str, **fields: object) -> None:
    with JOURNAL.open("a") as file:
        file.write(json.dumps({"event": event, "port": PORT, "at": time.time()} | fields) + "\n")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(json.dumps({"data": [{"id": f"tiny-{PORT}"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        note("request", model=body["model"], prompt=body["prompt"])
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for i in range(body["max_tokens"]):
            time.sleep(STEP_S)
            reason = "length" if i == body["max_tokens"] - 1 else None
            self._send({"choices": [{"index": 0, "text": " x", "finish_reason": reason}]})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        del format, args

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send(self, event: dict) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def stop(*_: object) -> None:
    note("stopped")
    os._exit(0)


if __name__ == "__main__":
    if MODE == "broken":
        sys.exit("no such model")
    signal.signal(signal.SIGTERM, signal.SIG_IGN if MODE == "stubborn" else stop)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    note("started", pid=os.getpid(), child=child.pid, flag=os.environ.get("TINY_FLAG"))
    server = ThreadingHTTPServer(("127.0.0.1", PORT), Handler)
    server.daemon_threads = True
    server.serve_forever()
