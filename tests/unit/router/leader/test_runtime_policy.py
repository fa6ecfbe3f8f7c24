"""Settings of the queue in effect: configured ones, and those that operators set in the ledger."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import get_args

import pytest

from everlift.engine_policy import EnginePolicy
from everlift.errors import SettingsError
from everlift.v1 import session_pb2
from router import console
from router.admission.policy import ORDERS, Rules
from router.config import RouterConfig
from router.leader.adapter_catalogue import AdapterEntry
from router.leader.policy_store import SETTINGS, RuntimePolicy
from router.ledger.base import ClusterPolicy
from router.ledger.memory.memory import MemoryLedger
from tests.support.ledger.ledgers import Clock

CONFIG = RouterConfig(model="fake", order="fifo", max_queued=7)
CONFIGURED = Rules.of(CONFIG)
SET = Rules.of(replace(CONFIG, order="deadline", max_queued=500))
CHANGES = {"order": "deadline", "max_queued": 500}


class Subject:
    def __init__(self) -> None:
        self.obeyed: list[Rules] = []

    def apply_rules(self, rules: Rules) -> None:
        self.obeyed.append(rules)


class Engines:
    def __init__(self) -> None:
        self.policies: list[tuple[int, str]] = []

    def set_policy(self, policy: session_pb2.EnginePolicy) -> None:
        self.policies.append((policy.version, policy.name))


class Catalogue:
    def __init__(self) -> None:
        self.entries: Mapping[str, AdapterEntry] = {}

    def set_catalogue(self, entries: Mapping[str, AdapterEntry]) -> None:
        self.entries = entries


class Replica:
    def __init__(self, ledger: MemoryLedger) -> None:
        self.ledger = ledger
        self.subject, self.engines = Subject(), Engines()
        self.catalogue = Catalogue()
        self.runtime_policy = RuntimePolicy(
            CONFIG, ledger, [self.subject], [self.engines], [self.catalogue]
        )

    async def heartbeat(self) -> None:
        membership = await self.ledger.heartbeat("gateway", "here:1", 1.0)
        await self.runtime_policy.sync(membership.policy_version)


@pytest.fixture
def ledger() -> MemoryLedger:
    return MemoryLedger(Clock())


@pytest.fixture
def replica(ledger: MemoryLedger) -> Replica:
    return Replica(ledger)


async def test_policy_defaults_to_the_configuration(replica: Replica) -> None:
    await replica.heartbeat()
    assert (replica.runtime_policy.rules, replica.subject.obeyed) == (CONFIGURED, [])


async def test_policy_reaches_all_routers_at_the_next_heartbeat(
    replica: Replica,
) -> None:
    other = Replica(replica.ledger)
    assert (await other.runtime_policy.set(CHANGES)).overridden == ("order", "max_queued")
    assert other.subject.obeyed == [SET]
    await replica.heartbeat()
    await replica.heartbeat()
    assert replica.subject.obeyed == [SET]


async def test_config_change_holds_unless_operators_set_a_value(
    replica: Replica,
) -> None:
    replica.runtime_policy.configure(replace(CONFIG, order="deadline", max_queued=77))
    assert replica.subject.obeyed == [Rules.of(replace(CONFIG, order="deadline", max_queued=77))]
    await replica.runtime_policy.set(CHANGES)
    replica.runtime_policy.configure(replace(CONFIG, max_queued=88, queue_ttl=9.0))
    assert replica.subject.obeyed[-1] == replace(SET, queue_ttl=9.0)
    await replica.runtime_policy.set(dict.fromkeys(CHANGES))
    assert replica.runtime_policy.rules == Rules.of(replace(CONFIG, max_queued=88, queue_ttl=9.0))


async def test_engines_get_the_policy_version_of_all_settings(
    replica: Replica,
) -> None:
    versions = []
    for changes in ({"engine_policy": "slai"}, {"max_queued": 500}, {"engine_policy": None}):
        await replica.runtime_policy.set(changes)
        versions.append((await replica.ledger.policy()).version)
    assert replica.engines.policies == [*zip(versions, ("slai", "slai", "default"), strict=True)]
    assert versions == sorted({*versions})


async def test_unknown_engine_policy_is_forwarded_to_workers(replica: Replica) -> None:
    policy = await replica.ledger.set_policy({"engine_policy": "newer"})
    await replica.heartbeat()
    assert replica.engines.policies == [(policy.version, "newer")]
    assert replica.runtime_policy.effective_settings.values["engine_policy"] == "default"


async def test_unknown_policy_name_suggests_the_nearest(replica: Replica) -> None:
    with pytest.raises(SettingsError, match="slai, static, magnus, not 'statik'; did you mean st"):
        await replica.runtime_policy.set({"engine_policy": "statik"})
    assert replica.engines.policies == []


async def test_started_router_loads_the_stored_policy(replica: Replica) -> None:
    await replica.runtime_policy.set(CHANGES)
    started = Replica(replica.ledger)
    await started.heartbeat()
    assert started.runtime_policy.rules == SET


async def test_reset_policy_is_the_configured_one(
    replica: Replica,
) -> None:
    await replica.runtime_policy.set(CHANGES)
    await replica.runtime_policy.set({})
    assert replica.runtime_policy.rules == SET
    await replica.runtime_policy.set({"order": None})
    assert replica.runtime_policy.rules == Rules.of(replace(CONFIG, max_queued=500))
    await replica.runtime_policy.set({"max_queued": None})
    assert replica.runtime_policy.rules == CONFIGURED
    assert len(replica.subject.obeyed) == 3
    assert replica.runtime_policy.effective_settings.overridden == ()


async def test_policy_is_rewritten_to_a_ledger_that_lost_it(replica: Replica) -> None:
    await replica.runtime_policy.set(CHANGES)
    replica.ledger._policy = ClusterPolicy()
    await replica.heartbeat()
    policy = await replica.ledger.policy()
    assert policy.values == {"order": "deadline", "max_queued": "500"}
    assert replica.subject.obeyed == [SET]


async def test_unknown_stored_settings_fall_back_to_configuration(replica: Replica) -> None:
    """A newer router may have set them."""
    texts = {
        "order": "newer",
        "newer": "1",
        "lease": "9",
        "ageing_factor": "-1",
        "max_queued": "500",
    }
    await replica.ledger.set_policy(texts)
    await replica.heartbeat()
    assert replica.runtime_policy.rules == Rules.of(replace(CONFIG, max_queued=500))
    assert replica.runtime_policy.effective_settings.overridden == ("max_queued",)


async def test_policy_settings_round_trip_through_the_ledger(replica: Replica) -> None:
    said = {
        "order": "hrrn",
        "max_queued": 9,
        "queue_ttl": 2.5,
        "refuse_late": True,
        "undated_due": 0.1 + 0.2,
        "ageing_factor": 0.0,
        "starvation": 1e-7,
        "class_floor": 0.0,
        "fair_share": False,
        "tpot_target": 0.05,
        "engine_policy": "slai",
    }
    assert tuple(said) == SETTINGS
    assert (await replica.runtime_policy.set(said)).values == said
    other = Replica(replica.ledger)
    await other.heartbeat()
    assert other.runtime_policy.effective_settings == replica.runtime_policy.effective_settings
    assert other.engines.policies == replica.engines.policies
    del said["engine_policy"]
    assert other.runtime_policy.rules == Rules.of(replace(CONFIG, **said))  # type: ignore[arg-type]


def test_console_offers_all_orders_and_engine_policies() -> None:
    page = (Path(console.__file__).parent / "page" / "policies.js").read_text()
    offered = [re.findall(r'"(\w+)"', names) for names in re.findall(r"\[(.*)\]", page)]
    assert offered == [[*ORDERS], ["default", *get_args(EnginePolicy)]]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("order", "lifo"),
        ("max_queued", 0),
        ("undated_due", 0.0),
        ("undated_due", nan),
        ("ageing_factor", -0.1),
        ("ageing_factor", inf),
        ("starvation", nan),
        ("class_floor", 0.6),
        ("class_floor", nan),
        ("queue_ttl", -1.0),
        ("queue_ttl", nan),
        ("tpot_target", inf),
        ("lease", 9.0),
    ],
)
async def test_policy_rejects_values_invalid_in_configuration(
    replica: Replica, name: str, value: object
) -> None:
    with pytest.raises(SettingsError, match=name):
        await replica.runtime_policy.set({"max_queued": 5, name: value})
    assert await replica.ledger.policy() == ClusterPolicy()


SQL = AdapterEntry("fake", "sql=/adapters/sql", "digest")


async def test_adapters_reach_all_routers_beside_the_policy(ledger: MemoryLedger) -> None:
    one, two = Replica(ledger), Replica(ledger)
    await one.runtime_policy.set(CHANGES)
    await one.runtime_policy.set_adapter("sql", SQL)
    assert one.catalogue.entries == {"sql": SQL}
    await two.heartbeat()
    assert two.catalogue.entries == two.runtime_policy.adapters == {"sql": SQL}
    assert two.subject.obeyed[-1] == SET
    assert [*two.runtime_policy.effective_settings.overridden] == [*CHANGES]
    newer = replace(SQL, digest="another")
    await two.runtime_policy.set_adapter("sql", newer)
    await one.heartbeat()
    assert one.catalogue.entries == {"sql": newer}
    await two.runtime_policy.set_adapter("sql", None)
    await one.heartbeat()
    assert one.catalogue.entries == {} and one.subject.obeyed[-1] == SET


async def test_invalid_adapter_in_the_ledger_is_ignored(ledger: MemoryLedger) -> None:
    replica = Replica(ledger)
    for text in ("no", "{}", SQL.to_text().replace("sql=", "")):
        await ledger.set_policy({"adapter bad": text, "adapter sql": SQL.to_text()})
        await replica.heartbeat()
        assert replica.catalogue.entries == {"sql": SQL}
