"""Dispatch by cached prefixes: the choice of a worker, and how long a request waits for one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everlift.hashes import BLOCK_SIZE, CHUNK_SIZE
from everlift.v1 import session_pb2 as pb
from router.admission.policy import Rules
from router.admission.request import Waiting
from router.admission.throughput import Work
from router.admission.workers import Capacity, Departures, Load
from router.config import RouterConfig
from tests.support.router.admission_support import CONFIG, Cluster

CAPACITY = Capacity(max_num_seqs=4, num_blocks=10_000)
#: A prompt of 40 chunks, which takes 10.24 s at the 1,000 tokens a second of ``paced``.
CHAIN = list(range(1, 41))
TOKENS = 40 * CHUNK_SIZE
LOCAL = replace(CONFIG, max_pending_prefill=2048, local_depth=0, max_queued=1000)


#: Delay of one request a second while the worker ``warm`` computes the 1,024 uncached tokens.
WARM_DELAY_S = 1.024**2 / 2


class Warm(Cluster):
    """A cluster whose worker ``warm`` has the first 36 chunks of CHAIN, and ``cold`` has none."""

    def __init__(
        self,
        warm: Load,
        cold: Load,
        config: RouterConfig = LOCAL,
        weight_of: Callable[[str], float] | None = None,
    ) -> None:
        super().__init__(config, weight_of)
        self.connect()
        self.add_worker("warm", warm, capacity=CAPACITY)
        self.add_worker("cold", cold, capacity=CAPACITY)
        self.placement.index.update("warm", CHAIN[:36], ())
        self._numbers = count(2)

    def ask(self, request_id: str, **fields: object) -> None:
        self.enqueue(
            request_id, prompt_tokens=TOKENS, max_tokens=10, chunks=CHAIN, accepted=True, **fields
        )

    def report(self, worker_id: str, now: float, **load: int) -> None:
        number = next(self._numbers)
        self.placement.report(worker_id, Load(number, work=Work(step=number), **load), now)

    def is_parked(self, request_id: str) -> bool:
        return self.queue._queue.is_parked(request_id)

    def set_departures(self, warm_per_s: float, cold_per_s: float) -> None:
        self.placement.workers["warm"].departures = departing(warm_per_s)
        self.placement.workers["cold"].departures = departing(cold_per_s)

    def place_at(self, now: float) -> list[tuple[str, str]]:
        placed = self.leader_state.place(now, now, 100, lambda: next(self._numbers))
        return [(it.waiting.request_id, it.worker_id) for it in placed]


def departing(per_s: float) -> Departures:
    return Departures(per_s=per_s)


def test_request_goes_to_the_worker_with_its_prefix() -> None:
    cluster = Warm(Load(1, num_running=3, committed_tokens=900), Load(1))
    cluster.ask("a")
    assert cluster.place_at(0.0) == [("a", "warm")]
    assert cluster.placement.workers["warm"].unacknowledged.tokens == 4 * CHUNK_SIZE


def test_request_avoids_warm_worker_with_long_prefill() -> None:
    cluster = Warm(Load(1, num_running=1, pending_prefill_tokens=1000), Load(1))
    cluster.placement.index.update("warm", (), CHAIN[1:])
    cluster.ask("a")
    assert cluster.place_at(0.0) == [("a", "cold")]


def test_request_waits_for_a_busy_worker_with_its_prefix() -> None:
    cluster = Warm(Load(1, num_running=4), Load(1))
    cluster.placement.workers["warm"].departures = departing(1.0)
    cluster.ask("a")
    assert cluster.place_at(0.0) == []
    cluster.enqueue("b")
    assert cluster.place_at(0.0) == [("b", "cold")], "others do not wait behind it"
    cluster.report("warm", 1.0, num_running=3)
    assert cluster.place_at(1.0) == [("a", "warm")]


@pytest.mark.parametrize("is_direct", [False, True])
@pytest.mark.parametrize(("is_warm", "computed"), [(True, 4 * CHUNK_SIZE), (False, TOKENS)])
def test_dispatch_charges_what_its_worker_has_not_cached(
    is_warm: bool, computed: int, is_direct: bool
) -> None:
    pending = 0 if is_warm else 20_000
    load = Load(1, num_running=1, pending_prefill_tokens=pending)
    cluster = Warm(load, Load(1), weight_of=lambda tenant: 1.0)
    state, session = cluster.leader_state, 7
    known = dict(cached_tokens=36 * CHUNK_SIZE, session=session)
    if is_direct:
        message = pb.Waiting(request_id="t/a", prompt_tokens=TOKENS, chunks=CHAIN, **known)
        placed = state.reserve(Waiting.from_proto("g", message), 0.0, lambda: 9)
        assert placed is not None
        state.confirm_reservation(placed, "g", 0.0)
    else:
        cluster.ask("t/a", **known)
        [placed] = state.place(0.0, 0.0, 1, lambda: 9)
    assert placed.worker_id == ("warm" if is_warm else "cold")
    queue = cluster.queue
    assert queue._fair_share is not None
    assert queue._fair_share.counters(0).counter_of("t") == computed
    assert queue._attained_service.attained(session) == computed * CONFIG.prompt_token_weight


def test_dispatch_reports_wait_saving_and_computing_time() -> None:
    cluster = Warm(Load(1, num_running=4), Load(1))
    cluster.set_departures(1.0, 9.0)
    cluster.ask("a")
    assert cluster.place_at(0.0) == []
    cluster.report("warm", 3.0, num_running=3)
    [placed] = cluster.leader_state.place(3.0, 3.0, 1, lambda: 9)
    assert placed.queue_wait is not None
    wait = placed.queue_wait.prefix
    assert (wait.tokens, wait.seconds) == (36 * CHUNK_SIZE, 3.0)
    assert wait.compute_s == pytest.approx(36 * CHUNK_SIZE / 1000)
    assert wait.saved_s == pytest.approx(wait.compute_s - WARM_DELAY_S + TOKENS / 1000)


def test_wait_for_a_prefix_ends_at_its_saving() -> None:
    cluster = Warm(Load(1, num_running=4), Load(1))
    cluster.placement.workers["warm"].departures = departing(1.0)
    cluster.ask("a", arrived=0.0)
    assert cluster.place_at(0.0) == []
    saved_s = 36 * CHUNK_SIZE / 1000 - WARM_DELAY_S
    assert cluster.place_at(saved_s - 0.01) == []
    assert cluster.place_at(saved_s + 0.01) == [("a", "cold")]


@pytest.mark.parametrize(
    ("per_s", "delay_s"), [(0.05, 0.05 * 10.24**2 / 2), (0.3, 10.24), (9.0, 10.24)]
)
def test_saving_of_a_prefix_includes_the_delay_of_others(per_s: float, delay_s: float) -> None:
    cluster = Warm(Load(1, num_running=4), Load(1))
    cluster.placement.workers["warm"].departures = departing(1.0)
    cluster.placement.workers["cold"].departures = departing(per_s)
    cluster.ask("a", arrived=0.0)
    assert cluster.place_at(0.0) == []
    saved_s = 36 * CHUNK_SIZE / 1000 - WARM_DELAY_S + delay_s
    assert cluster.place_at(saved_s - 0.01) == []
    assert cluster.place_at(saved_s + 0.01) == [("a", "cold")]


def test_short_turn_does_not_wait_for_long_prefill_at_its_worker() -> None:
    load = Load(1, num_running=1, pending_prefill_tokens=90_000, long_prefill_tokens=90_000)
    cluster = Warm(load, Load(1))
    cluster.ask("a")
    assert cluster.place_at(0.0) == [("a", "warm")]
    assert cluster.placement.workers["warm"].unacknowledged.tokens == 4 * CHUNK_SIZE


def test_wait_for_a_prefix_counts_pending_prefill_once() -> None:
    # The request needs 10.24 s at "cold", and 1.02 s at "warm" after its pending prefill.
    soon = Warm(Load(1, num_running=1, pending_prefill_tokens=9000), Load(1))
    soon.ask("a")
    assert soon.place_at(0.0) == [] and soon.is_parked("a")
    late = Warm(Load(1, num_running=1, pending_prefill_tokens=9400), Load(1))
    late.ask("a")
    assert late.place_at(0.0) == [("a", "cold")]


def test_saving_of_a_prefix_is_independent_of_pending_prefill() -> None:
    cluster = Warm(Load(1, num_running=1, pending_prefill_tokens=6000), Load(1))
    cluster.ask("a", arrived=0.0)
    assert cluster.place_at(0.0) == []
    saved_s = 36 * CHUNK_SIZE / 1000
    assert cluster.place_at(saved_s - 0.01) == []
    assert cluster.place_at(saved_s + 0.01) == [("a", "cold")]


def test_wait_for_a_prefix_ends_only_once() -> None:
    # The estimated wait is 0, because nothing is known of the sequence that waits for blocks.
    cluster = Warm(Load(1, num_waiting=1, blocks_used=9_900), Load(1))
    cluster.ask("a", arrived=0.0)
    assert cluster.place_at(0.0) == []
    end = cluster.leader_state.next_expiry
    assert end is not None
    assert cluster.place_at(end) == [("a", "cold")]


@pytest.mark.parametrize(("retained", "evicted"), [(10_000, 320), (9_900, 220), (9_000, 0)])
def test_saving_of_a_prefix_includes_what_would_be_evicted(retained: int, evicted: int) -> None:
    cold = Load(1, blocks_retained=retained)
    cluster = Warm(Load(1, num_running=4), cold)
    cluster.placement.workers["warm"].departures = departing(1.0)
    cluster.ask("a", arrived=0.0)
    assert cluster.place_at(0.0) == []
    saved_s = (36 * CHUNK_SIZE + evicted * BLOCK_SIZE) / 1000 - WARM_DELAY_S
    assert cluster.place_at(saved_s - 0.01) == []
    assert cluster.place_at(saved_s + 0.01) == [("a", "cold")]


def test_request_waits_for_no_worker_with_unknown_departures() -> None:
    cluster = Warm(Load(1, num_running=4), Load(1))
    cluster.ask("a")
    assert cluster.place_at(0.0) == [("a", "cold")]


def test_wait_for_a_prefix_includes_earlier_waits() -> None:
    cluster = Warm(Load(1, num_running=4), Load(1))
    cluster.placement.workers["warm"].departures = departing(0.5)
    for number in range(8):
        cluster.ask(f"r{number}", arrived=float(number))
    # The prefix saves 9.2 s; each request would wait 2 s more than the one before it.
    assert cluster.place_at(8.0) == [("r4", "cold")]
    assert [cluster.is_parked(f"r{number}") for number in range(8)] == 4 * [True] + 4 * [False]


def test_choice_counts_time_to_load_host_blocks() -> None:
    cluster = Warm(Load(1), Load(1))
    slow = replace(CAPACITY, host_load_s=1.0)
    cluster.add_worker("swapped", Load(1), capacity=slow)
    cluster.placement.index.update_host("swapped", CHAIN, ())
    cluster.ask("a")
    assert cluster.place_at(0.0) == [("a", "warm")], "to load 320 blocks takes 320 s"
    cluster.placement.workers["swapped"].capacity = replace(CAPACITY, host_load_s=0.001)
    cluster.ask("b")
    assert cluster.place_at(0.0) == [("b", "swapped")]


def test_lost_worker_returns_waiting_requests() -> None:
    cluster = Warm(Load(1, num_running=4), Load(1))
    cluster.placement.workers["warm"].departures = departing(1.0)
    cluster.ask("a")
    assert cluster.place_at(0.0) == []
    cluster.placement.remove_worker("warm")
    assert cluster.place_at(0.1) == [("a", "cold")]


def test_change_of_order_returns_waiting_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.admission.queue._REORDER_BATCH", 1)
    cluster = Warm(Load(1, num_running=4), Load(1))
    cluster.placement.workers["warm"].departures = departing(1.0)
    cluster.ask("a", arrived=0.0)
    cluster.ask("b", arrived=1.0)
    assert cluster.place_at(1.0) == [] and cluster.is_parked("b")
    steps = cluster.leader_state.apply_rules(Rules.of(replace(LOCAL, order="deadline")), 2.0)
    next(steps)
    assert cluster.place_at(3.0) == [("a", "cold")], "none waits meanwhile"
    assert [*steps] and not cluster.is_parked("b")
    cluster.report("cold", 4.0, num_running=0)
    assert cluster.leader_state.queued == 1
    cluster.report("warm", 5.0, num_running=0)
    assert cluster.place_at(5.0) == [("b", "warm")]


@pytest.mark.parametrize(
    ("changes", "weight_of"),
    [
        ({"queue_ttl": 60.0}, None),
        ({"starvation": 30.0}, None),
        ({"order": "ranked"}, None),
        ({"order": "hrrn"}, None),
        ({"order": "attained"}, None),
        ({}, lambda tenant: 1.0),
    ],
)
def test_parked_request_returns_in_every_order(
    changes: dict[str, Any], weight_of: Callable[[str], float] | None
) -> None:
    cluster = Warm(Load(1, num_running=4), Load(1), replace(LOCAL, **changes), weight_of)
    for number in range(3):
        cluster.placement.workers["warm"].departures = departing(1.0)
        cluster.ask("a", arrived=0.0, predicted_total=TOKENS)
        now = 20.0 * number
        assert cluster.place_at(now) == [] and cluster.is_parked("a")
        cluster.receive(pb.GatewayMessage(withdraw=["a"]))
    cluster.ask("a", arrived=0.0, predicted_total=TOKENS)
    assert cluster.place_at(41.0) == []
    assert cluster.place_at(55.0) == [("a", "cold")]


def test_request_does_not_wait_for_a_slow_worker() -> None:
    cluster = Warm(Load(1, num_running=4), Load(1))
    cluster.placement.workers["warm"].departures = departing(1.0)
    cluster.placement.workers["warm"].is_slow = True
    cluster.ask("a")
    assert cluster.place_at(0.0) == [("a", "cold")]


def test_moved_request_does_not_wait_for_its_old_worker() -> None:
    cluster = Warm(Load(1, num_running=4), Load(1))
    cluster.placement.workers["warm"].departures = departing(1.0)
    cluster.placement.reserve_for_move("cold", "a", TOKENS, 1, 0.0)
    cluster.ask("a")
    assert cluster.place_at(0.0) == [("a", "cold")]


def test_estimated_wait_includes_sequences_at_the_worker() -> None:
    cluster = Warm(Load(1, num_running=4, num_waiting=30), Load(1))
    cluster.placement.workers["warm"].departures = departing(1.0)
    cluster.ask("a")
    assert cluster.place_at(0.0) == [("a", "cold")], "31 must leave first"


def test_withdrawn_request_stops_waiting_for_prefix() -> None:
    cluster = Warm(Load(1, num_running=4), Load(1))
    cluster.placement.workers["warm"].departures = departing(1.0)
    cluster.ask("a")
    assert cluster.place_at(0.0) == []
    cluster.receive(pb.GatewayMessage(withdraw=["a"]))
    cluster.report("warm", 1.0, num_running=0)
    assert cluster.place_at(1.0) == [] and cluster.leader_state.queued == 0


class Short(Warm):
    """A cluster in which ``warm`` has three chunks of a prompt of four, which takes 1.024 s."""

    def __init__(self, warm: Load, cold: Load) -> None:
        super().__init__(warm, cold)
        self.placement.workers["warm"].departures = departing(2.0)
        self.placement.index.update("warm", (), CHAIN[3:])
        self.enqueue("a", prompt_tokens=1024, max_tokens=10, chunks=CHAIN[:4], accepted=True)
        assert self.place_at(0.0) == []


def test_later_waits_end_at_the_first_saving() -> None:
    cluster = Short(Load(1, num_running=4), Load(1))
    now = 0.0
    while cluster.is_parked("a"):
        now += 0.01
        # The time at the other worker grows, so that each new wait would save more.
        cluster.report("cold", now, num_running=1, pending_prefill_tokens=1000)
        cluster.report("warm", now, num_running=4)
        cluster.placement.workers["warm"].departures = departing(2.0)
        cluster.place_at(now)
    # Prefill of the 768 cached tokens, less the delay of two requests a second by the other 256.
    assert now == pytest.approx(0.768 - 0.256**2, abs=0.02)


def test_request_that_waited_goes_where_it_is_computed_first() -> None:
    cluster = Short(Load(1, num_running=3, blocks_used=9_990), Load(1))
    cluster.report("warm", 0.76, num_running=2, blocks_used=3000, pending_prefill_tokens=1700)
    assert cluster.place_at(0.76) == [("a", "cold")]


def test_request_does_not_follow_an_evicted_prefix() -> None:
    cluster = Short(Load(1, num_running=4), Load(1))
    cluster.placement.index.update("warm", (), CHAIN[:4])
    cluster.report("warm", 0.5, num_running=3, pending_prefill_tokens=1000)
    assert cluster.place_at(0.5) == [("a", "cold")]


@given(st.integers(0, 2**32), st.integers(1, 12))
def test_total_wait_never_exceeds_saving(seed: int, num: int) -> None:
    """The departures are unrelated to the estimates."""
    rng = Random(seed)
    cluster = Warm(Load(1, num_running=4), Load(1))
    names = [f"r{number}" for number in range(num)]
    for name in names:
        cluster.ask(name)
    waited, now = dict.fromkeys(names, 0.0), 0.0
    savings: dict[str, float] = {}
    for _ in range(60):
        for worker in cluster.placement.workers.values():
            worker.departures = departing(rng.choice((0.1, 1.0, 10.0)))
        cluster.place_at(now)
        step_s = rng.uniform(0.05, 2.0)
        now += step_s
        for name in filter(cluster.is_parked, names):
            waited[name] += step_s
            parked = cluster.queue._parking.get(name)
            assert parked is not None
            savings.setdefault(name, parked.wait.saved_s)
        cluster.report("warm", now, num_running=rng.choice((3, 4, 4, 4)))
        cluster.report("cold", now, num_running=rng.choice((0, 2, 4)))
    # A wait ends at the next placement, here at most 2 s late.
    assert all(waited[name] <= saved_s + 2.0 for name, saved_s in savings.items())
    # The delay of others at most doubles what computing the prefix would take.
    assert max(savings.values(), default=0.0) <= 2 * TOKENS / 1000


@given(
    st.integers(4, 39),
    st.floats(0.0, 30.0),
    st.floats(0.1, 10.0),
    st.sampled_from((0.01, 0.1, 9.0)),
)
def test_wait_costs_at_most_twice_the_clairvoyant(
    num_chunks: int, busy_s: float, estimated_per_s: float, cold_per_s: float
) -> None:
    """The bound holds for any estimate, however long the warm worker remains busy."""

    def cluster_of(num_running: int) -> Warm:
        cluster = Warm(Load(1, num_running=num_running), Load(1))
        cluster.placement.index.update("warm", CHAIN[:num_chunks], CHAIN[num_chunks:])
        cluster.set_departures(estimated_per_s, cold_per_s)
        return cluster

    cluster, free = cluster_of(4), cluster_of(3).placement
    cluster.ask("a")
    waiting = cluster.queue._queue._queued["a"].waiting
    costs_s = {}
    for worker_id in ("warm", "cold"):
        choice = free.take(worker_id, waiting)
        assert choice is not None
        costs_s[worker_id] = choice.cost_s
    if cluster.place_at(0.0):
        return
    parked = cluster.queue._parking.get("a")
    assert parked is not None
    now = min(busy_s, parked.wait.until)
    if busy_s < parked.wait.until:
        cluster.report("warm", now, num_running=3)
        cluster.set_departures(estimated_per_s, cold_per_s)
    [(_, worker_id)] = cluster.place_at(now)
    clairvoyant_s = min(costs_s["cold"], busy_s + costs_s["warm"])
    assert now + costs_s[worker_id] <= 2.0 * clairvoyant_s + 1e-6


@given(st.integers(0, 2**32), st.integers(1, 12))
def test_credit_is_never_idle_after_a_wait_has_ended(seed: int, num: int) -> None:
    """Each placement ends waits that can no longer pay, and leaves no request that could start."""
    rng = Random(seed)
    cluster = Warm(Load(1, num_running=4), Load(1))
    names = [f"r{number}" for number in range(num)]
    for name in names:
        cluster.ask(name)
    now, queue = 0.0, cluster.queue
    left: set[str] = set()
    for _ in range(60):
        for worker in cluster.placement.workers.values():
            worker.departures = departing(rng.choice((0.1, 1.0, 10.0)))
        left |= {name for name, _ in cluster.place_at(now)}
        for name in set(names) - left:
            waiting = queue._queue._queued[name].waiting
            parked = queue._parking.get(name)
            if parked is None:
                assert cluster.placement.choose(waiting) is None
            else:
                assert now < parked.wait.until <= parked.since + parked.wait.saved_s
                assert cluster.placement.take(parked.wait.worker_id, waiting) is None
        now += rng.uniform(0.05, 2.0)
        cluster.report("warm", now, num_running=rng.choice((2, 3, 4, 4)))
        cluster.report("cold", now, num_running=rng.choice((0, 2, 4)))
