"""Requests of the session-retention benchmark."""

from __future__ import annotations

from benchmarks.session_retention import REGIMES, turns


def test_conversations_are_reused_without_a_session() -> None:
    asked = [*turns(REGIMES["conversations"], 1)]
    assert sum(turn.reusable for turn in asked if turn.is_conversation) > 1_000_000
    assert not any(turn.arrival.session for turn in asked if turn.is_conversation)
    documents = [turn for turn in asked if turn.arrival.tenant == "documents"]
    assert documents and not any(it.reusable or it.arrival.session for it in documents)


def test_regimes_are_played_in_the_order_of_arrival() -> None:
    for regime in REGIMES.values():
        times = [turn.arrival.at for turn in turns(regime, 1)]
        assert times == sorted(times) and times[-1] > 350
