"""Occupants of batch slots, and their moves."""

from __future__ import annotations

from dataclasses import replace

from router.console.slot_grid import (
    LOST,
    Cause,
    Change,
    Occupancy,
    Phase,
    SlotChanges,
    SlotGrid,
    SlotId,
    SlotOccupant,
)

A0, A1, B0 = SlotId("a", 0), SlotId("a", 1), SlotId("b", 0)


def worker(*request_ids: str, phase: Phase = Phase.DECODE, preemptions: int = 0) -> Occupancy:
    occupants = {slot: SlotOccupant(name, phase) for slot, name in enumerate(request_ids) if name}
    return Occupancy(occupants, preemptions)


EMPTY = worker()


def transfers(news: SlotChanges) -> list[tuple[str, Cause, SlotId, SlotId, float]]:
    return [(it.request_id, it.cause, it.source, it.target, it.left_at) for it in news.transfers]


def test_slot_grid_reports_each_phase_change_once() -> None:
    grid = SlotGrid()
    assert grid.update({"a": EMPTY}, 0.0) == SlotChanges()
    boarded = grid.update({"a": worker("r", phase=Phase.PREFILL)}, 1.0)
    assert boarded == SlotChanges([Change(A0, 1, Phase.PREFILL)], requests={1: "r"})
    assert grid.update({"a": worker("r", phase=Phase.PREFILL)}, 2.0) == SlotChanges()
    assert grid.update({"a": worker("r")}, 3.0) == SlotChanges([Change(A0, 1, Phase.DECODE)])
    assert grid.update({"a": EMPTY}, 4.0) == SlotChanges([Change(A0, 0, Phase.EMPTY)])


def test_slot_reassignment_needs_no_empty_state() -> None:
    grid = SlotGrid()
    grid.update({"a": worker("r")}, 0.0)
    assert grid.update({"a": worker("s")}, 1.0).slots == [Change(A0, 2, Phase.DECODE)]


def test_transfer_after_a_worker_loss_is_reported() -> None:
    grid = SlotGrid()
    grid.update({"a": worker("r"), "b": EMPTY}, 0.0)
    lost = grid.update({"a": LOST, "b": EMPTY}, 1.0)
    assert lost == SlotChanges([Change(A0, 0, Phase.EMPTY)])
    assert transfers(grid.update({"a": LOST, "b": worker("r")}, 3.0)) == [
        ("r", Cause.WORKER_LOST, A0, B0, 1.0)
    ]


def test_transfer_cause_is_a_drain_or_else_a_move() -> None:
    for source, cause in (
        (replace(EMPTY, is_draining=True), Cause.WORKER_DRAINED),
        (EMPTY, Cause.MOVED),
    ):
        grid = SlotGrid()
        grid.update({"a": worker("r"), "b": EMPTY}, 0.0)
        news = grid.update({"a": source, "b": worker("r")}, 1.0)
        assert transfers(news) == [("r", cause, A0, B0, 1.0)]


def test_moved_request_leaves_the_slot_its_worker_still_reports() -> None:
    """Workers report their slots five times a second, independently of each other."""
    grid = SlotGrid()
    grid.update({"a": worker("r"), "b": EMPTY}, 0.0)
    both = grid.update({"a": worker("r"), "b": worker("r")}, 1.0)
    assert transfers(both) == [("r", Cause.MOVED, A0, B0, 1.0)]
    late = grid.update({"a": EMPTY, "b": worker("r")}, 2.0)
    assert late == SlotChanges([Change(A0, 0, Phase.EMPTY)])


def test_returning_request_was_preempted_if_its_worker_preempted() -> None:
    grid = SlotGrid()
    grid.update({"a": worker("r", preemptions=4)}, 0.0)
    grid.update({"a": worker(preemptions=5)}, 1.0)
    back = grid.update({"a": worker("", "r", preemptions=5)}, 2.0)
    assert transfers(back) == [("r", Cause.PREEMPTED, A0, A1, 1.0)]


def test_next_choice_of_a_request_is_no_transfer() -> None:
    grid = SlotGrid()
    grid.update({"a": worker("r")}, 0.0)
    assert not grid.update({"a": worker("", "r")}, 1.0).transfers
    assert not grid.update({"a": worker("r", "r")}, 2.0).transfers


def test_departed_request_keeps_its_key_for_two_minutes() -> None:
    grid = SlotGrid()
    grid.update({"a": worker("r"), "b": EMPTY}, 0.0)
    grid.update({"a": EMPTY, "b": EMPTY}, 1.0)
    assert grid.update({"a": EMPTY, "b": worker("r")}, 120.0).slots[-1].key == 1
    grid.update({"a": EMPTY, "b": EMPTY}, 121.0)
    grid.update({"a": EMPTY, "b": EMPTY}, 300.0)
    again = grid.update({"a": worker("r"), "b": EMPTY}, 301.0)
    assert again == SlotChanges([Change(A0, 2, Phase.DECODE)], requests={2: "r"})


def test_returning_request_is_named_again() -> None:
    """A page forgets the names of requests that it does not show."""
    grid = SlotGrid()
    grid.update({"a": worker("r", preemptions=4)}, 0.0)
    grid.update({"a": worker(preemptions=5)}, 1.0)
    back = grid.update({"a": worker("r", preemptions=5)}, 100.0)
    assert back.requests == {1: "r"} and back.transfers


def test_departed_requests_are_bounded() -> None:
    grid = SlotGrid()
    for number in range(5000):
        grid.update({"a": worker(f"r{number}")}, float(number) / 50)
    assert len(grid._tracked) <= 2048 + 50 + 1
    assert not grid.update({"a": worker("r0")}, 100.0).transfers


def test_choice_keeps_its_key_after_its_sibling_left() -> None:
    grid = SlotGrid()
    grid.update({"a": worker("r", "r", phase=Phase.PREFILL)}, 0.0)
    grid.update({"a": worker("r", phase=Phase.PREFILL)}, 1.0)
    grid.update({"a": worker("r", phase=Phase.PREFILL)}, 200.0)
    assert grid.update({"a": worker("r")}, 201.0).slots == [Change(A0, 2, Phase.DECODE)]
