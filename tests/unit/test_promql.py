"""The evaluator of queries, against values worked out by hand."""

from __future__ import annotations

import pytest

from bench.top import parse
from tests.promql import evaluate, labels_of, scalars

BEFORE = parse(
    'c_total{a="x",b="1"} 10\nc_total{a="x",b="2"} 90\nc_total{a="y",b="1"} 5\n'
    'h_bucket{le="1"} 0\nh_bucket{le="2"} 0\nh_bucket{le="+Inf"} 0\n',
    at_s=0.0,
)
AFTER = parse(
    'c_total{a="x",b="1"} 30\nc_total{a="x",b="2"} 40\nc_total{a="y",b="1"} 25\n'
    'h_bucket{le="1"} 10\nh_bucket{le="2"} 30\nh_bucket{le="+Inf"} 40\ng 7\n',
    at_s=10.0,
)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("g", [7]),
        ("1 - g / 14", [0.5]),
        ("sum(c_total)", [95]),
        ("sum by (a) (c_total)", [70, 25]),
        ('sum(c_total{a="x"}) / sum(c_total)', [70 / 95]),
        ('max(c_total{b=~"[12]",a!="y"})', [40]),
        ("rate(c_total[5m])", [2, 4, 2]),  # the second counter began again
        ("sum(rate(c_total[5m])) * 2 > 3", [16]),
        ("sum(rate(c_total[5m])) > 8", []),
        ("sum by (a) (c_total) / ignoring (a) group_left sum(c_total)", [70 / 95, 25 / 95]),
        ("sum by (a) (c_total) > 2 * sum by (a) (c_total)", []),
        ("histogram_quantile(0.5, sum by (le) (rate(h_bucket[1m])))", [1.5]),
        ("histogram_quantile(0.125, sum by (le) (rate(h_bucket[1m])))", [0.5]),
        ("histogram_quantile(0.99, sum by (le) (rate(h_bucket[1m])))", [2]),
    ],
)
def test_values(query: str, expected: list[float]) -> None:
    assert scalars(evaluate(query, BEFORE, AFTER)) == pytest.approx(expected)


def test_labels_are_kept_as_asked() -> None:
    assert labels_of(evaluate("sum by (a) (c_total)", BEFORE, AFTER)) == [{"a": "x"}, {"a": "y"}]


@pytest.mark.parametrize(
    "query",
    ["sum(", "c_total)", "rate(c_total)", "topk(3, g)", "g g",
     "c_total / ignoring (b) sum by (a) (c_total)"],
)  # fmt: skip
def test_what_is_not_known_is_refused(query: str) -> None:
    with pytest.raises(SyntaxError):
        evaluate(query, BEFORE, AFTER)
