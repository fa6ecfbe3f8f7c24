"""Lines of a trace file, and a parser for each format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from math import isfinite, nan
from pathlib import Path
from typing import Protocol

from cluster.errors import WorkloadFailed
from cluster.simulator.workloads.arrivals import Arrival

#: Largest number of tokens that a request can state.
_MOST = (1 << 31) - 1


class Row:
    """Line of a trace, with its fields by name.

    The methods that read a field raise WorkloadFailed with the file, the line and the cause if the
    field is missing or invalid.
    """

    def __init__(self, file: Path, line: int, fields: object) -> None:
        self._place = f"{file}:{line}"
        if not isinstance(fields, dict):
            raise self.wrong("must be an object of named fields")
        self._fields = fields

    def wrong(self, cause: str) -> WorkloadFailed:
        return WorkloadFailed(f"{self._place}: {cause}")

    def count(self, name: str, least: int) -> int:
        text = self._field(name)
        try:
            number = int(str(text))
        except ValueError:
            raise self.wrong(f"{name} must be a whole number, not {text!r}") from None
        if number < least:
            raise self.wrong(f"{name} must be at least {least}, not {number}")
        if number > _MOST:
            raise self.wrong(f"{name} must be at most {_MOST}, not {number}")
        return number

    def number(self, name: str) -> float:
        text = self._field(name)
        try:
            number = float(str(text))
        except ValueError:
            number = nan
        if not isfinite(number):
            raise self.wrong(f"{name} must be a number, not {text!r}")
        return number

    def timestamp(self, name: str) -> float:
        """Return the time in the field ``name`` in seconds since 1970.

        The field must be an ISO 8601 date with a time of day; without a time zone it is in UTC.
        """
        text = self._field(name)
        try:
            timestamp = datetime.fromisoformat(str(text))
        except ValueError:
            raise self.wrong(f"{name} must be a date and a time, not {text!r}") from None
        return (timestamp if timestamp.tzinfo else timestamp.replace(tzinfo=UTC)).timestamp()

    def text(self, name: str) -> str:
        return str(self._field(name))

    def counts(self, name: str) -> Sequence[int]:
        value = self._field(name)
        if not isinstance(value, list) or not all(type(each) is int for each in value):
            raise self.wrong(f"{name} must be a list of whole numbers")
        return value

    def _field(self, name: str) -> object:
        value = self._fields.get(name)
        if value is None:
            raise self.wrong(f"{name} is missing")
        return value


_MAX_TOKENS = 4096
_MOONCAKE_PART_TOKENS = 512


class Format(Protocol):
    def __call__(self, row: Row) -> Arrival | None:
        """Return the request of a line, or None if the line is to be skipped.

        ``at`` of the request is in seconds after an origin that depends on the format. Raises
        WorkloadFailed for a missing or invalid field.
        """
        ...


def azure(row: Row) -> Arrival:
    output_tokens = row.count("GeneratedTokens", least=1)
    return Arrival(
        row.timestamp("TIMESTAMP"),
        row.count("ContextTokens", least=1),
        output_tokens,
        max(_MAX_TOKENS, output_tokens),
    )


def burstgpt(row: Row) -> Arrival | None:
    prompt_tokens = row.count("Request tokens", least=0)
    output_tokens = row.count("Response tokens", least=0)
    if not prompt_tokens or not output_tokens:
        return None
    return Arrival(
        row.number("Timestamp"),
        prompt_tokens,
        output_tokens,
        max(_MAX_TOKENS, output_tokens),
        application=row.text("Log Type"),
    )


def mooncake(row: Row) -> Arrival:
    """Return the request of a line in Mooncake's format.

    ``prefix`` has the hash ids of the full blocks of the prompt. A last block that is not full is
    left out, because no other prompt shares it.
    """
    prompt_tokens = row.count("input_length", least=1)
    output_tokens = row.count("output_length", least=1)
    whole_parts = prompt_tokens // _MOONCAKE_PART_TOKENS
    return Arrival(
        row.number("timestamp") / 1000,
        prompt_tokens,
        output_tokens,
        max(_MAX_TOKENS, output_tokens),
        prefix=tuple(row.counts("hash_ids")[:whole_parts]),
        prefix_part_tokens=_MOONCAKE_PART_TOKENS,
    )


#: Formats by the columns that identify them.
CSV: Mapping[frozenset[str], Format] = {
    frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}): azure,
    frozenset({"Timestamp", "Request tokens", "Response tokens", "Log Type"}): burstgpt,
}
