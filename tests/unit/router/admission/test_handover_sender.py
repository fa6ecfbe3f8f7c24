"""Handover messages of a gateway to a new leader: each request once, in order, and up to date."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from everlift.v1 import session_pb2 as pb
from router.admission import handover as module
from router.admission.handover import HandoverSender
from router.admission.policy import Fifo
from router.admission.request import Running, Waiting


def waits(request_id: str, arrived: float) -> Waiting:
    return Waiting(request_id, "router", arrived, prefill_tokens=1, max_tokens=1)


def runs(request_id: str, *, is_preempted: bool = False) -> Running:
    return Running(request_id, "router", "w", 1, 0, 1, 0.0, 0, is_preempted=is_preempted)


def sender(
    waiting: Iterable[Waiting] = (), running: Iterable[Running] = (), generation: str = ""
) -> HandoverSender:
    return HandoverSender("router", waiting, running, generation, Fifo())


def entries(parts: Iterable[pb.GatewayMessage]) -> list[str]:
    """Return the entries of the messages, of each one in the order queued, withdrawn, running."""
    words: list[str] = []
    for part in parts:
        words.extend(f"waits {it.request_id}" for it in part.enqueue)
        words.extend(f"gone {request_id}" for request_id in part.withdraw)
        words.extend(f"runs {it.request_id}" for it in part.running)
        words.extend(["complete"] if part.is_complete else [])
    return words


def rest(this: HandoverSender) -> Iterator[pb.GatewayMessage]:
    while this:
        yield this.next_message()


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_SIZE", 1)
    monkeypatch.setattr(module, "_MAX_SIZE", 2)


def test_sender_first_message_has_router_and_generation() -> None:
    first, *others = rest(sender([waits("a", 1.0)], generation="one"))
    assert (first.router_id, first.generation) == ("router", "one")
    assert not any(part.router_id or part.generation for part in others)


def test_sender_sends_all_requests_once_in_parts() -> None:
    this = sender([waits("a", 1.0), waits("b", 2.0), waits("c", 3.0)], [runs("x"), runs("y")])
    parts = list(rest(this))
    assert entries(parts) == ["waits a", "waits b", "waits c", "complete", "runs x", "runs y"]
    assert max(len(part.enqueue) + len(part.running) for part in parts) == 2


def test_sender_builds_entries_lazily() -> None:
    made: list[int] = []

    def waiting() -> Iterator[Waiting]:
        for number in range(1000):
            made.append(number)
            yield waits(f"r{number}", number)

    this = sender(waiting())
    this.next_message()
    assert len(made) <= 2


def test_sender_sends_new_request_behind_mark_in_order() -> None:
    this = sender([waits("a", 1.0), waits("c", 3.0)])
    first = this.next_message()
    this.enqueue(waits("d", 4.0))
    this.enqueue(waits("b", 2.0))
    assert entries([first, *rest(this)]) == ["waits a", "waits b", "waits c", "waits d", "complete"]


def test_sender_sends_request_before_mark_at_once() -> None:
    this = sender([waits("b", 2.0), waits("c", 3.0), waits("d", 4.0), waits("e", 5.0)])
    first = this.next_message()
    this.enqueue(waits("a", 1.0))
    assert entries([first, this.next_message()]) == ["waits b", "waits a", "waits c", "waits d"]


def test_sender_omits_entries_changed_since_the_start() -> None:
    this = sender([waits(name, float(n)) for n, name in enumerate("abcd")], [runs("x"), runs("y")])
    first = this.next_message()
    this.withdraw("b")
    this.dispatched("c")
    this.withdraw("x")
    words = entries([first, *rest(this)])
    assert words == ["waits a", "waits d", "gone b", "gone x", "complete", "runs y"]


def test_sender_sends_only_latest_state_of_a_request() -> None:
    this = sender()
    list(rest(this))
    this.enqueue(waits("a", 1.0))
    this.withdraw("a")
    this.withdraw("b")
    this.enqueue(waits("b", 2.0))
    assert entries(rest(this)) == ["waits b", "gone a"]
    this.report_running(runs("b", is_preempted=True))
    this.report_running(runs("b", is_preempted=False))
    assert entries(rest(this)) == ["runs b"]


def test_sender_omits_late_request_already_withdrawn() -> None:
    this = sender([waits("a", 1.0)])
    this.enqueue(waits("late", 5.0))
    this.withdraw("late")
    this.enqueue(waits("twice", 6.0))
    this.enqueue(waits("twice", 6.0))
    assert entries(rest(this)) == ["waits a", "gone late", "waits twice", "complete"]


def test_sender_dispatch_cancels_enqueue_but_not_withdraw() -> None:
    this = sender()
    list(rest(this))
    this.enqueue(waits("a", 1.0))
    this.dispatched("a")
    this.withdraw("b")
    this.dispatched("b")
    assert entries(rest(this)) == ["gone b"]


def test_sender_sends_a_new_generation() -> None:
    this = sender(generation="one")
    list(rest(this))
    assert not this
    this.report_generation("two")
    assert [part.generation for part in rest(this)] == ["two"]
