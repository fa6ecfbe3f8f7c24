"""Recorded workload that is read from a file line by line."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile, takewhile
from math import inf
from pathlib import Path
from typing import TextIO

from cluster.errors import WorkloadFailed
from cluster.simulator.workloads.arrivals import Arrival
from cluster.simulator.workloads.traces.row import CSV, Format, Row, mooncake


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded requests of ``file``, whose first line determines its format.

    Only the requests of a window are used: from ``begin_s`` to before ``end_s``, in seconds after
    the file's first request. They arrive ``speed`` times as fast as recorded. Raises WorkloadFailed
    for an invalid window or speed.
    """

    file: Path
    begin_s: float = 0.0
    end_s: float = inf
    speed: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.begin_s < self.end_s:
            raise WorkloadFailed("a trace's window must begin at 0 s or later, and before its end")
        if not 0 < self.speed < inf:
            raise WorkloadFailed(f"a trace's speed must be above 0 and finite, not {self.speed:g}")

    def arrivals(self) -> Iterator[Arrival]:
        """Yield the requests of the window in order of arrival.

        Their ``at`` is the recorded time since the beginning of the window, divided by ``speed``.
        Raises WorkloadFailed for an unreadable file, an invalid line or an empty window.
        """
        later = dropwhile(lambda each: each.at < self.begin_s, self._recorded())
        is_empty = True
        for arrival in takewhile(lambda each: each.at < self.end_s, later):
            is_empty = False
            yield replace(arrival, at=(arrival.at - self.begin_s) / self.speed)
        if is_empty:
            raise WorkloadFailed(
                f"{self.file}: no request from {self.begin_s:g} to {self.end_s:g} s"
            )

    def _recorded(self) -> Iterator[Arrival]:
        begin, last = None, -inf
        for row, arrival in _read(self.file):
            if arrival.at < last:
                raise row.wrong(
                    f"arrives {last - arrival.at:g} s before the request on the line above"
                )
            last = arrival.at
            begin = last if begin is None else begin
            yield replace(arrival, at=last - begin)


def _read(path: Path) -> Iterator[tuple[Row, Arrival]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            is_json = file.readline().lstrip().startswith("{")
            file.seek(0)
            yield from _json_lines(path, file) if is_json else _csv_lines(path, file)
    except OSError as error:
        raise WorkloadFailed(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise WorkloadFailed(f"{path}: is not UTF-8 text") from None


def _json_lines(path: Path, file: TextIO) -> Iterator[tuple[Row, Arrival]]:
    for line, text in enumerate(file, start=1):
        if text.isspace():
            continue
        try:
            row = Row(path, line, json.loads(text))
        except (ValueError, RecursionError):
            raise WorkloadFailed(f"{path}:{line}: is not JSON") from None
        yield row, mooncake(row)


def _csv_lines(path: Path, file: TextIO) -> Iterator[tuple[Row, Arrival]]:
    rows = csv.DictReader(file, strict=True)
    try:
        read = _format(path, rows.fieldnames or ())
        for fields in rows:
            row = Row(path, rows.line_num, fields)
            if (arrival := read(row)) is not None:
                yield row, arrival
    except csv.Error as error:
        raise WorkloadFailed(f"{path}:{rows.line_num}: is not CSV: {error}") from None


def _format(path: Path, columns: Sequence[str]) -> Format:
    for known, read in CSV.items():
        if known <= set(columns):
            return read
    raise WorkloadFailed(
        f"{path}:1: unknown format; known are Azure's and BurstGPT's CSV and Mooncake's JSON"
    )
