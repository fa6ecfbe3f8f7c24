"""Numbers of examples and parameters: fewer in `make test` than in `make test-long`."""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest
from _pytest.mark.structures import ParameterSet

#: Share of its examples that a test runs.
_SHARE = float(os.environ.get("EXAMPLES", "0.1"))


def examples(number: int) -> int:
    """Return how many of a test's ``number`` examples this run tries."""
    return max(1, round(number * _SHARE))


def one_in(every: int, values: Iterable[object]) -> list[ParameterSet]:
    """Return parameters of which all but one in ``every`` are only in the long tests."""
    return [long(value) if at % every else pytest.param(value) for at, value in enumerate(values)]


def long(*values: object) -> ParameterSet:
    """Return a parameter set that is used only in the long tests."""
    return pytest.param(*values, marks=pytest.mark.long)
