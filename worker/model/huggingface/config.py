"""Typed access to a Hugging Face config; a value of the wrong type is refused, naming its key.

In these files a key that is missing and a key that is null differ: a missing key stands for the
family's default, and null for no value.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from worker.model.spec import UnsupportedModel

Json = dict[str, Any]

#: Largest integer of a config: that of int32.
LARGEST_INTEGER = 2**31 - 1
#: Smallest and largest positive numbers of a config: those that fp32 represents at full precision.
_SMALLEST_NUMBER, _LARGEST_NUMBER = 2.0**-126, (2 - 2.0**-23) * 2.0**127


class HfConfig:
    """JSON object ``values`` of a config; ``name`` identifies it in error messages.

    The typed getters raise UnsupportedModel if a value is not of the requested type. They also
    raise it for a missing key or null, unless their docstring names another result or
    ``otherwise`` is not None.
    """

    def __init__(self, values: Json, name: str) -> None:
        self._values = values
        self._name = name

    @staticmethod
    def read(path: Path) -> HfConfig:
        """Return the config in the JSON file ``path``.

        Raises UnsupportedModel if the file is missing or is not a JSON object.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            gguf_file = next(path.parent.glob("*.gguf"), None)
            raise UnsupportedModel(
                f"{path.parent} is not a Hugging Face model: it has no {path.name}"
                + (f"; for the GGUF file in it, set the model to {gguf_file}" if gguf_file else "")
            ) from None
        except (ValueError, RecursionError) as error:
            raise UnsupportedModel(f"{path} is not JSON: {error}") from None
        if not isinstance(content, dict):
            raise UnsupportedModel(f"{path} is not a JSON object")
        return HfConfig(content, path.name)

    def with_defaults(self, defaults: Json) -> HfConfig:
        """Return a copy that also has the items of ``defaults`` whose keys are missing here."""
        return HfConfig(defaults | self._values, self._name)

    def replaced(self, values: Json) -> HfConfig:
        """Return a copy in which the items of ``values`` replace those with the same keys."""
        return HfConfig(self._values | values, self._name)

    def section(self, key: str) -> HfConfig:
        """Return the object under ``key``, or an empty one if ``key`` is missing or null."""
        values = self.get(key, {})
        if not isinstance(values, dict):
            raise self._wrong(key, "an object")
        return HfConfig(values, f"{self._name}: {key}")

    def __bool__(self) -> bool:
        return bool(self._values)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, otherwise: Any = None) -> Any:
        """Return the value under ``key``, or ``otherwise`` if it is missing or null."""
        value = self._values.get(key)
        return otherwise if value is None else value

    def flag(self, key: str) -> bool:
        """Return the boolean under ``key``, or False if it is missing or null."""
        value = self.get(key, False)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def positive(self, key: str, otherwise: int | None = None) -> int:
        """Return the positive integer under ``key``, or ``otherwise`` if it is missing or null.

        Raises UnsupportedModel in that case if ``otherwise`` is None, and if the integer is larger
        than LARGEST_INTEGER.
        """
        value = self.get(key, otherwise)
        if type(value) is not int or not 1 <= value <= LARGEST_INTEGER:
            raise self._wrong(key, f"a positive integer of at most {LARGEST_INTEGER}")
        return value

    def natural(self, key: str) -> int:
        """Return the integer under ``key``, which must be at least 0."""
        value = self.get(key)
        if type(value) is not int or value < 0:
            raise self._wrong(key, "an integer, 0 or more")
        return value

    def naturals(self, key: str) -> tuple[int, ...]:
        """Return the integers in the list under ``key``; an empty tuple if it is missing or null.

        Raises UnsupportedModel if an integer is negative.
        """
        values = self.get(key, [])
        if not isinstance(values, list) or any(type(v) is not int or v < 0 for v in values):
            raise self._wrong(key, "a list of integers, each 0 or more")
        return tuple(values)

    def number(self, key: str, otherwise: float | None = None) -> float:
        """Return the positive number under ``key``, or ``otherwise`` if it is missing or null."""
        value = self.get(key, otherwise)
        if not _is_number(value) or value < _SMALLEST_NUMBER:
            raise self._wrong(key, "a positive number in the range of fp32")
        return float(value)

    def optional_positive(self, key: str) -> int | None:
        """Return the positive integer under ``key``, or None if it is missing or null."""
        return None if self.get(key) is None else self.positive(key)

    def optional_number(self, key: str) -> float | None:
        """Return the positive number under ``key``, or None if it is missing or null."""
        return None if self.get(key) is None else self.number(key)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Return the ``count`` numbers in the list under ``key``."""
        values = self.get(key)
        if not isinstance(values, list) or len(values) != count or not all(map(_is_number, values)):
            raise self._wrong(key, f"a list of {count} numbers")
        return tuple(map(float, values))

    def strings(self, key: str) -> tuple[str, ...] | None:
        """Return the strings in the list under ``key``, or None if it is missing or null."""
        values = self.get(key)
        if values is None:
            return None
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise self._wrong(key, "a list of strings")
        return tuple(values)

    def refuse_unless(self, key: str, *supported: object) -> None:
        """Raise UnsupportedModel unless the value of ``key`` is in ``supported``.

        A missing key and null are accepted too.
        """
        value = self.get(key)
        if value is not None and value not in supported:
            names = ", ".join(map(repr, (*supported, None)))
            raise UnsupportedModel(
                f"{self._name}: {key} {value!r} is not supported; supported: {names}"
            )

    def _wrong(self, key: str, expected: str) -> UnsupportedModel:
        value = self._values.get(key)
        return UnsupportedModel(f"{self._name}: {key} must be {expected}, not {value!r}")


def _is_number(value: object) -> bool:
    """Return whether a JSON value is a number that fp32 can hold, and neither NaN nor infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= _LARGEST_NUMBER
