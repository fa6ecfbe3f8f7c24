"""The tables of cases have every number, and name tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
ROWS = re.findall(r"^\| (\d+) \|(.*)\|$", (TESTS / "cases.md").read_text(), re.MULTILINE)
NAMED = sorted(set(re.findall(r"`tests/([\w/]+\.py)::(\w+)`", " ".join(row for _, row in ROWS))))


def test_all_are_there_in_their_order() -> None:
    assert [int(number) for number, _ in ROWS] == list(range(1, 84))


@pytest.mark.parametrize(("number", "row"), ROWS)
def test_a_case_has_a_test_or_a_reason_why_not(number: str, row: str) -> None:
    *_, shown_by = row.split("|")
    assert "::" in shown_by or re.search(r"None: \w+", shown_by), number


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_the_test_exists(path: str, name: str) -> None:
    assert name in _tests_of(TESTS / path)


@cache
def _tests_of(path: Path) -> set[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, functions)}
