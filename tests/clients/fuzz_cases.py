"""Makes and sends the cases; run by `tests.clients.fuzz` in schemathesis' own environment.

    python fuzz_cases.py URL KEY CASES SEED LIMIT_S OUTPUT

Half of a route's cases keep to its schema, half break it somewhere. OUTPUT is a JSON list with, for
each route, the number of answers by status and a curl command for the first failures.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import hypothesis
import requests
import schemathesis
from schemathesis import GenerationMode

NUM_WORKERS = 8  # requests at once: as many as the model has slots
BATCH_CASES = 100  # of one route, with a seed of their own
FAILURES_SHOWN = 5
SHOWN_EVERY = 500
PLAIN_CASES = 5  # of a route that takes nothing
TIMEOUT_S = 60.0
_DATA_MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)


class Route:
    """One method of one path, and what it answered."""

    def __init__(self, operation: Any) -> None:
        self.operation = operation
        self.name = f"{operation.method.upper()} {operation.path}"
        self.statuses: Counter[str] = Counter()
        self.failures: list[str] = []
        self._lock = threading.Lock()
        self._cases = {mode: operation.as_strategy(generation_mode=mode) for mode in _DATA_MODES}

    @property
    def weight(self) -> int:
        """How large its share of the cases is."""
        return 8 if self.operation.body else int(bool(self.operation.path_parameters))

    def send(self, url: str, key: str, mode: GenerationMode, count: int, seed: int) -> None:
        """Send `count` cases of one mode."""
        session = requests.Session()
        session.trust_env = False

        def send_one(case: Any) -> None:
            headers = {**(case.headers or {}), "Authorization": f"Bearer {key}"}
            try:
                response = case.call(url, session=session, headers=headers, timeout=TIMEOUT_S)
                status = str(response.status_code)
            except (requests.RequestException, UnicodeError) as error:
                status = type(error).__name__
            with self._lock:
                self.statuses[status] += 1
                if not status.isdecimal() or int(status) >= 500:
                    self._note(f"{status}: {case.as_curl_command(headers, base_url=url)}")

        wrapped = hypothesis.settings(
            max_examples=count,
            database=None,
            deadline=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )(hypothesis.seed(seed)(hypothesis.given(self._cases[mode])(send_one)))
        wrapped()

    def _note(self, failure: str) -> None:
        if len(self.failures) < FAILURES_SHOWN:
            self.failures.append(failure)
            print(f"{self.name}: {failure}", file=sys.stderr, flush=True)


def main(url: str, key: str, num_cases: str, seed: str, limit_s: str, output: str) -> None:
    answer = requests.get(
        f"{url}/openapi.json", headers={"Authorization": f"Bearer {key}"}, timeout=TIMEOUT_S
    )
    schema = schemathesis.openapi.from_dict(answer.json())
    routes = [Route(result.ok()) for result in schema.get_all_operations()]
    plain = [route for route in routes if not route.weight]
    shares = sum(route.weight for route in routes)
    left = int(num_cases) - PLAIN_CASES * len(plain)
    batches = [(route, GenerationMode.POSITIVE, PLAIN_CASES, 0) for route in plain]
    for route in routes:
        for mode in _DATA_MODES if route.weight else ():
            count = -(-left * route.weight // (shares * len(_DATA_MODES)))
            starts = range(0, count, BATCH_CASES)
            batches += [(route, mode, min(BATCH_CASES, count - at), at) for at in starts]
    # By turns, so that whoever stops early has seen something of every route.
    batches.sort(key=lambda batch: batch[3])
    give_up_at = time.monotonic() + float(limit_s)

    def send(route: Route, mode: GenerationMode, count: int, start: int) -> None:
        if time.monotonic() < give_up_at:
            route.send(url, key, mode, count, int(seed) + start)

    num_shown = 0
    with ThreadPoolExecutor(NUM_WORKERS) as workers:
        jobs = [workers.submit(send, *batch) for batch in batches]
        for job in as_completed(jobs):
            job.result()
            num_sent = sum(route.statuses.total() for route in routes)
            if num_sent >= num_shown + SHOWN_EVERY:
                num_shown = num_sent
                print(f"{num_sent} cases sent", file=sys.stderr, flush=True)
    rows = [
        {"route": r.name, "statuses": dict(sorted(r.statuses.items())), "failures": r.failures}
        for r in routes
    ]
    Path(output).write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
