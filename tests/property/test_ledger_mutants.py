"""Mutation tests: no check of the ledger's scripts can be missing unnoticed.

Each paragraph of tests/support/ledger/ledger_mutants.txt removes or inverts one check; the contract
test that it names must then fail. In ``make test-long``, the model's random histories must find the
mutants too.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from itertools import product
from typing import Any

import pytest
from redis.asyncio import Redis

from router.ledger.redis import scripts
from router.ledger.redis.scripts import Script
from tests.contract import (
    test_ledger,
    test_ledger_keys,
    test_ledger_objects,
    test_ledger_prompts,
    test_ledger_tenants,
)
from tests.support.ledger.ledger_backends import OnServer
from tests.support.ledger.ledger_machine import check
from tests.support.ledger.ledger_mutants import MUTANTS, Mutant
from tests.support.ledger.ledgers import RETENTION_S, connected, valkey_server

History = Callable[..., Coroutine[Any, Any, None]]

#: Most random histories to find a mutant.
_MAX_HISTORIES = 1_500


def histories(module: object) -> dict[str, History]:
    """Return the coroutine tests of a module, by name."""
    return {
        name: it
        for name, it in vars(module).items()
        if name.startswith("test_") and inspect.iscoroutinefunction(it)
    }


HISTORIES = {
    name: history
    for module in (
        test_ledger,
        test_ledger_keys,
        test_ledger_objects,
        test_ledger_prompts,
        test_ledger_tenants,
    )
    for name, history in histories(module).items()
}
NAMED = sorted({mutant.caught_by for mutant in MUTANTS})
SCRIPTS = sorted({mutant.script for mutant in MUTANTS})


def cases(history: History) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each run of a parametrized test."""
    marks = getattr(history, "pytestmark", [])
    axes = [list(_axis(mark)) for mark in marks if mark.name == "parametrize"]
    for combination in product(*axes):
        yield {name: value for values in combination for name, value in values.items()}


def _axis(mark: pytest.Mark) -> Iterator[dict[str, Any]]:
    names, rows = mark.args
    for row in rows:
        if isinstance(row, type(pytest.param())):
            row = row.values
        elif isinstance(names, str):
            row = (row,)
        yield dict(zip([names] if isinstance(names, str) else names, row, strict=True))


async def live(url: str, history: History) -> None:
    """Run all cases of a contract test with its fixtures."""
    for arguments in cases(history):
        async with AsyncExitStack() as stack:
            for name in inspect.signature(history).parameters:
                if name not in arguments:
                    arguments[name] = await _provided(stack, url, name, arguments)
            await history(**arguments)


async def _provided(stack: AsyncExitStack, url: str, name: str, others: dict[str, Any]) -> object:
    match name:
        case "ledger":
            return await stack.enter_async_context(connected(url))
        case "expiring":
            return await stack.enter_async_context(connected(url, retention=RETENTION_S))
        case "tick":
            return lambda: asyncio.sleep(0.01)
        case "keys":
            client = await stack.enter_async_context(Redis.from_url(url, decode_responses=True))
            return test_ledger_keys.Keys(client, others["ledger"])
        case _:
            raise AssertionError(f"who provides {name}?")


async def survives(url: str, history: History) -> bool:
    """Return whether a history passes with the mutant's ledger.

    Failed expectations of pytest, which are no Exceptions, count as failures too.
    """
    try:
        await live(url, history)
    except (Exception, pytest.fail.Exception):
        return False
    return True


def mutate(monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    """Apply the mutant to every script that contains the mutated text."""
    for name, script in vars(scripts).copy().items():
        if isinstance(script, Script):
            texts = [mutant.applied("common"), mutant.applied(script.name)]
            monkeypatch.setattr(scripts, name, scripts.script(script.name, *texts))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with valkey_server(also="+copy") as url:
        yield url


def test_mutant_text_occurs_once_in_script() -> None:
    elsewhere = [str(it) for it in MUTANTS if scripts.text(it.script).count(it.find) != 1]
    same = [str(it) for it in MUTANTS if it.applied(it.script) == scripts.text(it.script)]
    assert (elsewhere, same) == ([], [])


def test_mutants_cover_every_deciding_script() -> None:
    known = {script.name for script in vars(scripts).values() if isinstance(script, Script)}
    read_only = {"audit", "leases", "get_load", "set_scaling", "get_scaling"}
    # Its decision is not visible in a request's history (tests/contract/test_active_cluster.py).
    read_only |= {"active"}
    assert {"common", *known} - read_only == set(SCRIPTS)


async def test_mutants_load_as_scripts(url: str) -> None:
    """A mutant that the server cannot load would fail every history."""
    async with Redis.from_url(url) as client:
        for mutant in MUTANTS:
            name = "append" if mutant.script == "common" else mutant.script
            texts = [mutant.applied("common"), mutant.applied(name)]
            assert await client.script_load(scripts.script(name, *texts).source)


@pytest.mark.long
async def test_histories_pass_without_mutant(url: str) -> None:
    for name in NAMED:
        await live(url, HISTORIES[name])


@pytest.mark.long
@pytest.mark.parametrize("script", SCRIPTS)
async def test_mutants_are_caught_by_named_tests(
    url: str, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    survivors = []
    for mutant in MUTANTS:
        if mutant.script == script:
            with monkeypatch.context() as patch:
                mutate(patch, mutant)
                if await survives(url, HISTORIES[mutant.caught_by]):
                    survivors.append(mutant.why)
    assert not survivors


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("mutant", [it for it in MUTANTS if not it.is_beyond_chance], ids=str)
def test_random_histories_catch_mutant(
    url: str, mutant: Mutant, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch, mutant)
    with asyncio.Runner() as runner, pytest.raises(BaseException):  # noqa: B017
        check(runner.get_loop().run_until_complete, OnServer(url), _MAX_HISTORIES, shrinks=False)
