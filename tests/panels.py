"""Every query of the dashboard and of the alert rules, run by a real Prometheus on a real service.

    python -m tests.panels --prometheus /usr/bin/prometheus

Serves a config, has Prometheus scrape it and the cluster's nodes as it would in production, sends
a little traffic, and asks for each panel as Grafana does. Ends with status 1 where a query fails or
shows nothing, or Prometheus cannot evaluate a rule. Not part of the test suite, which has no
Prometheus: there `tests.promql` evaluates the same queries.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shlex
import shutil
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from app.launch_config import find_free
from bench import processes
from bench.client import LoadClient
from bench.server_process import ServerCommand, running, serving
from bench.workloads import RequestSpec, Vocabulary
from tests.node_metrics import RULES, node_addresses, panel_queries

UNSEEN = ("device_memory",)
"""A CPU does not count its memory: these may show nothing."""
SCRAPE_S = 1
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


async def _load(url: str, seconds: float) -> int:
    """Send short and long streams, some at once; returns how many failed."""
    rng, vocabulary = random.Random("panels"), Vocabulary()
    shared = vocabulary.draw(rng, 128)
    specs = [
        RequestSpec(
            arrival_s=index / 2,
            prompt_token_ids=shared + vocabulary.draw(rng, rng.randint(8, 64)),
            max_tokens=rng.randint(8, 48),
        )
        for index in range(int(2 * seconds))
    ]
    async with LoadClient(url, None) as client:
        records = await client.run_open(specs, limit_s=seconds + 120)
    return sum(not record.is_ok for record in records)


def _ask(url: str, path: str, **parameters: str) -> Any:
    query = urllib.parse.urlencode(parameters)
    try:
        with _OPENER.open(f"{url}/api/v1/{path}?{query}", timeout=30) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        answer = json.load(error)
    if answer["status"] != "success":
        raise SystemExit(f"Prometheus refuses {parameters or path}: {answer['error']}")
    return answer["data"]


@contextlib.contextmanager
def _prometheus(program: str, targets: dict[str, list[str]], directory: Path) -> Iterator[str]:
    """Run it over these targets, by job, with our alert rules; yields its URL."""
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": addresses}]}
            for job, addresses in targets.items()
        ],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    url = f"http://127.0.0.1:{find_free()}"
    command = (
        program,
        f"--config.file={directory}/prometheus.yml",
        f"--storage.tsdb.path={directory}/data",
        f"--web.listen-address={url.removeprefix('http://')}",
    )
    server = ServerCommand(
        name="Prometheus", command=shlex.join(command), url=url, ready_url=f"{url}/-/ready"
    )
    with running(server, log=directory / "prometheus.log", directory=directory):
        yield url


def judge(url: str) -> list[str]:
    """What is wrong with the answers of a Prometheus to our queries and rules, in words."""
    faults: list[str] = []
    for query in panel_queries():
        series = _ask(url, "query", query=query)["result"]
        values = [float(entry["value"][1]) for entry in series]
        if not values and not any(name in query for name in UNSEEN):
            faults.append(f"shows nothing: {query}")
        if query.startswith("histogram_quantile") and any(value != value for value in values):
            faults.append(f"not a number: {query}")
        print(f"{len(values):4} series  {query}")
    for group in _ask(url, "rules")["groups"]:
        for rule in group["rules"]:
            if rule["health"] != "ok":
                faults.append(f"rule {rule['name']}: {rule['health']} {rule.get('lastError', '')}")
            print(f"{rule['state']:>8}  alert {rule['name']}")
    return faults


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.panels", description=__doc__)
    parser.add_argument("--prometheus", default="prometheus", help="the program")
    parser.add_argument("--config", default="serve_config.yaml", help="what is served")
    parser.add_argument("--seconds", type=float, default=75.0, help="of traffic")
    options = parser.parse_args(arguments)
    if (program := shutil.which(options.prometheus)) is None:
        raise SystemExit(
            f"there is no program {options.prometheus!r}: install Debian's package prometheus, or "
            "name one: --prometheus PATH (make panels PROMETHEUS=PATH)"
        )
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with serving(options.config, log=directory / "service.log") as url:
            port = urllib.parse.urlsplit(url).port
            assert port is not None
            nodes = node_addresses(process.pid for process in processes.find_server(port))
            if not nodes:
                raise SystemExit("no agent of the service's cluster exports metrics")
            targets = {"systole": [f"127.0.0.1:{port}"], "ray": nodes}
            with _prometheus(program, targets, directory) as prometheus_url:
                num_failed = asyncio.run(_load(url, options.seconds))
                time.sleep(2 * SCRAPE_S)
                faults = judge(prometheus_url)
                up = {
                    entry["metric"]["job"]: entry["value"][1]
                    for entry in _ask(prometheus_url, "query", query="up")["result"]
                }
    faults += [f"job {job} is not scraped" for job, value in up.items() if value != "1"]
    faults += [f"{num_failed} requests failed"] if num_failed else []
    print("\n".join(faults) or f"all {len(panel_queries())} queries show something")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
