"""Comparison of two reports. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cluster.bench.report import Json, ours
from cluster.bench.wording import LATENCIES, NOTHING, goodput, shown, statistics

#: Relative difference up to which a figure is called neither better nor worse.
_SAME = 0.02
_THROUGHPUTS = {
    "request_throughput": "requests a second",
    "request_goodput": "good requests a second",
    "output_throughput": "output tokens a second",
    "total_token_throughput": "input and output tokens a second",
}
#: Top-level keys of a report whose values must agree for figures to be comparable.
_SETTINGS = (
    "backend",
    "model_id",
    "tokenizer_id",
    "num_prompts",
    "request_rate",
    "burstiness",
    "max_concurrency",
)


@dataclass(frozen=True, slots=True)
class Row:
    """Values of one figure in reports A and B; ``is_more_better`` is True if larger is better."""

    title: str
    a: float
    b: float
    is_more_better: bool

    @property
    def ratio(self) -> float | None:
        """Value in B divided by the value in A; None if A's is 0."""
        return self.b / self.a if self.a else None

    @property
    def ratio_text(self) -> str:
        return NOTHING if self.ratio is None else f"{self.ratio:.3f}"

    @property
    def verdict(self) -> str:
        if self.ratio is None or abs(self.ratio - 1) <= _SAME:
            return ""
        return "better" if (self.ratio > 1) == self.is_more_better else "worse"


@dataclass(frozen=True, slots=True)
class Comparison:
    rows: Sequence[Row]
    #: reasons why the two reports may not be comparable
    warnings: Sequence[str]

    def cells(self) -> Iterator[tuple[str, ...]]:
        """Yield the cells of each row, in the order of COMPARED_COLUMNS."""
        for row in self.rows:
            yield row.title, shown(row.a), shown(row.b), row.ratio_text, row.verdict


def compare(a: Json, b: Json) -> Comparison:
    """Compare two reports; figures that only one of them has are left out.

    The result has a row per figure, and warnings about circumstances in which the figures may not
    be comparable, such as different options or failed requests.
    """
    return Comparison(tuple(_rows(a, b)), tuple(_warnings(a, b)))


def _rows(a: Json, b: Json) -> Iterator[Row]:
    for key, title in _THROUGHPUTS.items():
        yield from _row(key, title, a, b, is_more_better=True)
    words = [word for word in statistics(a) if word in {*statistics(b), "mean", "median"}]
    for name, title in LATENCIES.items():
        for word in words:
            yield from _row(f"{word}_{name}_ms", f"{title}, {word}, ms", a, b, is_more_better=False)


def _row(key: str, title: str, a: Json, b: Json, *, is_more_better: bool) -> Iterator[Row]:
    if a.get(key) is not None and b.get(key) is not None:
        yield Row(title, a[key], b[key], is_more_better)


def _warnings(a: Json, b: Json) -> Iterator[str]:
    for name, of_a, of_b in _settings(a, b):
        if of_a != of_b:
            yield f"{name} differs: {shown(of_a)} in A, {shown(of_b)} in B"
    if bool(ours(a)) != bool(ours(b)):
        yield (
            "one report is from another generator: its latencies may count from the time of sending"
        )
    for letter, found in (("A", a), ("B", b)):
        if found.get("failed"):
            yield f"{found['failed']} requests of {letter} failed; latencies exclude them"
        for mark in ours(found).get("marks", ()):
            yield f"of {letter}: {mark}"


def _settings(a: Json, b: Json) -> Iterator[tuple[str, object, object]]:
    for name in _SETTINGS:
        yield name, a.get(name), b.get(name)
    if ours(a) and ours(b):
        loads = ours(a)["load"], ours(b)["load"]
        for name in dict.fromkeys((*loads[0], *loads[1])):
            yield name, loads[0].get(name), loads[1].get(name)
        yield "goodput", goodput(ours(a)["goodput_ms"]), goodput(ours(b)["goodput_ms"])
