"""Ledgers compared with the model of tests/support/ledger/ledger_machine.py.

The ledgers are in memory, on a server, and on a server whose answers are lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.support.example_counts import examples
from tests.support.ledger.ledger_backends import InMemory, OnServer
from tests.support.ledger.ledger_machine import Run, check
from tests.support.ledger.ledgers import valkey_server


@pytest.fixture
def run() -> Iterator[Run]:
    with asyncio.Runner() as runner:
        yield runner.get_loop().run_until_complete


def test_memory_ledger_matches_model(run: Run) -> None:
    check(run, InMemory(), histories=examples(500))


def test_valkey_ledger_matches_model(run: Run) -> None:
    with valkey_server(also="+copy") as url:
        check(run, OnServer(url), histories=examples(60))


def test_valkey_ledger_with_lost_answers_matches_model(run: Run) -> None:
    with valkey_server(also="+copy") as url:
        check(run, OnServer(url, loses_answers=True), histories=examples(25), tries=2)
