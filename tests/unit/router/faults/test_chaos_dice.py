"""Random faults: the same seed makes the same ones, and one worker is always spared."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.chaos.dice import DRAIN, NAMES, Dice, Happening
from everlift.v1 import chaos_pb2 as pb
from router.faults.faults import ANY_ROUTER, LEADER, LEDGER, Part, check_fault
from tests.support.example_counts import examples

WORKERS = ["a", "b", "c"]
_PARTS = {LEDGER: Part.LEDGER, LEADER: Part.ROUTER, ANY_ROUTER: Part.ROUTER}


def throws(seed: int, times: int, every_s: float = 2.0) -> list[Happening | None]:
    dice = Dice(seed)
    return [dice.throw(at * every_s, WORKERS) for at in range(times)]


def test_dice_repeat_faults_for_the_same_seed() -> None:
    assert throws(1, 50) == throws(1, 50)
    assert throws(1, 50) != throws(2, 50)


def test_dice_throw_every_fault_in_valid_form() -> None:
    seen = set()
    for seed in range(20):
        for happening in throws(seed, 20):
            assert happening is not None
            seen.add(happening.name)
            if happening.name != DRAIN:
                assert happening.fault is not None
                check_fault(happening.fault, _PARTS.get(happening.target, Part.WORKER), None)
    assert seen == {*NAMES}


@settings(max_examples=examples(50))
@given(st.integers(0, 1 << 32), st.floats(0.1, 10.0))
def test_dice_always_spare_one_worker(seed: int, every_s: float) -> None:
    """As nobody starts another worker: those that are killed or drained stay so."""
    dice, ends = Dice(seed), dict.fromkeys(WORKERS, 0.0)
    for step in range(60):
        now = step * every_s
        happening = dice.throw(now, WORKERS)
        if happening is not None and happening.target in ends:
            assert ends[happening.target] <= now, "it has its fault already"
            ends[happening.target] = _end(happening, now)
        assert any(end <= now for end in ends.values())


def _end(happening: Happening, now: float) -> float:
    fault = happening.fault
    if fault is None or fault.kind == pb.FAULT_KIND_KILL:
        return float("inf")
    return now + fault.seconds


def test_dice_throw_nothing_if_only_one_worker_is_left() -> None:
    dice = Dice(1, ["kill worker"])
    assert {dice.throw(0.0, WORKERS).target for _ in range(2)} < {*WORKERS}  # type: ignore[union-attr]
    assert dice.throw(0.0, WORKERS) is None
    assert dice.throw(0.0, [*WORKERS, "d"]) is not None
