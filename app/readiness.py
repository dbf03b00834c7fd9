"""Watches a server that is starting, over HTTP: /ready of the service and Ray's REST API.

Owns no process and prints nothing. Standard library only, one short request at a time.
"""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

_TIMEOUT_S = 2.0
_FAILED_STATUS = "DEPLOY_FAILED"
_MESSAGE_LINES = 20  # the end of a stack trace says what was wrong


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a start has come.

    Attributes:
        is_ready: the service answers requests.
        stage: what is being done now, for people to read; "" where nothing answers (yet).
        done: finished units of the stage.
        total: units of the stage; 0 where that is not known.
        model: what clients send as `model`; "" where that is not known.
    """

    is_ready: bool
    stage: str
    done: int = 0
    total: int = 0
    model: str = ""


class StartFailed(Exception):
    """The service will not become ready; the message is Serve's own."""


def read_progress(service_url: str, dashboard_url: str) -> Progress:
    """Ask the service how far it is, and Serve where the service does not answer yet.

    Raises:
        StartFailed: Serve has given an application up.
    """
    if (body := _get_json(f"{service_url}/ready")) is not None:
        progress = parse_ready(body)
        if progress.is_ready:
            return progress
    else:
        progress = Progress(is_ready=False, stage="")
    status = _get_json(f"{dashboard_url}/api/serve/applications/", headers=dashboard_headers())
    if status is None:
        return progress
    check_applications(status)
    return progress if body is not None else Progress(is_ready=False, stage="starting replicas")


def parse_ready(body: Mapping[str, Any]) -> Progress:
    """Read the body of /ready."""
    if body.get("ready") is True:
        return Progress(is_ready=True, stage="ready", model=str(body.get("model") or ""))
    return Progress(
        is_ready=False,
        stage=str(body.get("stage") or "starting replicas"),
        done=int(body.get("done") or 0),
        total=int(body.get("total") or 0),
    )


def check_applications(status: Mapping[str, Any]) -> None:
    """Look for an application that Serve has given up in the answer of its REST API.

    Raises:
        StartFailed: there is one; its message and those of its deployments are passed on.
    """
    applications = cast(Mapping[str, Mapping[str, Any]], status.get("applications") or {})
    for name, application in applications.items():
        if application.get("status") != _FAILED_STATUS:
            continue
        deployments = cast(
            Mapping[str, Mapping[str, Any]], application.get("deployments") or {}
        ).values()
        messages = [str(part.get("message") or "").strip() for part in (application, *deployments)]
        lines = "\n".join(filter(None, messages)).splitlines() or ["no reason was given"]
        raise StartFailed("\n".join([f"application {name!r}:", *lines[-_MESSAGE_LINES:]]))


def token_path() -> Path:
    """Return the file with the token that Ray's dashboard asks for."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")


def dashboard_headers() -> dict[str, str]:
    """Return the headers that authenticate a request to Ray's dashboard; none without a token."""
    token = os.environ.get("RAY_AUTH_TOKEN")
    if token is None:
        try:
            token = token_path().read_text(encoding="utf-8").strip()
        except OSError:
            return {}
    return {"Authorization": f"Bearer {token}"}


def _get_json(url: str, headers: Mapping[str, str] | None = None) -> dict[str, Any] | None:
    """Get a JSON object, of whatever HTTP status; None where there is no such answer (yet)."""
    request = urllib.request.Request(url, headers=dict(headers or {}))
    # No proxy of the environment: these servers are on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as response:
            content = response.read()
    except urllib.error.HTTPError as error:
        content = error.read()
    except (OSError, http.client.HTTPException):
        # Not HTTP: a port of the ephemeral range that nobody listens on yet can connect to itself,
        # and then what comes back is our own request.
        return None
    try:
        body = json.loads(content)
    except ValueError:
        return None
    return cast(dict[str, Any], body) if isinstance(body, dict) else None
