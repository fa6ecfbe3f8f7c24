"""The scheduler, by small numbers: what each step computes, and for whom."""

from typing import NoReturn

import pytest

from tests.worker_support import limits, prompt, sequence
from worker.limits import Limits
from worker.load import Load, Occupant
from worker.outcome import Outcome, SequenceKey, Stop
from worker.plan import Plan
from worker.scheduler import Scheduler
from worker.sequence import NO_SLOT, Sequence

TOKEN = 5


class Bench:
    """A scheduler with a runner that always draws TOKEN."""

    def __init__(self, bounds: Limits) -> None:
        self.limits = bounds
        self.scheduler = Scheduler(bounds)

    def add(self, epoch: int, length: int, max_tokens: int = 50, first: int = 1) -> Sequence:
        this = sequence(self.limits, epoch, prompt(length, first), max_tokens=max_tokens)
        self.scheduler.add(this)
        return this

    def plan(self) -> Plan:
        return self.scheduler.schedule()

    def commit(self, plan: Plan) -> list[Outcome]:
        outcomes = self.scheduler.commit(plan, [TOKEN for row in plan.rows if row.samples])
        self.scheduler.check_integrity()
        return outcomes

    def step(self) -> list[tuple[int, int, int]]:
        """(slot, start, tokens) of each row of the next step."""
        plan = self.plan()
        self.commit(plan)
        return [(row.slot, row.start, len(row.tokens)) for row in plan.rows]

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()


def test_an_empty_scheduler_plans_nothing() -> None:
    bench = Bench(limits())
    assert bench.plan() == Plan(1, ())
    assert bench.plan() == Plan(2, ())


def test_a_prompt_is_computed_in_chunks_and_then_token_by_token() -> None:
    bench = Bench(limits(max_num_batched_tokens=40))
    bench.add(1, 100)
    assert [bench.step() for _ in range(5)] == [
        [(0, 0, 40)],
        [(0, 40, 40)],
        [(0, 80, 20)],
        [(0, 100, 1)],
        [(0, 101, 1)],
    ]


def test_decodes_come_before_prefills_under_one_budget() -> None:
    bench = Bench(limits(max_num_batched_tokens=10))
    bench.add(1, 5)
    bench.step()
    bench.add(2, 12)
    bench.add(3, 12)
    assert [bench.step() for _ in range(3)] == [
        [(0, 5, 1), (1, 0, 9)],
        [(0, 6, 1), (1, 9, 3), (2, 0, 6)],
        [(0, 7, 1), (1, 12, 1), (2, 6, 6)],
    ]


def test_a_step_admits_no_more_than_its_budget_and_its_slots() -> None:
    bench = Bench(limits(max_num_seqs=2, max_num_batched_tokens=20))
    for epoch in (1, 2, 3):
        bench.add(epoch, 3)
    assert bench.step() == [(0, 0, 3), (1, 0, 3)]
    assert bench.scheduler.load().num_waiting == 1


def test_a_slot_stays_and_the_lowest_free_one_is_given() -> None:
    bench = Bench(limits(max_num_seqs=3))
    first, second = bench.add(1, 3), bench.add(2, 3)
    bench.step()
    bench.scheduler.remove(first)
    bench.add(3, 3)
    bench.step()
    assert (first.slot, second.slot) == (NO_SLOT, 1)
    assert bench.scheduler.occupants() == (Occupant(0, "request-3"), Occupant(1, "request-2"))


def test_blocks_for_the_whole_prompt_are_taken_at_admission() -> None:
    bench = Bench(limits(num_blocks=5, max_num_batched_tokens=10, watermark_blocks=1))
    bench.add(1, 70)
    bench.add(2, 40, first=500)
    bench.step()
    assert bench.scheduler.load().blocks_used == 3
    bench.steps(7)
    assert bench.scheduler.load().num_waiting == 1, "two more would leave less than the watermark"


def test_nobody_overtakes_the_head_of_the_line() -> None:
    bench = Bench(limits(num_blocks=5))
    bench.add(1, 64)
    bench.step()
    bench.add(2, 120)
    bench.add(3, 3)
    bench.step()
    assert [o.request_id for o in bench.scheduler.occupants()] == ["request-1"]


def test_a_common_prefix_is_shared_once_it_is_computed() -> None:
    bench = Bench(limits(num_blocks=16))
    first = bench.add(1, 64)
    bench.step()
    second = bench.add(2, 70)
    assert bench.step() == [(0, 64, 1), (1, 64, 6)]
    assert second.block_table[:2] == first.block_table[:2]
    assert bench.scheduler.load().blocks_used == 4


def test_of_a_prompt_that_is_all_there_one_token_is_left_to_compute() -> None:
    bench = Bench(limits(num_blocks=16))
    bench.scheduler.remove(bench.add(1, 64))
    bench.add(2, 64, max_tokens=1)
    bench.step()
    bench.add(3, 64, max_tokens=1)
    assert bench.step() == [(0, 32, 32)], "the second block holds the token that must be computed"


def test_another_salt_shares_nothing() -> None:
    bench = Bench(limits(num_blocks=16))
    bench.add(1, 64)
    bench.step()
    bench.scheduler.add(sequence(bench.limits, 2, prompt(64), salt=b"other"))
    assert bench.step() == [(0, 64, 1), (1, 0, 63)]


def test_blocks_are_hashed_only_when_their_tokens_are_computed() -> None:
    bench = Bench(limits(num_blocks=16, max_num_batched_tokens=40))
    bench.add(1, 100)
    bench.step()
    bench.add(2, 100)
    assert bench.step() == [(0, 40, 40)]
    assert bench.step() == [(0, 80, 20), (1, 64, 20)]


