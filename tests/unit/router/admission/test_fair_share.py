"""Fair share of tenants: token counters, and the bound on the gap in service."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everlift.request_id import qualify, tenant_of
from everlift.v1 import session_pb2 as pb
from router.admission.fair_share import FairShare, TokenCounters
from router.admission.parking import Wait
from router.admission.policy import (
    EarliestDeadline,
    Fifo,
    HighestResponseRatio,
    Policy,
    ShortestWork,
)
from router.admission.queue import AdmissionQueue
from router.admission.request import QueueKey, Waiting

PROMPT, OUTPUT = 1.0, 2.0
SLOTS, LONGEST_PROMPT, LONGEST_OUTPUT = 6, 40, 30
WEIGHTS = {"half": 0.5, "double": 2.0}
POLICIES: tuple[Policy, ...] = (Fifo(), ShortestWork(0.1), HighestResponseRatio())


def waiting(
    tenant: str,
    number: int,
    prompt: int = 10,
    output: int = 10,
    arrived: float = 0.0,
    **fields: object,
) -> Waiting:
    name = qualify(tenant, str(number))
    made = Waiting(name, "g", arrived, prompt, output, queue_key=QueueKey(prompt + output))
    return made._replace(**fields)  # type: ignore[arg-type]


def fair_share() -> FairShare:
    made = FairShare(PROMPT, OUTPUT, lambda tenant: WEIGHTS.get(tenant, 1.0))
    made.handover_ended()
    return made


def queue_in_turns(policy: Policy, share: FairShare | None = None) -> AdmissionQueue:
    return AdmissionQueue(policy, 0.0, share or fair_share(), is_fair=True)


def served(tenant: str, tokens: int, priority: int = 0) -> list[pb.ServedTokens]:
    return [pb.ServedTokens(tenant=tenant, tokens=tokens, priority=priority)]


@dataclass
class _Running:
    tenant: str
    left: int


class Engine:
    """Engine whose requests generate a token in each step, for tenants that are always backlogged.

    Output tokens are reported to the fair share every ``report_every`` steps. ``served`` is the
    actual service of each tenant, to compare with its counter.
    """

    def __init__(
        self, policy: Policy, tenants: dict[str, list[tuple[int, int]]], report_every: int = 1
    ) -> None:
        self.share = fair_share()
        self.queue = queue_in_turns(policy, self.share)
        self.served = dict.fromkeys(tenants, 0.0)
        self.lengths = tenants
        self.number = self.steps = 0
        self.running: list[_Running] = []
        self._report_every = report_every
        self._unreported: dict[str, int] = defaultdict(int)
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
            self.served[tenant] += PROMPT * gone.prefill_tokens
            self.submit(tenant)
        for each in self.running:
            each.left -= 1
            self.served[each.tenant] += OUTPUT
            self._unreported[each.tenant] += 1
        self.running = [each for each in self.running if each.left]
        self.steps += 1
        if self.steps % self._report_every == 0:
            for tenant, tokens in self._unreported.items():
                self.share.charge_outputs(served(tenant, tokens))
            self._unreported.clear()

    def counter(self, tenant: str) -> float:
        return self.share.counters(0).counter_of(tenant)


LENGTHS = st.lists(
    st.tuples(st.integers(1, LONGEST_PROMPT), st.integers(1, LONGEST_OUTPUT)),
    min_size=1,
    max_size=5,
)


@given(
    st.lists(LENGTHS, min_size=2, max_size=4),
    st.sampled_from(POLICIES),
    st.sampled_from([1, 4]),
)
def test_fair_share_bounds_service_gap_of_backlogged_tenants(
    lengths: list[list[tuple[int, int]]], policy: Policy, report_every: int
) -> None:
    """The bound holds for any requests, and between any two moments."""
    engine = Engine(policy, {f"t{n}": each for n, each in enumerate(lengths)}, report_every)
    late = OUTPUT * SLOTS * (report_every - 1)
    bound = late + max(PROMPT * LONGEST_PROMPT, OUTPUT * SLOTS * (LONGEST_PROMPT + LONGEST_OUTPUT))
    differences: dict[tuple[str, str], list[float]] = {}
    for _ in range(150):
        engine.step()
        for one in engine.served:
            for other in engine.served:
                gap = engine.served[one] - engine.served[other]
                differences.setdefault((one, other), []).append(gap)
                assert abs(engine.counter(one) - engine.counter(other)) <= bound
        assert engine.share.gap <= bound
    for gaps in differences.values():
        assert max(gaps) - min(gaps) <= 2 * (bound + late)


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.floats(0, 3), st.integers(1, 400), st.booleans()),
        min_size=1,
        max_size=60,
    ),
    st.sampled_from([Fifo(), EarliestDeadline(5.0), ShortestWork(0.1)]),
)
def test_fair_share_keeps_policy_order_within_a_tenant(
    arrivals: list[tuple[str, float, int, bool]], policy: Policy
) -> None:
    queue, alone, now = queue_in_turns(policy), defaultdict(list), 0.0
    left = defaultdict(list)
    for number, (tenant, later, tokens, leaves) in enumerate(arrivals):
        now += later
        one = waiting(tenant, number, tokens, arrived=now)
        queue.push(one)
        alone[tenant].append(one)
        if leaves:
            gone = queue.pop(now)
            tenant = tenant_of(gone.request_id)
            assert gone == min(alone[tenant], key=policy.place)
            alone[tenant].remove(gone)
            left[tenant].append(gone)


def test_fair_share_equalizes_tenants_of_unequal_demand() -> None:
    """A tenant with ten times the demand would get ten times the service in order of arrival."""
    for is_fair, expected in ((False, 50), (True, 27)):
        queue = AdmissionQueue(Fifo(), 0.0, fair_share(), is_fair=is_fair)
        for number in range(550):
            tenant = "much" if number % 11 else "little"
            queue.push(waiting(tenant, number, arrived=float(number)))
        gone = [queue.pop(200.0).request_id for _ in range(55)]
        assert sum("much" in each for each in gone) == expected


def test_fair_share_toggles_while_requests_are_queued() -> None:
    queue = AdmissionQueue(Fifo(), 0.0, fair_share())
    for number in range(20):
        queue.push(waiting("much" if number < 15 else "little", number, arrived=float(number)))
    first = [tenant_of(queue.pop(0.0).request_id) for _ in range(5)]
    for is_fair in (True, False):
        for _ in queue.reorder(Fifo(), is_fair=is_fair):
            pass
        first.append(tenant_of(queue.pop(0.0).request_id))
    assert first == ["much"] * 5 + ["little", "much"]


def test_tenant_weight_sets_share_of_service() -> None:
    engine = Engine(Fifo(), {"half": [(10, 10)], "double": [(10, 10)], "other": [(10, 10)]})
    for _ in range(2000):
        engine.step()
    whole = sum(engine.served.values())
    shares = [engine.served[tenant] / whole for tenant in ("half", "other", "double")]
    assert shares == pytest.approx([1 / 7, 2 / 7, 4 / 7], abs=0.02)


def test_fair_share_keeps_separate_counters_per_class() -> None:
    """Waiting in a low class earns no advantage in a high one, and costs nothing there."""
    share = fair_share()
    queue = queue_in_turns(Fifo(), share)
    queue.push(waiting("poor", 1))
    queue.push(waiting("rich", 2, priority=1))
    queue.push(waiting("rich", 3, priority=1, arrived=1.0))
    share.charge_outputs(served("rich", 500, priority=1))
    queue.push(waiting("poor", 4, priority=1))
    assert share.counters(1).counter_of("poor") == share.counters(1).counter_of("rich") == 1000
    assert share.counters(0).counter_of("rich") == share.counters(0).counter_of("poor") == 0


def test_fair_share_charges_a_prompt_once_across_leaders() -> None:
    share = fair_share()
    queue = queue_in_turns(Fifo(), share)
    for entry in (
        pb.Waiting(request_id="t/new", prompt_tokens=10),
        pb.Waiting(request_id="t/accepted", prompt_tokens=10, accepted=True),
        pb.Waiting(request_id="t/back", prompt_tokens=15, accepted=True, attempt=1),
    ):
        queue.push(Waiting.from_proto("g", entry))
        queue.pop(0.0)
    queue.note_direct_dispatch(waiting("t", 4), 0)
    assert share.counters(0).counter_of("t") == 30 * PROMPT


# counters


def test_token_counters_give_idle_tenants_no_credit() -> None:
    counters = TokenCounters()
    counters.note_queued("busy", lift=True)
    counters.charge("busy", 1000)
    counters.note_queued("new", lift=True)
    assert counters.counter_of("new") == 1000
    counters.note_removed("new")
    counters.note_removed("busy")
    counters.charge("busy", 500)
    counters.note_queued("later", lift=True)
    assert counters.counter_of("later") == 1500
    counters.charge("later", 9)
    counters.note_queued("busy", lift=True)
    assert (counters.counter_of("busy"), counters.counter_of("later")) == (1509, 1509)
    assert counters.gap == 0


def test_token_counter_is_not_lifted_by_replaced_request() -> None:
    share = fair_share()
    queue = queue_in_turns(Fifo(), share)
    for tenant, tokens in (("least", 0), ("most", 500)):
        queue.push(waiting(tenant, 1))
        share.charge_outputs(served(tenant, tokens))
    queue.push(waiting("least", 1, output=3))
    assert share.counters(0).counter_of("least") == 0


ANYWHERE, AT_WORKER = Wait("", 0, 0.0, 0.0, 9.0), Wait("w", 0, 0.0, 0.0, 9.0)


@pytest.mark.parametrize(("wait", "level"), [(ANYWHERE, 1000), (AT_WORKER, 0)])
def test_parked_request_sets_level_only_if_worker_is_known(wait: Wait, level: int) -> None:
    share = fair_share()
    queue = queue_in_turns(Fifo(), share)
    parked = waiting("parked", 1)
    queue.push(parked)
    queue.park(parked.request_id, wait)
    queue.push(waiting("busy", 1))
    share.charge_outputs(served("busy", 500))
    queue.push(waiting("new", 1))
    assert share.counters(0).counter_of("new") == level
    assert share.gap == 1000 - level
    queue.unpark(parked.request_id, 1.0)
    assert share.counters(0).counter_of("parked") == level


def test_parked_request_leaves_with_its_cost_and_its_count() -> None:
    share = fair_share()
    queue = queue_in_turns(Fifo(), share)
    requests = [waiting("parked", number) for number in range(3)]
    for each in requests:
        queue.push(each)
        queue.park(each.request_id, ANYWHERE)
    queue.push(waiting("busy", 1))
    share.charge_outputs(served("busy", 500))
    assert [(it.tenant, it.queued) for it in share.queues()] == [("parked", 3), ("busy", 1)]
    assert share.work_before(requests[0]) == 3 * 10 * (1 + 1)
    queue.dispatch(requests[0], 0)
    assert share.counters(0).counter_of("parked") == 1000 + 10 * PROMPT
    queue.withdraw(requests[1].request_id, "g")
    queue.push(requests[2]._replace(max_tokens=1))
    assert share.counters(0).waiting == {"parked": 1, "busy": 1}
    assert [it.queued for it in share.queues()] == [1, 1]


def test_token_counters_bound_memory_of_returning_tenants() -> None:
    counters = TokenCounters()
    counters.note_queued("least", lift=True)
    for _ in range(1000):
        counters.note_queued("other", lift=True)
        counters.charge("other", 5)
        counters.note_removed("other")
    assert len(counters._least) <= 2


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 30), st.booleans()), max_size=400))
def test_token_counters_are_unchanged_by_forgetting(
    steps: list[tuple[int, int, bool]],
) -> None:
    pruned, other = TokenCounters(), TokenCounters()
    other._prune_threshold = 1 << 30
    here: list[str] = []
    for number, cost, comes in steps:
        for counters in (pruned, other):
            if comes or not here:
                counters.note_queued(f"t{number}", lift=True)
                counters.charge(f"t{number}", cost)
            else:
                counters.note_removed(here[number % len(here)])
        if comes or not here:
            here.append(f"t{number}")
        else:
            del here[number % len(here)]
        assert pruned.gap == other.gap
        assert all(pruned.counter_of(tenant) == other.counter_of(tenant) for tenant in here)


def test_token_counters_forget_finished_tenants() -> None:
    counters = TokenCounters()
    for number in range(2000):
        counters.note_queued(f"t{number}", lift=True)
        counters.charge(f"t{number}", 5)
        counters.note_removed(f"t{number}")
    assert len(counters) < 200


# change of leader


def test_next_leader_continues_the_counters_in_any_order() -> None:
    before = fair_share()
    for tenant, tokens in (("a", 50), ("b", 250), ("c", 150), ("d", 25)):
        before.note_queued(waiting(tenant, 1))
        before.charge_outputs(served(tenant, tokens))
    before.note_removed(waiting("b", 1))
    report = before.report()
    assert {(it.tenant, it.counter) for it in report} == {("b", 500), ("c", 300), ("d", 50)}
    for first, *others in ("acd", "dca"):
        after = FairShare(PROMPT, OUTPUT, lambda tenant: 1.0)
        after.note_queued(waiting(first, 1))
        after.charge_outputs(served(first, 1))
        after.restore_counters(report)
        for tenant in others:
            after.note_queued(waiting(tenant, 1))
        after.handover_ended()
        counters = {tenant: after.counters(0).counter_of(tenant) for tenant in "acd"}
        assert counters.pop(first) == {"a": 0, "d": 50}[first] + OUTPUT
        assert counters.items() <= {("a", 0), ("c", 300), ("d", 50)}
        for tenant in ("new", "b"):
            after.note_queued(waiting(tenant, 1))
        assert after.counters(0).counter_of("new") == {"a": OUTPUT, "d": 0}[first]
        assert after.counters(0).counter_of("b") == 500


def test_next_leader_learns_the_most_served_tenants() -> None:
    share = fair_share()
    share.note_queued(waiting("least", 1))
    for number in range(3000):
        share.note_queued(waiting(f"t{number}", 1))
        share.charge_outputs(served(f"t{number}", number))
    report = share.report()
    assert len(report) == 512
    assert {it.counter for it in report} == {OUTPUT * n for n in range(3000 - 512, 3000)}
