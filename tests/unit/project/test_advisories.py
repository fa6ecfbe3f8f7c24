"""SECURITY.md lists each relevant published advisory once, with tests that exist."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SECTION = (ROOT / "SECURITY.md").read_text().partition("## Published advisories")[2]
ROWS = [row.split("|") for row in re.findall(r"^\| (.*) \|$", SECTION, re.MULTILINE)[1:]]
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", SECTION)))
ADVISORIES = {
    "pickles of nodes": ["2025-32444", "2025-47277", "2025-30165", "2024-11041"],
    "pickles of anybody": ["2026-3059", "2026-3060", "2026-7301", "2026-3989", "2025-10164"],
    "tensors of clients": ["2025-62164"],
    "numbers of outputs": ["2026-34756", "2024-8939"],
    "grammars": ["2025-48942", "2025-48943", "2025-48944"],
    "chat templates": ["2025-62426", "2025-61620"],
    "headers": ["2025-48956"],
    "empty prompts": ["2024-8768"],
    "keys": ["2025-59425"],
    "prefix caches": ["2025-46570", "2025-25183", "2026-3108"],
    "model files": ["2026-53923", "2025-24357", "2026-22807"],
    "media": ["2026-0599", "2025-6242", "2026-24779", "2026-22773"],
    "Ray": ["2023-48022", "2023-48023", "2025-62593"],
    "Lua of Redis": ["2025-49844"],
}


def test_advisories_are_listed_once() -> None:
    listed = Counter(re.findall(r"CVE-(\d{4}-\d+)", " ".join(row[0] for row in ROWS)))
    assert listed == Counter(number for numbers in ADVISORIES.values() for number in numbers)
    assert "GBNF" in SECTION


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip())
def test_advisory_row_names_a_measure_and_a_test(row: list[str]) -> None:
    _, there, here, shown_by = row
    assert there.strip() and here.strip() and "::" in shown_by


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_advisory_test_exists(path: str, name: str) -> None:
    assert name in _tests_of(ROOT / path)


@cache
def _tests_of(path: Path) -> set[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {it.name for it in ast.walk(ast.parse(path.read_text())) if isinstance(it, functions)}


def test_ray_version_rejects_browser_requests() -> None:
    """Ray rejects requests of browsers since version 2.52."""
    assert tuple(map(int, version("ray").split(".")[:2])) >= (2, 52)
    least = re.search(r'"ray\[[^"]*?[>=]=(\d+)\.(\d+)', (ROOT / "pyproject.toml").read_text())
    assert least is not None and tuple(map(int, least.groups())) >= (2, 52)
