"""Uses of the wall clock, which may differ by minutes between machines of one cluster."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
#: Functions that return the time of day.
WALL_CLOCK = {"time", "time_ns", "now", "utcnow", "today", "ctime", "localtime", "gmtime"}
OWNERS = {"time", "datetime", "date"}
FILES = [
    path
    for part in ("router", "worker", "proto/everlift")
    for path in sorted((ROOT / part).rglob("*.py"))
    if "_pb2" not in path.name
]


def looks(tree: ast.AST) -> Iterator[str]:
    """Yield all references to the wall clock: ``time.time``, and ``from time import time``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in OWNERS and node.attr in WALL_CLOCK:
                yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.module in OWNERS:
            yield from (f"{node.module}.{a.name}" for a in node.names if a.name in WALL_CLOCK)


@pytest.mark.parametrize("code", ["import time\ntime.time()", "from time import time"])
def test_wall_clock_calls_are_detected(code: str) -> None:
    assert list(looks(ast.parse(code))) == ["time.time"]


def test_wall_clock_is_read_only_in_listed_files() -> None:
    """Times are the ledger's, and durations are measured on a monotonic clock.

    Exceptions are the trace of a rejected request, which the ledger has no record of, the dates of
    keys, and the dates in answers.
    """
    found = {
        str(path.relative_to(ROOT)): list(looks(ast.parse(path.read_text()))) for path in FILES
    }
    assert len(found) > 100
    looking = {path: names for path, names in found.items() if names}
    assert looking == {
        "router/auth/access.py": ["time.time"],
        "router/api/openai/answering.py": ["time.time"],
        "router/api/http_api.py": ["time.time"],
        "router/api/openai/conversations/conversations.py": ["time.time"],
        "router/api/openai/responses/responses.py": ["time.time"],
        "router/observability/traces/traces.py": ["time.time"],
    }
