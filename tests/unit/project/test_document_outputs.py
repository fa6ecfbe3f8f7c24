"""Outputs in documents: the errors and table headers are texts of the product."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.documents import ROOT, documents

PRODUCT = ("cluster", "proto/everlift", "router", "worker")
PATHS = [pytest.param(ROOT / path, id=str(path)) for path in documents()]
#: Minimum number of letters of a template; a shorter one matches too many texts.
_LEAST_LETTERS = 9


@cache
def _nodes() -> tuple[ast.AST, ...]:
    paths = (path for part in PRODUCT for path in (ROOT / part).rglob("*.py"))
    sources = (path.read_text() for path in paths if "_pb2" not in path.name)
    return tuple(node for source in sources for node in ast.walk(ast.parse(source)))


@cache
def templates() -> tuple[re.Pattern[str], ...]:
    """Return a pattern of each text in the product's code, in which any value may be inserted."""
    patterns = set()
    for node in _nodes():
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        literals = [
            part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else None
            for part in parts
        ]
        if sum(c.isalpha() for literal in literals for c in literal or "") >= _LEAST_LETTERS:
            patterns.add("".join(".*?" if part is None else re.escape(part) for part in literals))
    return tuple(map(re.compile, patterns))


@cache
def words() -> frozenset[str]:
    """Return all texts of the product's code, and names of fields as titles show them."""
    texts = {
        node.value
        for node in _nodes()
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    names = {
        node.target.id.replace("_", " ")
        for node in _nodes()
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return frozenset(texts | names)


def unknown_errors(text: str) -> list[str]:
    """Return the errors of commands and HTTP answers that match no text of the product."""
    shown = re.findall(r'^error: (.*)$|"error":{"message":"(.*?)","type"', text, re.MULTILINE)
    errors = (command or answer for command, answer in shown)
    return [error for error in errors if not any(each.match(error) for each in templates())]


def unknown_headers(text: str) -> list[str]:
    """Return the headers of commands' tables that are no text of the product."""
    return [header for header in _headers(text) if header not in words()]


def _headers(text: str) -> Iterator[str]:
    for row in re.findall(r"^(.*)\n *─{10,} *$", text, re.MULTILINE):
        yield from re.split(r"\s{2,}", row.strip())


@pytest.mark.parametrize("path", PATHS)
def test_document_errors_are_those_of_the_product(path: Path) -> None:
    assert unknown_errors(path.read_text()) == []


@pytest.mark.parametrize("path", PATHS)
def test_document_tables_have_headers_of_the_product(path: Path) -> None:
    assert unknown_headers(path.read_text()) == []


def test_document_outputs_include_errors_and_tables() -> None:
    guides = "".join(path.read_text() for path in (ROOT / "deploy" / "guides").glob("*.md"))
    assert guides.count("\nerror: ") > 5
    assert len(list(_headers(guides))) > 20


def test_unknown_errors_reports_an_outdated_error() -> None:
    shown = "error: no files of 'a/b': it failed\nerror: no cluster answers at 127.0.0.1:1: refused"
    assert unknown_errors(shown) == ["no files of 'a/b': it failed"]


def test_unknown_headers_reports_an_outdated_header() -> None:
    shown = f" attempt  again  requests per minute \n {'─' * 20} \n"
    assert unknown_headers(shown) == ["again"]
