"""As much of PromQL as our dashboard and rules use, over two scrapes of a running service.

Follows Prometheus' documentation: selectors with matchers, `rate` between the two scrapes (a
counter that fell began again), sum/min/max/avg with `by`, arithmetic and filtering comparisons
between scalars and vectors with one-to-one and `ignoring (...) group_left` matching,
`histogram_quantile` with linear interpolation within a bucket. Anything else is a SyntaxError, so
that a query that is not covered cannot pass unseen.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bench.top import Scrape

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
Value = float | Vector

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?)(?![\w.])|(?P<name>[a-zA-Z_:][\w:]*)"
    r"|(?P<string>\"[^\"]*\")|(?P<range>\[[^\]]*\])|(?P<op>=~|!~|!=|>=|<=|==|[-+*/(){},=<>]))"
)
_AGGREGATIONS: dict[str, Callable[[list[float]], float]] = {
    "sum": math.fsum,
    "min": min,
    "max": max,
    "avg": lambda values: math.fsum(values) / len(values),
}
_ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda a, b: a / b if b else math.nan if a == 0 or math.isnan(a) else math.inf,
}
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}


def evaluate(query: str, before: Scrape, after: Scrape) -> Value:
    """Evaluate a query at the time of `after`; ranges reach back to `before`.

    Raises:
        SyntaxError: it is not PromQL, or not of the part that is known here.
    """
    parser = _Parser(query, before, after)
    value = parser.comparison()
    if parser.peek() != "":
        raise SyntaxError(f"unexpected {parser.peek()!r} in {query!r}")
    return value


@dataclass
class _Matching:
    ignoring: frozenset[str] = frozenset()
    group_left: bool = False


class _Parser:
    def __init__(self, query: str, before: Scrape, after: Scrape) -> None:
        self._before, self._after = before, after
        self._tokens: list[tuple[str, str]] = []
        position = 0
        while query[position:].strip():
            match = _TOKEN.match(query, position)
            if match is None:
                raise SyntaxError(f"cannot read {query[position:]!r}")
            assert match.lastgroup is not None
            self._tokens.append((match.lastgroup, match[match.lastgroup]))
            position = match.end()
        self._next = 0

    def peek(self) -> str:
        return self._tokens[self._next][1] if self._next < len(self._tokens) else ""

    def kind(self) -> str:
        return self._tokens[self._next][0] if self._next < len(self._tokens) else ""

    def take(self, expected: str | None = None) -> str:
        token = self.peek()
        if token == "" or (expected is not None and token != expected):
            raise SyntaxError(f"expected {expected or 'more'}, got {token!r}")
        self._next += 1
        return token

    def comparison(self) -> Value:
        left = self.sum()
        while self.peek() in _COMPARISONS:
            compare = _COMPARISONS[self.take()]
            left = _filter(left, self.sum(), compare)
        return left

    def sum(self) -> Value:
        left = self.product()
        while self.peek() in ("+", "-"):
            combine = _ARITHMETIC[self.take()]
            left = _combine(left, self.product(), combine, _Matching())
        return left

    def product(self) -> Value:
        left = self.primary()
        while self.peek() in ("*", "/"):
            combine = _ARITHMETIC[self.take()]
            matching = self._matching()
            left = _combine(left, self.primary(), combine, matching)
        return left

    def primary(self) -> Value:
        if self.kind() == "number":
            return float(self.take())
        if self.peek() == "(":
            self.take()
            value = self.comparison()
            self.take(")")
            return value
        if self.kind() != "name":
            raise SyntaxError(f"unexpected {self.peek()!r}")
        name = self.take()
        if name in _AGGREGATIONS:
            return self._aggregate(name)
        if name == "rate":
            self.take("(")
            value = self._rate()
            self.take(")")
            return value
        if name == "histogram_quantile":
            self.take("(")
            share = self.sum()
            self.take(",")
            buckets = self.comparison()
            self.take(")")
            assert isinstance(share, float)
            assert isinstance(buckets, dict)
            return _quantiles(share, buckets)
        return self._select(name, self._after)

    def _aggregate(self, name: str) -> Value:
        by: frozenset[str] = frozenset()
        if self.peek() == "by":
            self.take()
            by = self._label_names()
        self.take("(")
        vector = self.comparison()
        self.take(")")
        if not isinstance(vector, dict):
            raise SyntaxError(f"{name} of a scalar")
        groups: dict[Labels, list[float]] = {}
        for labels, value in vector.items():
            kept = frozenset(label for label in labels if label[0] in by)
            groups.setdefault(kept, []).append(value)
        return {labels: _AGGREGATIONS[name](values) for labels, values in groups.items()}

    def _rate(self) -> Vector:
        start = self._next
        name = self.take()
        before = self._select(name, self._before)
        self._next = start + 1
        after = self._select(name, self._after)
        if self.kind() != "range":
            raise SyntaxError("rate needs a range")
        self.take()
        elapsed_s = self._after.at_s - self._before.at_s
        rates: Vector = {}
        for labels, value in after.items():
            if labels in before:
                grown = value - before[labels]
                rates[labels] = (grown if grown >= 0 else value) / elapsed_s
        return rates

    def _select(self, name: str, scrape: Scrape) -> Vector:
        matchers: list[Callable[[Mapping[str, str]], bool]] = []
        if self.peek() == "{":
            self.take()
            while self.peek() != "}":
                matchers.append(self._matcher())
                if self.peek() == ",":
                    self.take()
            self.take("}")
        return {
            frozenset(sample.labels.items()): sample.value
            for sample in scrape.samples.get(name, ())
            if all(match(sample.labels) for match in matchers)
        }

    def _matcher(self) -> Callable[[Mapping[str, str]], bool]:
        label, op = self.take(), self.take()
        pattern = self.take().strip('"')
        tests: dict[str, Callable[[str], bool]] = {
            "=": lambda value: value == pattern,
            "!=": lambda value: value != pattern,
            "=~": lambda value: re.fullmatch(pattern, value) is not None,
            "!~": lambda value: re.fullmatch(pattern, value) is None,
        }
        test = tests[op]
        return lambda labels: test(labels.get(label, ""))

    def _matching(self) -> _Matching:
        matching = _Matching()
        if self.peek() == "ignoring":
            self.take()
            matching.ignoring = self._label_names()
        if self.peek() == "group_left":
            self.take()
            matching.group_left = True
        return matching

    def _label_names(self) -> frozenset[str]:
        self.take("(")
        names: list[str] = []
        while self.peek() != ")":
            names.append(self.take())
            if self.peek() == ",":
                self.take()
        self.take(")")
        return frozenset(names)


def _combine(
    left: Value, right: Value, combine: Callable[[float, float], float], matching: _Matching
) -> Value:
    if not isinstance(left, dict) and not isinstance(right, dict):
        return combine(left, right)
    if not isinstance(right, dict):
        assert isinstance(left, dict)
        return {labels: combine(value, right) for labels, value in left.items()}
    if not isinstance(left, dict):
        return {labels: combine(left, value) for labels, value in right.items()}
    found: Vector = {}
    used: set[Labels] = set()
    by_key = {_key(labels, matching): value for labels, value in right.items()}
    if len(by_key) != len(right):
        raise SyntaxError("several series on the right match the same on the left")
    for labels, value in left.items():
        key = _key(labels, matching)
        if key in by_key:
            if key in used and not matching.group_left:
                raise SyntaxError("several series match one: group_left is missing")
            used.add(key)
            found[labels if matching.group_left else key] = combine(value, by_key[key])
    return found


def _filter(left: Value, right: Value, compare: Callable[[float, float], bool]) -> Value:
    if not isinstance(left, dict):
        raise SyntaxError("a comparison filters a vector")
    if not isinstance(right, dict):
        return {labels: value for labels, value in left.items() if compare(value, right)}
    return {
        labels: value
        for labels, value in left.items()
        if labels in right and compare(value, right[labels])
    }


def _key(labels: Labels, matching: _Matching) -> Labels:
    return frozenset(label for label in labels if label[0] not in matching.ignoring)


def _quantiles(share: float, vector: Vector) -> Vector:
    groups: dict[Labels, dict[float, float]] = {}
    for labels, value in vector.items():
        bound = float(dict(labels)["le"])
        rest = frozenset(label for label in labels if label[0] != "le")
        groups.setdefault(rest, {})[bound] = value
    return {labels: _quantile(share, buckets) for labels, buckets in groups.items()}


def _quantile(share: float, buckets: dict[float, float]) -> float:
    bounds = sorted(buckets)
    if not math.isinf(bounds[-1]) or len(bounds) < 2 or buckets[bounds[-1]] == 0:
        return math.nan
    rank = share * buckets[bounds[-1]]
    index = next(i for i, bound in enumerate(bounds) if buckets[bound] >= rank)
    if math.isinf(bounds[index]):
        return bounds[-2]
    if index == 0 and bounds[0] <= 0:
        return bounds[0]
    low, below = (bounds[index - 1], buckets[bounds[index - 1]]) if index else (0.0, 0.0)
    return low + (bounds[index] - low) * (rank - below) / (buckets[bounds[index]] - below)


def scalars(value: Value) -> list[float]:
    """All numbers of a result."""
    return list(value.values()) if isinstance(value, dict) else [value]


def labels_of(value: Value) -> list[dict[str, Any]]:
    """Labels of each series of a result."""
    return [dict(labels) for labels in value] if isinstance(value, dict) else []
