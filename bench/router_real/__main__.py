"""`python -m bench.router_real [validation overload fairness kill]`: starts a service and tries it.

Two engine replicas on this machine, on ports of their own. Prints a table, writes JSON to
bench/results, and ends with status 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from bench.report import RESULTS, format_table, result_path, stamp, write_json
from bench.router_real.scenarios import fairness, kill, overload, validation
from bench.router_real.service import Service, Sizes, running_service

# The last one leaves a replica without warm caches.
SCENARIOS: dict[str, Callable[[Service], Awaitable[dict[str, Any]]]] = {
    "validation": validation,
    "overload": overload,
    "fairness": fairness,
    "kill": kill,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.router_real", description=__doc__)
    parser.add_argument("scenarios", nargs="*", help=f"of {', '.join(SCENARIOS)}; none: all")
    parser.add_argument("--model", default=Sizes().model, help="directory of the checkpoint")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    names = options.scenarios or list(SCENARIOS)
    if unknown := set(names) - SCENARIOS.keys():
        parser.error(f"no such scenario: {', '.join(sorted(unknown))}")
    sizes = Sizes(model=options.model)
    results = asyncio.run(_run(names, sizes))
    rows = [
        {"scenario": name, "bar": bar, "kept": "yes" if is_kept else "NO"}
        for name, result in results.items()
        for bar, is_kept in result["passed"].items()
    ]
    print(format_table(rows))
    path = options.out or result_path("router_real")
    write_json(path, {"stamp": stamp(), "sizes": dataclasses.asdict(sizes), "results": results})
    print(path)
    return 0 if all(row["kept"] == "yes" for row in rows) else 1


async def _run(names: list[str], sizes: Sizes) -> dict[str, dict[str, Any]]:
    RESULTS.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Any]] = {}
    async with running_service(sizes, log=RESULTS / "router_real.log") as service:
        for name in names:
            begin = time.monotonic()
            results[name] = await SCENARIOS[name](service)
            print(
                f"{name} ({time.monotonic() - begin:.0f} s):", json.dumps(results[name], indent=1)
            )
    return results


if __name__ == "__main__":
    sys.exit(main())
