"""Dispatches wait until all gateways have re-sent what a restarted ledger may have lost."""

from __future__ import annotations

from router.admission.handover import Generations


def generations(*gateways: str, current: str = "one") -> Generations:
    made = Generations(current, now=0.0, timeout_s=1.0)
    for gateway in gateways:
        made.connect(gateway, 0.0)
    return made


def test_generations_agree_if_the_ledger_has_none() -> None:
    assert generations("a", current="").agree(0.0)


def test_generations_require_current_one_from_all_gateways() -> None:
    made = generations("a", "b")
    made.note_resync("a", "one", 0.0)
    assert not made.agree(0.5)
    made.note_resync("b", "one", 0.5)
    assert made.agree(0.5)
    made.change("two", 0.6)
    assert not made.agree(0.6)
    made.note_resync("a", "two", 0.7)
    made.note_resync("b", "two", 0.8)
    assert made.agree(0.8)


def test_generations_stop_waiting_for_silent_gateway() -> None:
    made = generations("a")
    assert not made.agree(0.9)
    assert made.agree(1.0)
    made.change("two", 5.0)
    assert not made.agree(5.9)
    assert made.agree(6.0)


def test_generations_wait_for_leader_behind_a_gateway() -> None:
    made = generations("a")
    made.note_resync("a", "two", 3.0)
    assert not made.agree(3.9)
    made.change("two", 3.5)
    assert made.agree(3.5)


def test_generations_ignore_disconnected_gateway() -> None:
    made = generations("a")
    made.disconnect("a")
    made.note_resync("a", "old", 0.0)
    assert made.agree(0.0)
