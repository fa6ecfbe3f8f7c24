"""The list of cases is complete, and names tests that exist."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

TESTS = Path(__file__).parents[2]
CASES: list[dict[str, Any]] = yaml.safe_load((TESTS / "cases.yaml").read_text())
NAMED = sorted({name for case in CASES for name in case.get("tests", ())})


def test_cases_are_numbered_in_order() -> None:
    assert [case["number"] for case in CASES] == list(range(1, 84))


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["number"]))
def test_case_has_a_test_or_a_reason_why_not(case: dict[str, Any]) -> None:
    assert case["fault"] and case["outcome"]
    assert case.get("tests") or case.get("untested")


@pytest.mark.parametrize("named", NAMED)
def test_named_test_exists(named: str) -> None:
    path, _, name = named.partition("::")
    assert name in _tests_of(TESTS.parent / path)


@cache
def _tests_of(path: Path) -> set[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, functions)}
