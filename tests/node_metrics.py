"""What Ray's agent of a test's own node exports, and the queries of our dashboard over it."""

from __future__ import annotations

import contextlib
import json
import re
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
DASHBOARD = ROOT / "ops" / "grafana" / "systole.json"
RULES = ROOT / "ops" / "prometheus" / "alerts.yaml"
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def read_node_metrics(pids: Iterable[int]) -> str:
    """Exposition text of the cluster that these processes belong to; "" while there is none."""
    return next((text for _, text in _nodes(pids)), "")


def node_addresses(pids: Iterable[int]) -> list[str]:
    """HOST:PORT of every agent that exports metrics of the cluster of these processes."""
    return [address for address, _ in _nodes(pids)]


def panel_queries() -> list[str]:
    """Every query of the dashboard, with a range in place of Grafana's variable."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return [query.replace("$__rate_interval", "1m") for query in queries]


def rule_queries() -> list[str]:
    """Every expression of the alert rules."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def _nodes(pids: Iterable[int]) -> Iterator[tuple[str, str]]:
    """Address and exposition text of each agent that speaks of the processes' session."""
    for session in _sessions(pids):
        for address in _addresses(session):
            with contextlib.suppress(OSError):
                with _OPENER.open(f"http://{address}/metrics", timeout=5) as response:
                    text = response.read().decode()
                if session.name in text:
                    yield address, text


def _sessions(pids: Iterable[int]) -> set[Path]:
    found: set[Path] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
            found |= {Path(path) for path in re.findall(r"(/\S*?/session_[0-9_-]+)", command)}
    return found


def _addresses(session: Path) -> list[str]:
    """Of all nodes that Ray's head writes down for Prometheus, beside or in the session."""
    name = "prom_metrics_service_discovery.json"
    for file in (session / name, session.parent / name):
        with contextlib.suppress(OSError, ValueError):
            entries = json.loads(file.read_text())
            return [target for entry in entries for target in entry["targets"]]
    return []