def fill(bench: Bench, *lengths: int) -> list[Sequence]:
    """Sequences without a common prefix, all of them prefilled."""
    sequences = [bench.add(i, n, first=100 * i) for i, n in enumerate(lengths, 1)]
    while any(s.num_output == 0 for s in sequences):
        bench.step()
    return sequences


def test_who_has_computed_least_gives_way_and_comes_back_to_a_prefix_hit() -> None:
    bench = Bench(limits(num_blocks=6, watermark_blocks=0, max_num_batched_tokens=200))
    long, short, middle = fill(bench, 60, 33, 35)
    assert bench.scheduler.load().blocks_used == 6
    bench.steps(5)
    assert [s.slot for s in (long, short, middle)] == [0, NO_SLOT, 2]
    assert bench.scheduler.load().preemptions == 1
    assert short.tokens[33:] == [TOKEN] * 5, "its tokens are kept"

    bench.scheduler.remove(middle)
    assert bench.step() == [(0, 65, 1), (1, 32, 6)]


def test_the_preempted_stand_before_all_that_came_later_in_their_old_order() -> None:
    bench = Bench(limits(num_blocks=6, watermark_blocks=0, max_num_batched_tokens=300))
    long, first, second = fill(bench, 95, 32, 31)
    bench.add(4, 3)
    while first.slot != NO_SLOT or second.slot != NO_SLOT:
        bench.step()
    assert long.slot == 0
    waiting = bench.scheduler._waiting
    assert waiting.head() is first
    waiting.remove(first)
    assert waiting.head() is second


def test_a_victim_leaves_less_room_than_it_needs_to_come_back_at_once() -> None:
    bench = Bench(limits(num_blocks=4, watermark_blocks=0, max_num_batched_tokens=200))
    long, _ = fill(bench, 60, 40)
    bench.add(3, 3)
    while bench.scheduler.load().preemptions == 0:
        rows = bench.step()
    assert rows == [(long.slot, long.num_computed - 1, 1)]


def test_a_sequence_that_outgrows_the_pool_alone_fails_with_its_last_token() -> None:
    bench = Bench(limits(num_blocks=2))
    bench.add(1, 60, max_tokens=1000)
    bench.steps(4)
    assert bench.commit(bench.plan()) == [
        Outcome(
            SequenceKey(1, 0), 4, (TOKEN,), Stop.FAILED, "outgrew the worker's KV cache of 2 blocks"
        )
    ]
    assert bench.scheduler.load().blocks_used == 0


def test_an_outcome_has_the_offset_of_its_token() -> None:
    bench = Bench(limits())
    bench.scheduler.add(sequence(bench.limits, 1, [1], max_tokens=4, output=[2, 3]))
    assert bench.commit(bench.plan()) == [Outcome(SequenceKey(1, 0), 2, (TOKEN,))]
    assert bench.commit(bench.plan()) == [Outcome(SequenceKey(1, 0), 3, (TOKEN,), Stop.LENGTH)]
    assert len(bench.scheduler) == 0


def test_a_failed_plan_ends_its_sequences_and_no_others() -> None:
    bench = Bench(limits(max_num_seqs=1))
    bench.add(1, 3)
    bench.add(2, 3)
    bench.step()
    assert bench.scheduler.fail(bench.plan(), "why") == [
        Outcome(SequenceKey(1, 0), 1, (), Stop.FAILED, "why")
    ]
    bench.scheduler.check_integrity()
    assert [s.key.epoch for s in bench.scheduler] == [2]


def test_the_choices_of_an_epoch_are_found_wherever_they_are() -> None:
    bench = Bench(limits(max_num_seqs=1))
    for choice in (0, 1):
        bench.scheduler.add(sequence(bench.limits, 1, prompt(3), choice=choice))
    bench.step()
    assert [s.key.choice for s in bench.scheduler.of_epoch(1)] == [0, 1]
    for this in bench.scheduler.of_epoch(1):
        bench.scheduler.remove(this)
    assert (bench.scheduler.of_epoch(1), len(bench.scheduler)) == ((), 0)


def test_the_load_counts_what_is_known_and_what_is_to_compute() -> None:
    bench = Bench(limits(num_blocks=16, max_num_seqs=2, max_num_batched_tokens=30))
    bench.add(1, 10)
    bench.step()
    bench.add(2, 50)
    bench.add(3, 7)
    bench.step()
    assert bench.scheduler.load() == Load(
        num_running=2,
        num_waiting=1,
        blocks_used=3,
        blocks_total=16,
        pending_prefill_tokens=50 - 29 + 7,
        committed_tokens=12 + 50 + 7,
        step=2,
        output_tokens=2,
        preemptions=0,
    )


def test_a_step_does_not_look_at_those_that_wait() -> None:
    bench = Bench(limits(max_num_seqs=1))
    bench.add(1, 3)
    bench.step()
    for epoch in range(2, 200):
        bench.add(epoch, 3)
    bench.scheduler._waiting._members = Untouchable(bench.scheduler._waiting._members)
    for _ in range(5):
        bench.scheduler.commit(bench.plan(), [TOKEN])
        bench.scheduler.load()


class Untouchable(dict[int, Sequence]):
    """Can be asked for one member, never for all."""

    def _refuse(self, *_: object) -> NoReturn:
        raise AssertionError("iterated over")

    __iter__ = values = items = keys = _refuse


@pytest.mark.parametrize("damage", ["slot", "computed", "lost"])
def test_damaged_books_are_noticed(damage: str) -> None:
    bench = Bench(limits())
    this = bench.add(1, 40)
    bench.step()
    match damage:
        case "slot":
            this.slot = 2
        case "computed":
            this.num_computed = 41
        case "lost":
            del bench.scheduler._epochs[1]
    with pytest.raises(AssertionError):
        bench.scheduler.check_integrity()
