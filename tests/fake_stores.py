"""A Hub and a Cloud Storage on the loopback, as far as their clients ask: lists, ranges, refusals.

Each keeps a journal of the requests and can be told to break one connection.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeStore:
    """Files by name, and how to misbehave.

    Attributes:
        files: content by name.
        token: what clients must send, or None for a public store.
        is_gated: files are refused, their list is not.
        breaks: names whose next transfer ends in the middle.
        spoils: names whose content comes with one bit changed.
        requests: (method, path, range header) of every request so far.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.token: str | None = None
        self.is_gated = False
        self.breaks: set[str] = set()
        self.spoils: set[str] = set()
        self.requests: list[tuple[str, str, str | None]] = []
        self.url = ""

    def transfers(self, name: str) -> list[str | None]:
        """Range headers of the transfers of a file."""
        return [
            wanted
            for method, path, wanted in self.requests
            if method == "GET" and unquote(path).split("?")[0].endswith(f"/{name}")
        ]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: FakeStore

    def do_GET(self) -> None:
        self.store.requests.append((self.command, self.path, self.headers.get("Range")))
        url = urlsplit(self.path)
        self.answer(unquote(url.path), {key: v[0] for key, v in parse_qs(url.query).items()})

    do_HEAD = do_GET

    def answer(self, path: str, query: dict[str, str]) -> None:
        raise NotImplementedError

    def log_message(self, format: str, *args: object) -> None:
        del format, args

    def is_authorized(self) -> bool:
        token = self.store.token
        return token is None or self.headers.get("Authorization") == f"Bearer {token}"

    def send_json(self, value: Any, status: int = 200, **headers: str) -> None:
        self.send_bytes(json.dumps(value).encode(), status, headers)

    def send_bytes(self, body: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_file(self, name: str, headers: dict[str, str]) -> None:
        content, status = self.store.files[name], 200
        if name in self.store.spoils:
            content = bytes([content[0] ^ 1]) + content[1:]
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if wanted is not None:
            begin, end = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
            headers = headers | {"Content-Range": f"bytes {begin}-{end}/{len(content)}"}
            content, status = content[begin : end + 1], 206
        if self.command == "GET" and name in self.store.breaks:
            self.store.breaks.discard(name)
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
            return
        self.send_bytes(content, status, headers)


class _Hub(_Handler):
    """`org/name` with the files of one commit, which `main` names."""

    def answer(self, path: str, query: dict[str, str]) -> None:
        repo = re.fullmatch(r"(?:/api/models)?/org/name(/.*)?", path)
        if repo is None or not self.is_authorized():
            self.send_json({"error": "not found"}, 401, X_Error_Code="RepoNotFound")
            return
        action = re.fullmatch(r"/(revision|tree|resolve)/([^/]+)(?:/(.*))?", repo[1] or "/")
        if action is None or action[2] not in ("main", COMMIT):
            self.send_json({"error": "no revision"}, 404, X_Error_Code="RevisionNotFound")
        elif action[1] == "revision":
            self.send_json({"id": "org/name", "sha": COMMIT, "siblings": []})
        elif action[1] == "tree":
            self.send_json(
                [
                    {"type": "file", "oid": _digest(content), "size": len(content), "path": name}
                    for name, content in self.store.files.items()
                ]
            )
        elif self.store.is_gated:
            self.send_json({"error": "gated"}, 403, X_Error_Code="GatedRepo")
        elif action[3] not in self.store.files:
            self.send_json({"error": "no file"}, 404, X_Error_Code="EntryNotFound")
        else:
            etag = f'"{_digest(self.store.files[action[3]])}"'
            self.send_file(action[3], {"X-Repo-Commit": COMMIT, "ETag": etag})


class _Bucket(_Handler):
    """Bucket `weights`; generations are digests of the content."""

    def answer(self, path: str, query: dict[str, str]) -> None:
        if not self.is_authorized():
            self.send_json({"error": {"code": 401, "message": "Anonymous caller"}}, 401)
            return
        if self.store.is_gated:
            self.send_json({"error": {"code": 403, "message": "no access"}}, 403)
            return
        objects = re.fullmatch(r"(?:/download)?/storage/v1/b/weights/o(?:/(.*))?", path)
        if objects is None:
            self.send_json({"error": {"code": 404, "message": "no bucket"}}, 404)
        elif objects[1] is None:
            items = [
                self._describe(name)
                for name in self.store.files
                if name.startswith(query.get("prefix", ""))
            ]
            self.send_json({"kind": "storage#objects", "items": items})
        elif objects[1] not in self.store.files:
            self.send_json({"error": {"code": 404, "message": "no object"}}, 404)
        elif query.get("alt") == "media":
            stated = self._describe(objects[1])["generation"]
            if query.get("generation", stated) != stated:
                self.send_json({"error": {"code": 404, "message": "replaced"}}, 404)
            else:
                self.send_file(objects[1], {})
        else:
            self.send_json(self._describe(objects[1]))

    def _describe(self, name: str) -> dict[str, str]:
        content = self.store.files[name]
        return {
            "kind": "storage#object",
            "bucket": "weights",
            "name": name,
            "size": str(len(content)),
            "generation": str(int(_digest(content)[:12], 16)),
            "md5Hash": base64.b64encode(hashlib.md5(content).digest()).decode(),
        }


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def _run(handler: type[_Handler], files: dict[str, bytes]) -> Iterator[FakeStore]:
    store = FakeStore(files)
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), type("Handler", (handler,), {"store": store}), bind_and_activate=True
    )
    server.daemon_threads = True
    store.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def run_hub(files: dict[str, bytes]) -> Any:
    """A Hub with the model `org/name`; a context manager."""
    return _run(_Hub, files)


def run_bucket(files: dict[str, bytes]) -> Any:
    """A Cloud Storage with the bucket `weights`; a context manager."""
    return _run(_Bucket, files)
