"""Dashboard, alert rules and the page of metrics name only what the code exports."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.util.metrics import Counter, Histogram, Metric

from app.metrics import IngressMetrics
from app.router.metrics import RouterMetrics
from replicas.engine_metrics import EngineMetrics
from replicas.wire import ReplicaLoad, ServiceStatus

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = json.loads((ROOT / "ops" / "grafana" / "systole.json").read_text())
RULES = yaml.safe_load((ROOT / "ops" / "prometheus" / "alerts.yaml").read_text())
PAGE = (ROOT / "docs" / "operations.md").read_text()
SERVE_LABELS = {"deployment", "replica", "application"}
"""What Serve adds to each series of a replica."""


def ray_metrics(owner: object) -> list[Metric]:
    """All of Ray's metrics below an object."""
    found: list[Metric] = []
    for value in vars(owner).values():
        items = list(value.values()) if isinstance(value, dict) else [value]
        found += [item for item in items if isinstance(item, Metric)]
        found += [m for item in items if hasattr(item, "export") for m in ray_metrics(item)]
    return found


def exported() -> dict[str, set[str]]:
    """Name of each series in Prometheus -> its labels."""
    series: dict[str, set[str]] = {}
    metrics = IngressMetrics("i")
    metrics.request_ended("/v1/completions", 200, 1.0)
    status = ServiceStatus(
        ready=True,
        replicas={"r": ReplicaLoad()},
        num_queued=0,
        num_queued_tokens=0,
        num_inflight=0,
        model_info=None,
    )
    for line in metrics.render(status).decode().splitlines():
        match = re.match(r"(\w+)(?:\{(.*)\})? ", line)
        if match and not match[1].endswith("_created"):
            series.setdefault(match[1], set()).update(re.findall(r"(\w+)=", match[2] or ""))
    for metric in (*ray_metrics(EngineMetrics()), *ray_metrics(RouterMetrics())):
        name = f"ray_{metric.info['name']}"
        labels = {*metric.info["tag_keys"], *SERVE_LABELS}
        if isinstance(metric, Histogram):
            series |= {f"{name}_bucket": {*labels, "le"}, f"{name}_count": labels}
            series[f"{name}_sum"] = labels
        else:
            series[f"{name}_total" if isinstance(metric, Counter) else name] = labels
    return series


EXPORTED = exported()


def queries() -> list[str]:
    """Every expression of the dashboard and of the rules."""
    panels = [t["expr"] for panel in DASHBOARD["panels"] for t in panel.get("targets", ())]
    rules = [rule["expr"] for group in RULES["groups"] for rule in group["rules"]]
    assert len(panels) > 20
    assert len(rules) > 5
    return panels + rules


def names_in(text: str) -> list[str]:
    return re.findall(r"\b(?:ray_)?systole_\w+", text)


@pytest.mark.parametrize("query", queries())
def test_a_query_asks_for_series_and_labels_that_are_exported(query: str) -> None:
    names = names_in(query)
    assert names
    labels = set[str]()
    for name in names:
        assert name in EXPORTED
        for selector in re.findall(rf"{name}\{{(.*?)\}}", query):
            assert set(re.findall(r"(\w+)=", selector)) <= EXPORTED[name]
        labels |= EXPORTED[name]
    for grouping in re.findall(r"(?:by|ignoring) \((.*?)\)", query):
        assert set(grouping.split(", ")) <= labels
    assert query.count("(") == query.count(")")


@pytest.mark.parametrize("panel", [p for p in DASHBOARD["panels"] if p["type"] != "row"])
def test_a_legend_shows_a_label_that_its_query_keeps(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
            assert re.search(rf"by \([^)]*\b{label}\b", target["expr"])


def test_panels_have_places_and_ids_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))


def test_every_rule_has_what_an_operator_needs() -> None:
    for rule in (rule for group in RULES["groups"] for rule in group["rules"]):
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert f"`{rule['alert']}`" in PAGE
        for label in re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]):
            assert f"by ({label})" in rule["expr"]


def test_the_commands_of_the_page_exist_with_their_options() -> None:
    """`serve` is Ray's; what is ours answers --help, except for modules without options."""
    commands = re.findall(r"python -m ([\w.]+)((?: (?:--)?[\w./:]+)*)", PAGE)
    assert {module for module, _ in commands} >= {"bench.top", "replicas.engine.programs"}
    for module, options in commands:
        spec = importlib.util.find_spec(module)
        assert spec is not None, module
        assert spec.origin is not None
        source = Path(spec.origin).read_text()
        for option in re.findall(r"--[a-z-]+", options):
            assert f'"{option}"' in source, (module, option)


def test_the_page_lists_every_metric_that_is_exported_and_no_other() -> None:
    families = {re.sub(r"_(sum|count)$", "", name) for name in EXPORTED}
    families = {re.sub(r"_bucket$", "", name) for name in families}
    listed = set(names_in(PAGE.partition("## Metrics")[2].partition("\n## ")[0]))
    assert listed == families
