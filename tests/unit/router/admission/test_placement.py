"""Placement: a dispatch needs capacity beside a worker's load and its unacknowledged dispatches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from router.admission.placement import Placement
from router.admission.request import Waiting
from router.admission.throughput import Work
from router.admission.workers import Capacity, Load
from router.config import RouterConfig
from tests.support.router.admission_support import choose

CONFIG = RouterConfig(local_depth=2, max_pending_prefill=100, dispatch_ack=1.0)
CAPACITY = Capacity(max_num_seqs=2, num_blocks=100)


def waiting(prefill_tokens: int = 10, avoid: str = "", choices: int = 1) -> Waiting:
    return Waiting("r", "g", 0.0, prefill_tokens, max_tokens=10, avoid=avoid, choices=choices)


def placement_of(**loads: Load) -> Placement:
    placement = Placement(CONFIG)
    for worker_id, load in loads.items():
        placement.join(worker_id, CAPACITY)
        placement.report(worker_id, load, now=0.0)
    return placement


def test_placement_skips_worker_without_a_report() -> None:
    placement = Placement(CONFIG)
    placement.join("a", CAPACITY)
    assert choose(placement, waiting()) is None


def test_placement_chooses_fewest_committed_tokens() -> None:
    placement = placement_of(
        a=Load(1, num_running=1, committed_tokens=50), b=Load(1, num_running=1, committed_tokens=20)
    )
    assert choose(placement, waiting()) == "b"


def test_dispatch_counts_until_acknowledged() -> None:
    placement = placement_of(a=Load(1), b=Load(1))
    first = choose(placement, waiting())
    assert first == "a"
    placement.reserve("a", 7, waiting(), now=0.0)
    assert choose(placement, waiting()) == "b"
    placement.acknowledge("a", 7)
    assert choose(placement, waiting()) == "a"


def test_acknowledged_choices_are_not_counted_as_departures() -> None:
    """The worker acknowledges each choice, and no choice ends."""
    placement = placement_of(a=Load(1))
    for number in range(1, 6):
        placement.reserve("a", number, waiting(choices=8), now=number)
        for _ in range(8):
            placement.acknowledge("a", number)
        placement.report("a", Load(1 + number, num_running=8 * number), now=float(number))
    assert placement.workers["a"].departures.per_s is None


def test_local_depth_bounds_what_a_full_worker_holds() -> None:
    placement = placement_of(a=Load(1, num_running=2))
    for epoch in (1, 2):
        assert choose(placement, waiting()) == "a"
        placement.reserve("a", epoch, waiting(), now=0.0)
    assert choose(placement, waiting()) is None


def test_choices_take_a_slot_each_within_local_depth() -> None:
    placement = Placement(CONFIG)
    placement.join("a", Capacity(max_num_seqs=8, num_blocks=100))
    placement.report("a", Load(1, num_running=3), now=0.0)
    assert choose(placement, waiting(choices=7)) == "a"
    assert choose(placement, waiting(choices=8)) is None
    placement.reserve("a", 1, waiting(choices=4), now=0.0)
    placement.reserve("a", 2, waiting(choices=2), now=0.0)
    assert choose(placement, waiting()) is None
    placement.acknowledge("a", 1)
    assert choose(placement, waiting(choices=3)) == "a"
    placement.expire(now=2.0)
    assert choose(placement, waiting(choices=7)) == "a"


def test_idle_worker_takes_more_choices_than_slots() -> None:
    placement = placement_of(a=Load(1))
    assert choose(placement, waiting(choices=128)) == "a"
    placement.reserve("a", 1, waiting(choices=128), now=0.0)
    assert choose(placement, waiting()) is None


def test_choices_share_the_blocks_of_their_prompt() -> None:
    placement = Placement(replace(CONFIG, max_pending_prefill=1000))
    placement.join("a", Capacity(max_num_seqs=8, num_blocks=100))
    placement.report("a", Load(1, num_running=1, blocks_used=96), now=0.0)
    assert choose(placement, waiting(prefill_tokens=64, choices=3)) is None
    assert choose(placement, waiting(prefill_tokens=64, choices=2)) == "a"


def test_unacknowledged_dispatch_expires() -> None:
    placement = placement_of(a=Load(1, num_running=2, num_waiting=1))
    placement.reserve("a", 1, waiting(), now=0.0)
    placement.expire(now=0.9)
    assert choose(placement, waiting()) is None
    placement.expire(now=1.1)
    assert choose(placement, waiting()) == "a"


def test_pending_prefill_is_bounded_but_long_prompts_get_a_turn() -> None:
    busy = placement_of(a=Load(1, num_running=1, pending_prefill_tokens=60))
    assert choose(busy, waiting(prefill_tokens=41)) is None
    assert choose(busy, waiting(prefill_tokens=40)) == "a"
    idle = placement_of(a=Load(1, num_running=1))
    assert choose(idle, waiting(prefill_tokens=500)) == "a"


def test_short_prompts_do_not_count_long_pending_prefill() -> None:
    busy = Load(1, num_running=1, pending_prefill_tokens=500, long_prefill_tokens=440)
    placement = Placement(CONFIG)
    placement.join("a", Capacity(max_num_seqs=8, num_blocks=100, max_num_batched_tokens=200))
    placement.report("a", busy, now=0.0)
    assert choose(placement, waiting(prefill_tokens=41)) is None
    assert choose(placement, waiting(prefill_tokens=40)) == "a"
    placement.reserve("a", 1, waiting(prefill_tokens=30), now=0.0)
    assert choose(placement, waiting(prefill_tokens=11)) is None
    alone = replace(busy, sequence_number=2, pending_prefill_tokens=440)
    placement.acknowledge("a", 1)
    placement.report("a", alone, now=0.0)
    assert choose(placement, waiting(prefill_tokens=200)) == "a"
    assert choose(placement, waiting(prefill_tokens=201)) is None, "it is long as well"


def test_long_prompt_needs_a_worker_without_another_one() -> None:
    placement = Placement(CONFIG)
    placement.join("a", Capacity(max_num_seqs=8, num_blocks=100, max_num_batched_tokens=200))
    loads = [
        Load(1, num_running=1, pending_prefill_tokens=99),
        Load(2, num_running=1, pending_prefill_tokens=100),
        Load(3, num_running=1, pending_prefill_tokens=1, long_prefill_tokens=1),
    ]
    chosen = []
    for load in loads:
        placement.report("a", load, now=0.0)
        chosen.append(choose(placement, waiting(prefill_tokens=500)))
    assert chosen == ["a", None, None]


def test_placement_requires_free_blocks_for_the_prompt() -> None:
    placement = placement_of(a=Load(1, num_running=1, blocks_used=98))
    assert choose(placement, waiting(prefill_tokens=64)) is None
    assert choose(placement, waiting(prefill_tokens=32)) == "a"


def test_worker_report_does_not_overwrite_a_newer_one() -> None:
    placement = placement_of(a=Load(5, draining=True))
    placement.report("a", Load(4), now=0.0)
    assert choose(placement, waiting()) is None
    placement.report("a", Load(6), now=0.0)
    assert choose(placement, waiting()) == "a"


def test_placement_forgets_removed_worker() -> None:
    placement = placement_of(a=Load(1))
    placement.remove_worker("a")
    placement.acknowledge("a", 1)
    assert choose(placement, waiting()) is None


def test_avoided_worker_is_chosen_only_if_alone() -> None:
    placement = placement_of(a=Load(1), b=Load(1, num_running=2, num_waiting=2))
    assert choose(placement, waiting(avoid="a")) is None
    placement.remove_worker("b")
    assert choose(placement, waiting(avoid="a")) == "a"


def test_avoided_worker_is_chosen_if_all_others_drain() -> None:
    full = Load(1, num_running=2, num_waiting=2)
    placement = placement_of(a=Load(1), b=full)
    assert choose(placement, waiting(avoid="a")) is None
    placement.report("b", replace(full, sequence_number=2, draining=True), now=0.0)
    assert choose(placement, waiting(avoid="a")) == "a"


def test_slow_worker_is_chosen_only_if_no_other_has_room() -> None:
    placement = placement_of(slow=Load(1), busy=Load(1, num_running=1, committed_tokens=900))
    for worker_id, busy_s in (("slow", 0.9), ("busy", 0.09)):
        load = placement.workers[worker_id].load
        work = Work(step=3, computed_tokens=3, busy_s=busy_s)
        placement.report(worker_id, replace(load, sequence_number=2, work=work), now=1.0)
    placement.expire(now=1.0)
    assert placement.workers["slow"].is_slow
    assert choose(placement, waiting()) == "busy"
    placement.remove_worker("busy")
    assert choose(placement, waiting()) == "slow"


def test_request_goes_where_fewer_retained_blocks_are_evicted() -> None:
    placement = placement_of(
        a=Load(1, num_running=1, blocks_used=10, blocks_retained=80, committed_tokens=100),
        b=Load(1, num_running=1, blocks_used=30, blocks_retained=20, committed_tokens=900),
    )
    assert choose(placement, waiting()) == "b"
    busy = replace(placement.workers["b"].load, sequence_number=2, pending_prefill_tokens=64)
    placement.report("b", busy, now=1.0)
    assert choose(placement, waiting()) == "a", "pending prefill comes first"


def test_reserved_capacity_is_exclusive_to_its_request() -> None:
    placement = placement_of(
        a=Load(1, num_running=1, blocks_used=90), b=Load(1, num_running=2, blocks_used=90)
    )
    placement.reserve_for_move("a", "coming", tokens=300, choices=1, now=0.0)
    assert choose(placement, waiting()) == "b"
    coming = waiting(prefill_tokens=50)._replace(request_id="coming")
    assert choose(placement, coming) == "a"
    placement.reserve("a", 1, coming, now=0.1)
    placement.acknowledge("a", 1)
    assert choose(placement, waiting()) == "a"


def test_reserved_capacity_expires() -> None:
    placement = placement_of(a=Load(1, num_running=1, blocks_used=90))
    placement.reserve_for_move("a", "coming", tokens=300, choices=1, now=0.0)
    placement.expire(now=1.9)
    assert choose(placement, waiting()) is None
    placement.expire(now=2.1)
    assert choose(placement, waiting()) == "a"


def test_reserved_capacity_does_not_bind_its_request() -> None:
    placement = placement_of(a=Load(1, num_running=2, num_waiting=2), b=Load(1))
    placement.reserve_for_move("a", "coming", tokens=30, choices=1, now=0.0)
    assert choose(placement, waiting()._replace(request_id="coming")) == "b"


def test_reserved_capacity_is_dropped_when_worker_rejoins() -> None:
    placement = placement_of(a=Load(1, num_running=1))
    placement.reserve_for_move("a", "coming", tokens=30, choices=1, now=0.0)
    placement.remove_worker("a")
    assert choose(placement, waiting()._replace(request_id="coming")) is None
    placement.join("a", CAPACITY)
    placement.report("a", Load(1), now=0.0)
    assert choose(placement, waiting()._replace(request_id="coming")) == "a"
    assert placement.workers["a"].reserved.tokens == 0


def test_reserved_capacity_is_dropped_with_a_removed_worker() -> None:
    placement = placement_of(a=Load(1), b=Load(1, num_running=1))
    placement.reserve_for_move("a", "r", tokens=30, choices=1, now=0.0)
    placement.remove_worker("a")
    assert not placement._reserved
    assert choose(placement, waiting()) == "b"


#: Event at a worker, which is applied to a placement.
Event = Callable[[Placement, str], None]


@st.composite
def events(draw: st.DrawFn, number: int) -> Event:
    """Draw an event; ``number`` differs between the events of a test."""
    tokens, few = st.integers(0, 120), st.integers(0, 3)

    def report(placement: Placement, worker_id: str) -> None:
        placement.report(worker_id, load, now=0.0)

    def reserve(placement: Placement, worker_id: str) -> None:
        placement.reserve(worker_id, number, dispatched, now=0.0)

    def acknowledge(placement: Placement, worker_id: str) -> None:
        for epoch in range(number):
            placement.acknowledge(worker_id, epoch)

    def hold(placement: Placement, worker_id: str) -> None:
        placement.reserve_for_move(worker_id, f"coming to {worker_id}", held, choices=1, now=0.0)

    held = draw(tokens)
    dispatched = waiting(draw(tokens) + 1)._replace(is_suspect=draw(few) == 0)
    pending = draw(tokens)
    load = Load(
        sequence_number=number,
        num_running=draw(few),
        num_waiting=draw(few) // 2,
        blocks_used=draw(st.integers(0, 100)),
        pending_prefill_tokens=pending,
        long_prefill_tokens=draw(st.integers(0, pending)),
        committed_tokens=draw(tokens),
        draining=draw(few) == 3,
    )
    return draw(st.sampled_from([report, report, reserve, acknowledge, hold]))


@given(st.data())
def test_placement_chooses_best_individually_eligible_worker(data: st.DataObject) -> None:
    workers = ("a", "b", "c")
    placement = placement_of(**{worker_id: Load() for worker_id in workers})
    alone = {worker_id: placement_of(**{worker_id: Load()}) for worker_id in workers}
    for number in range(1, data.draw(st.integers(2, 25))):
        worker_id = data.draw(st.sampled_from(workers))
        happens = data.draw(events(number))
        happens(placement, worker_id)
        happens(alone[worker_id], worker_id)
        asked = waiting(
            data.draw(st.integers(1, 1700)),
            avoid=data.draw(st.sampled_from(["", "a"])),
            choices=data.draw(st.integers(1, 3)),
        )._replace(is_suspect=data.draw(st.booleans()))
        others = [it for it in workers if it != asked.avoid]
        allowed = others if any(placement.workers[it].is_open for it in others) else workers
        ready = [
            (
                asked.is_suspect and not view.is_decode_only,
                view.pending_prefill,
                view.committed_tokens,
                it,
            )
            for it in allowed
            if alone[it].choose(asked) is not None
            if (view := placement.workers[it])
        ]
        assert choose(placement, asked) == (min(ready)[-1] if ready else None)
