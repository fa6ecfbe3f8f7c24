"""What holds of the queue: what is configured, and what operators set in the ledger."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest

from everlift.settings import SettingsError
from router.admission.policy import Rules
from router.config import RouterConfig
from router.ledger.base import QueuePolicy
from router.ledger.memory import MemoryLedger
from router.rulebook import SETTINGS, Rulebook
from tests.ledgers import Clock

CONFIG = RouterConfig(model="fake", order="fifo", max_queued=7)
CONFIGURED = Rules.of(CONFIG)
SET = Rules.of(replace(CONFIG, order="deadline", max_queued=500))
CHANGES = {"order": "deadline", "max_queued": 500}


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
    assert (await other.rulebook.set(CHANGES)).overridden == ("order", "max_queued")
    assert other.subject.obeyed == [SET]
    await replica.beat()
    await replica.beat()
    assert replica.subject.obeyed == [SET]


async def test_a_router_that_starts_finds_what_was_set(replica: Replica) -> None:
    await replica.rulebook.set(CHANGES)
    started = Replica(replica.ledger)
    await started.beat()
    assert started.rulebook.rules == SET


async def test_what_is_taken_back_is_as_configured_and_nothing_given_changes_nothing(
    replica: Replica,
) -> None:
    await replica.rulebook.set(CHANGES)
    await replica.rulebook.set({})
    assert replica.rulebook.rules == SET
    await replica.rulebook.set({"order": None})
    assert replica.rulebook.rules == Rules.of(replace(CONFIG, max_queued=500))
    await replica.rulebook.set({"max_queued": None})
    assert replica.rulebook.rules == CONFIGURED
    assert len(replica.subject.obeyed) == 3
    assert replica.rulebook.holding.overridden == ()


async def test_a_ledger_that_forgot_what_was_set_is_told(replica: Replica) -> None:
    await replica.rulebook.set(CHANGES)
    replica.ledger._policy = QueuePolicy()
    await replica.beat()
    policy = await replica.ledger.policy()
    assert policy.values == {"order": "deadline", "max_queued": "500"}
    assert replica.subject.obeyed == [SET]


async def test_what_is_not_known_here_is_as_configured(replica: Replica) -> None:
    """A newer router may have set it."""
    texts = {"order": "newer", "newer": "1", "lease": "9", "patience": "-1", "max_queued": "500"}
    await replica.ledger.set_policy(texts)
    await replica.beat()
    assert replica.rulebook.rules == Rules.of(replace(CONFIG, max_queued=500))
    assert replica.rulebook.holding.overridden == ("max_queued",)


async def test_every_setting_is_kept_as_it_was_said(replica: Replica) -> None:
    said = {
        "order": "hrrn",
        "max_queued": 9,
        "queue_ttl": 2.5,
        "refuse_late": True,
        "undated_due": 0.1 + 0.2,
        "patience": 0.0,
        "starvation": 1e-7,
        "class_floor": 0.0,
        "fair_share": False,
        "tpot_target": 0.05,
    }
    assert tuple(said) == SETTINGS
    assert (await replica.rulebook.set(said)).values == said
    other = Replica(replica.ledger)
    await other.beat()
    assert other.rulebook.holding == replica.rulebook.holding
    assert other.rulebook.rules == Rules.of(replace(CONFIG, **said))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("order", "lifo"),
        ("max_queued", 0),
        ("undated_due", 0.0),
        ("undated_due", nan),
        ("patience", -0.1),
        ("patience", inf),
        ("starvation", nan),
        ("class_floor", 0.6),
        ("class_floor", nan),
        ("queue_ttl", -1.0),
        ("queue_ttl", nan),
        ("tpot_target", inf),
        ("lease", 9.0),
    ],
)
async def test_what_cannot_be_configured_cannot_be_set(
    replica: Replica, name: str, value: object
) -> None:
    with pytest.raises(SettingsError, match=name):
        await replica.rulebook.set({"max_queued": 5, name: value})
    assert await replica.ledger.policy() == QueuePolicy()
