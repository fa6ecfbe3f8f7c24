"""Tenants take turns by what they were served, which differs by no more than is promised."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everlift.request_id import qualified, tenant_of
from router.admission.policy import Fifo, HighestResponseRatio, Policy, ShortestWork
from router.admission.queue import AdmissionQueue
from router.admission.services import INPUT, OUTPUT, Services
from router.admission.waiting import Waiting

SLOTS, LONGEST_PROMPT, LONGEST_OUTPUT = 6, 40, 30
WEIGHTS = {"half": 0.5, "double": 2.0}
POLICIES: tuple[Policy, ...] = (Fifo(), ShortestWork(0.1), HighestResponseRatio())


def waiting(
    tenant: str, number: int, prompt: int = 10, output: int = 10, arrived: float = 0.0
) -> Waiting:
    total = prompt + output
    name = qualified(tenant, str(number))
    return Waiting(name, "g", arrived, prompt, output, predicted_total=total)


def services() -> Services:
    return Services(lambda tenant: WEIGHTS.get(tenant, 1.0))


@dataclass
class _Running:
    tenant: str
    left: int


class Engine:
    """Requests of tenants that always have some that wait, a token each at every step; what they
    were served, beside what the counters say."""

    def __init__(self, policy: Policy, tenants: dict[str, list[tuple[int, int]]]) -> None:
        self.services = services()
        self.queue = AdmissionQueue(policy, 0.0, self.services)
        self.served = dict.fromkeys(tenants, 0.0)
        self.lengths = tenants
        self.number = 0
        self.running: list[_Running] = []
        for tenant in tenants:
            for _ in range(3):
                self.submit(tenant)

    def submit(self, tenant: str) -> None:
        prompt, output = self.lengths[tenant][self.number % len(self.lengths[tenant])]
        self.number += 1
        self.queue.push(waiting(tenant, self.number, prompt, output, self.number / 10))

    def step(self) -> None:
        while len(self.running) < SLOTS:
            gone = self.queue.pop(self.number / 10 + 5)
            tenant = tenant_of(gone.request_id)
            self.running.append(_Running(tenant, gone.max_tokens))
            self.served[tenant] += INPUT * gone.prefill_tokens
            self.submit(tenant)
        for each in self.running:
            each.left -= 1
            self.served[each.tenant] += OUTPUT
            self.services.charge(each.tenant, OUTPUT)
        self.running = [each for each in self.running if each.left]


LENGTHS = st.lists(
    st.tuples(st.integers(1, LONGEST_PROMPT), st.integers(1, LONGEST_OUTPUT)),
    min_size=1,
    max_size=5,
)


@given(st.lists(LENGTHS, min_size=2, max_size=4), st.sampled_from(POLICIES))
def test_tenants_that_always_wait_are_served_about_the_same(
    lengths: list[list[tuple[int, int]]], policy: Policy
) -> None:
    """By the bound, whatever each of them asks for; from any moment to any other."""
    engine = Engine(policy, {f"t{n}": each for n, each in enumerate(lengths)})
    bound = max(INPUT * LONGEST_PROMPT, OUTPUT * SLOTS * (LONGEST_PROMPT + LONGEST_OUTPUT))
    differences: dict[tuple[str, str], list[float]] = {}
    for _ in range(150):
        engine.step()
        for one in engine.served:
            for other in engine.served:
                gap = engine.served[one] - engine.served[other]
                differences.setdefault((one, other), []).append(gap)
                assert abs(engine.services.of(one) - engine.services.of(other)) <= bound
    for gaps in differences.values():
        assert max(gaps) - min(gaps) <= 2 * bound


def test_without_turns_who_asks_for_more_gets_more() -> None:
    """What turns are for: by arrival, who asks for ten times as much gets it."""
    queue = AdmissionQueue(Fifo())
    for number in range(110):
        queue.push(waiting("much" if number % 11 else "little", number, arrived=float(number)))
    gone = [queue.pop(200.0).request_id for _ in range(55)]
    assert sum("much" in each for each in gone) == 50
    queue = AdmissionQueue(Fifo(), 0.0, services())
    for number in range(110):
        queue.push(waiting("much" if number % 11 else "little", number, arrived=float(number)))
    gone = [queue.pop(200.0).request_id for _ in range(20)]
    assert sum("much" in each for each in gone) == 10


def test_a_weight_is_a_share() -> None:
    engine = Engine(Fifo(), {"half": [(10, 10)], "double": [(10, 10)], "other": [(10, 10)]})
    for _ in range(2000):
        engine.step()
    whole = sum(engine.served.values())
    shares = [engine.served[tenant] / whole for tenant in ("half", "other", "double")]
    assert shares == pytest.approx([1 / 7, 2 / 7, 4 / 7], abs=0.02)


def test_who_asked_for_nothing_has_nothing_saved_up() -> None:
    counters = services()
    counters.come("busy")
    counters.charge("busy", 1000)
    counters.come("new")
    assert counters.of("new") == 1000
    counters.go("new")
    counters.go("busy")
    counters.charge("busy", 500)
    counters.come("later")
    assert counters.of("later") == 1500
    counters.charge("later", 9)
    counters.come("busy")
    assert (counters.of("busy"), counters.of("later")) == (1509, 1509)


def test_who_comes_and_goes_takes_no_more_memory() -> None:
    counters = services()
    counters.come("least")
    for _ in range(1000):
        counters.come("other")
        counters.charge("other", 5)
        counters.go("other")
    assert len(counters._least) <= 2


def test_the_next_leader_goes_on_with_the_counters() -> None:
    before = services()
    for tenant, cost in (("a", 100), ("b", 400), ("c", 300), ("d", 50)):
        before.come(tenant)
        before.charge(tenant, cost)
    before.go("b")
    told = before.told(3)
    assert sorted(told) == [("a", 0), ("c", 300), ("d", 50)]
    after = services()
    after.recall(told)
    for tenant in "acd":
        after.come(tenant)
    assert [after.of(tenant) for tenant in "acd"] == [0, 300, 50]
    assert after.of("b") == 0
