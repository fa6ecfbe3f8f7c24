"""Random faults: the same seed makes the same ones, and one worker is always spared."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.chaos.fault_generator import DRAIN, NAMES, ChaosEvent, FaultGenerator
from everlift.v1 import chaos_pb2 as pb
from router.faults.faults import ANY_ROUTER, LEADER, LEDGER, Part, check_fault
from tests.support.example_counts import examples

WORKERS = ["a", "b", "c"]
_PARTS = {LEDGER: Part.LEDGER, LEADER: Part.ROUTER, ANY_ROUTER: Part.ROUTER}


def events(seed: int, times: int, every_s: float = 2.0) -> list[ChaosEvent | None]:
    generator = FaultGenerator(seed)
    return [generator.next_event(at * every_s, WORKERS) for at in range(times)]


def test_fault_generator_repeats_faults_for_the_same_seed() -> None:
    assert events(1, 50) == events(1, 50)
    assert events(1, 50) != events(2, 50)


def test_fault_generator_yields_every_fault_in_valid_form() -> None:
    seen = set()
    for seed in range(20):
        for event in events(seed, 20):
            assert event is not None
            seen.add(event.name)
            if event.name != DRAIN:
                assert event.fault is not None
                check_fault(event.fault, _PARTS.get(event.target, Part.WORKER), None)
    assert seen == {*NAMES}


@settings(max_examples=examples(50))
@given(st.integers(0, 1 << 32), st.floats(0.1, 10.0))
def test_fault_generator_always_spares_one_worker(seed: int, every_s: float) -> None:
    """Workers are not replaced, so killed and drained ones never recover."""
    generator, ends = FaultGenerator(seed), dict.fromkeys(WORKERS, 0.0)
    for step in range(60):
        now = step * every_s
        event = generator.next_event(now, WORKERS)
        if event is not None and event.target in ends:
            assert ends[event.target] <= now, "it has its fault already"
            ends[event.target] = _end(event, now)
        assert any(end <= now for end in ends.values())


def _end(event: ChaosEvent, now: float) -> float:
    fault = event.fault
    if fault is None or fault.kind == pb.FAULT_KIND_KILL:
        return float("inf")
    return now + fault.seconds


def test_fault_generator_spares_the_only_healthy_worker() -> None:
    generator = FaultGenerator(1, ["kill worker"])
    assert {generator.next_event(0.0, WORKERS).target for _ in range(2)} < {*WORKERS}  # type: ignore[union-attr]
    assert generator.next_event(0.0, WORKERS) is None
    assert generator.next_event(0.0, [*WORKERS, "d"]) is not None
