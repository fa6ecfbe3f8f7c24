"""Predicted work of the grammar processes."""

from __future__ import annotations

from threading import Thread

import pytest

from worker.grammar.backlog import Account, Backlog


def account(budget_s: float = 0.1) -> tuple[Backlog, Account]:
    backlog = Backlog()
    return backlog, Account(backlog, budget_s)


def test_backlog_expects_the_last_answer_time() -> None:
    backlog, this = account()
    this.record_request(1)
    assert backlog.seconds == 0.1
    this.record_reply(1, cpu_s=0.02)
    assert backlog.seconds == 0
    this.record_request(1)
    assert backlog.seconds == 0.02


def test_backlog_forgets_slow_answer_gradually() -> None:
    backlog, this = account()
    expected = []
    for cpu_s in (0.08, 0.001, 0.001, 0.03):
        this.record_request(1)
        expected.append(backlog.seconds)
        this.record_reply(1, cpu_s)
    assert expected == pytest.approx([0.1, 0.08, 0.04, 0.02])


def test_backlog_excludes_cancelled_answers() -> None:
    backlog, this = account()
    this.record_request(1)
    this.record_request(2)
    this.cancel(1)
    assert backlog.seconds == pytest.approx(0.1)
    this.cancel(2)
    assert backlog.seconds == pytest.approx(0)


def test_backlog_drops_a_lost_process_in_any_thread() -> None:
    backlog, this = account()
    other = Account(backlog, 0.1)
    for each in (this, this, other):
        each.record_request(1)
    thread = Thread(target=backlog.close, args=[this])
    thread.start()
    thread.join()
    assert backlog.seconds == pytest.approx(0.1)
