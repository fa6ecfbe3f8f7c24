"""What holds of the queue: what is configured, and what operators set in the ledger."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.admission.policy import Rules
from router.config import RouterConfig
from router.ledger.base import QueuePolicy
from router.ledger.memory import MemoryLedger
from router.rulebook import Rulebook
from tests.ledgers import Clock

CONFIG = RouterConfig(model="fake", order="fifo", max_queued=7)
CONFIGURED = Rules.of(CONFIG)
SET = Rules.of(replace(CONFIG, order="deadline", max_queued=500))


class Subject:
    def __init__(self) -> None:
        self.obeyed: list[Rules] = []

    def obey(self, rules: Rules) -> None:
        self.obeyed.append(rules)


class Replica:
    def __init__(self, ledger: MemoryLedger) -> None:
        self.ledger = ledger
        self.subject = Subject()
        self.rulebook = Rulebook(CONFIG, ledger, [self.subject])

    async def beat(self) -> None:
        membership = await self.ledger.beat("gateway", "here:1", 1.0)
        await self.rulebook.keep_up(membership.policy_version)


@pytest.fixture
def ledger() -> MemoryLedger:
    return MemoryLedger(Clock())


@pytest.fixture
def replica(ledger: MemoryLedger) -> Replica:
    return Replica(ledger)


async def test_where_nothing_was_set_the_configuration_holds(replica: Replica) -> None:
    await replica.beat()
    assert (replica.rulebook.rules, replica.subject.obeyed) == (CONFIGURED, [])


async def test_what_is_set_through_one_router_holds_at_all_from_their_next_beat(
    replica: Replica,
) -> None:
    other = Replica(replica.ledger)
    assert await other.rulebook.set("deadline", 500) == SET
    assert other.subject.obeyed == [SET]
    await replica.beat()
    await replica.beat()
    assert replica.subject.obeyed == [SET]


async def test_a_router_that_starts_finds_what_was_set(replica: Replica) -> None:
    await replica.rulebook.set("deadline", 500)
    started = Replica(replica.ledger)
    await started.beat()
    assert started.rulebook.rules == SET


async def test_what_is_taken_back_is_as_configured_and_nothing_given_changes_nothing(
    replica: Replica,
) -> None:
    await replica.rulebook.set("deadline", 500)
    assert await replica.rulebook.set(None, None) == SET
    assert await replica.rulebook.set("", None) == Rules.of(replace(CONFIG, max_queued=500))
    assert await replica.rulebook.set(None, 0) == CONFIGURED
    assert len(replica.subject.obeyed) == 3


async def test_a_ledger_that_forgot_what_was_set_is_told(replica: Replica) -> None:
    await replica.rulebook.set("deadline", 500)
    replica.ledger._policy = QueuePolicy()
    await replica.beat()
    policy = await replica.ledger.policy()
    assert (policy.order, policy.max_queued) == ("deadline", 500)
    assert replica.subject.obeyed == [SET]


async def test_an_order_that_is_not_known_here_is_the_configured_one(replica: Replica) -> None:
    await replica.ledger.set_policy(order="newer", max_queued=500)
    await replica.beat()
    assert replica.rulebook.rules == Rules.of(replace(CONFIG, max_queued=500))
