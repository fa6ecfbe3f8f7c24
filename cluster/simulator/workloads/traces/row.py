"""One line of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from math import isfinite, nan
from pathlib import Path

from cluster.errors import WorkloadFailed

#: As requests can say it.
_MOST = (1 << 31) - 1


class Row:
    """Its fields by their names, as they are asked for. All methods raise WorkloadFailed, with the
    place and the cause."""

    def __init__(self, file: Path, line: int, fields: object) -> None:
        self._place = f"{file}:{line}"
        if not isinstance(fields, dict):
            raise self.wrong("must be fields by their names")
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

    def moment(self, name: str) -> float:
        """Seconds since 1970 of a date with a time of day."""
        text = self._field(name)
        try:
            moment = datetime.fromisoformat(str(text))
        except ValueError:
            raise self.wrong(f"{name} must be a date and a time, not {text!r}") from None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()

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
