"""Ledgers against their model, with new histories until the soak's duration has passed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.soak.duration import rounds
from tests.support.ledger.ledger_backends import InMemory, OnServer
from tests.support.ledger.ledger_machine import Run, check
from tests.support.ledger.ledgers import valkey_server

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]
_HISTORIES = 100


@pytest.fixture
def run() -> Iterator[Run]:
    with asyncio.Runner() as runner:
        yield runner.get_loop().run_until_complete


def search(run: Run, backend: InMemory | OnServer, tries: int = 1) -> None:
    lived = 0
    for _ in rounds():
        check(run, backend, _HISTORIES, tries=tries)
        lived += _HISTORIES
    print(f"\n{lived} histories")


def test_memory_ledger_matches_model_in_many_histories(run: Run) -> None:
    search(run, InMemory())


def test_valkey_ledger_matches_model_in_many_histories(run: Run) -> None:
    with valkey_server(also="+copy") as url:
        search(run, OnServer(url))


def test_ledger_losing_answers_matches_model_in_many_histories(run: Run) -> None:
    with valkey_server(also="+copy") as url:
        search(run, OnServer(url, loses_answers=True), tries=2)
