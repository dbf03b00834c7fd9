"""A running service in the terminal, from its /metrics: standard library only.

    .venv/bin/python -m bench.top http://127.0.0.1:8000 [--interval 2] [--once] [--api-key KEY]

Rates and quantiles are of the time between two scrapes. With several ingress replicas a scrape
reaches any one of them: what users see is then of that one, and shown once it was seen twice.
"""

from __future__ import annotations

import argparse
import math
import re
import time
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_CLEAR = "\x1b[H\x1b[2J"
_TIMEOUT_S = 5.0


class Sample(NamedTuple):
    """One line of an exposition.

    Attributes:
        labels: by name.
        value: as given.
    """

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Scrape:
    """What /metrics said at one time.

    Attributes:
        at_s: monotonic clock.
        samples: by name of the series.
    """

    at_s: float
    samples: Mapping[str, tuple[Sample, ...]]

    @property
    def ingress(self) -> str:
        """The ingress replica that answered."""
        return next(
            (s.labels["ingress"] for s in self.samples.get("systole_requests_in_progress", ())), ""
        )

    def total(self, name: str, **labels: str) -> float:
        """Sum of a series over the samples that carry these labels; 0 when there is none."""
        return sum(
            sample.value
            for sample in self.samples.get(name, ())
            if labels.items() <= sample.labels.items()
        )


def parse(text: str, *, at_s: float) -> Scrape:
    """Read Prometheus' text format; lines that are no samples are skipped."""
    samples: dict[str, list[Sample]] = {}
    for line in text.splitlines():
        if match := _SAMPLE.match(line):
            labels = dict(_LABEL.findall(match[2] or ""))
            samples.setdefault(match[1], []).append(Sample(labels, float(match[3])))
    return Scrape(at_s, {name: tuple(found) for name, found in samples.items()})


def scrape(url: str, *, api_key: str | None = None) -> Scrape:
    """Ask a service for its metrics.

    Raises:
        OSError: it cannot be reached, or refuses.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(f"{url.rstrip('/')}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
        return parse(response.read().decode(), at_s=time.monotonic())


def quantile(share: float, before: Scrape, after: Scrape, name: str) -> float:
    """Return a quantile of a histogram's observations between two scrapes, NaN without any.

    Linear within a bucket, as Prometheus' histogram_quantile; the last bound stands for all above.
    """
    counts: dict[float, float] = {}
    for sign, one in ((1, after), (-1, before)):
        for sample in one.samples.get(f"{name}_bucket", ()):
            bound = float(sample.labels["le"])
            counts[bound] = counts.get(bound, 0.0) + sign * sample.value
    bounds = sorted(counts)
    if not bounds or counts[bounds[-1]] <= 0:
        return math.nan
    rank = share * counts[bounds[-1]]
    low, below = 0.0, 0.0
    for bound in bounds:
        if counts[bound] >= rank and counts[bound] > below:
            if math.isinf(bound):
                return low
            return low + (bound - low) * (rank - below) / (counts[bound] - below)
        low, below = bound, counts[bound]
    return low


def render(before: Scrape | None, after: Scrape) -> str:
    """Return the view; `before` None, or another ingress replica's: without rates."""
    lines: list[str] = []
    if before is not None and before.ingress == after.ingress:
        lines += _traffic(before, after)
    in_progress = after.total("systole_requests_in_progress")
    queued = after.total("systole_router_queued_requests")
    inflight = after.total("systole_router_inflight_requests")
    lines += [
        f"requests  in progress {in_progress:.0f}   router: queued {queued:.0f}   "
        f"in flight {inflight:.0f}",
        "",
        f"{'replica':28} {'running':>9} {'waiting':>8} {'KV used':>8} {'preempted':>10} "
        f"{'cached':>7} {'compiles':>9} {'step':>9}",
    ]
    replicas = [s.labels["replica"] for s in after.samples.get("systole_engine_running", ())]
    lines += [_replica(after, replica) for replica in sorted(replicas)]
    if not replicas:
        lines.append("no replica takes requests")
    return "\n".join(lines)


def _traffic(before: Scrape, after: Scrape) -> Iterable[str]:
    elapsed_s = max(1e-9, after.at_s - before.at_s)

    def rate(name: str) -> float:
        return (after.total(name) - before.total(name)) / elapsed_s

    yield (
        f"{rate('systole_requests_total'):8.1f} requests/s   "
        f"{rate('systole_output_tokens_total'):8.1f} output tokens/s   "
        f"{rate('systole_prompt_tokens_total'):8.1f} prompt tokens/s"
    )
    for label, name in (
        ("TTFT", "systole_time_to_first_token_seconds"),
        ("TPOT", "systole_time_per_output_token_seconds"),
        ("ITL", "systole_inter_token_latency_seconds"),
    ):
        shown = [f"P{p} {_ms(quantile(p / 100, before, after, name))}" for p in (50, 90, 99)]
        yield f"{label:9} " + "   ".join(shown)


def _replica(now: Scrape, replica: str) -> str:
    def value(name: str) -> float:
        return now.total(f"systole_engine_{name}", replica=replica)

    used = _share(value("pages") - value("free_pages"), value("pages"))
    cached = _share(value("cached_tokens_total"), value("prompt_tokens_total"))
    running = f"{value('running'):.0f}/{value('slots'):.0f}"
    return (
        f"{replica[-28:]:28} {running:>9} {value('waiting'):8.0f} {used:>8} "
        f"{value('preemptions_total'):10.0f} {cached:>7} "
        f"{value('compiles_after_warmup_total'):9.0f} {_ms(value('step_seconds')):>9}"
    )


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "-"


def _ms(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1000:.1f} ms"


def main(arguments: list[str] | None = None) -> None:
    """Show a service until interrupted, or once."""
    parser = argparse.ArgumentParser(prog="python -m bench.top", description="A running service.")
    parser.add_argument("url", help="of the service, e.g. http://127.0.0.1:8000")
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between two looks")
    parser.add_argument("--once", action="store_true", help="one interval, then end")
    parser.add_argument("--api-key", help="where the service asks for one")
    options = parser.parse_args(arguments)
    before: Scrape | None = None
    try:
        while True:
            try:
                after = scrape(options.url, api_key=options.api_key)
            except OSError as error:
                if options.once:
                    raise SystemExit(f"{options.url}: {error}") from None
                print(f"{_CLEAR}{options.url}: {error}", flush=True)
                before = None
            else:
                if not options.once:
                    print(f"{_CLEAR}{options.url}   {time.strftime('%X')}\n", end="")
                if before is not None or not options.once:
                    print(render(before, after), flush=True)
                if before is not None and options.once:
                    return
                before = after
            time.sleep(options.interval)
    except KeyboardInterrupt:
        return


if __name__ == "__main__":
    main()
