"""Assignment of sequences to sessions, without a socket."""

from dataclasses import asdict, replace

from everlift.engine_policy import EnginePolicy
from everlift.v1 import chaos_pb2, session_pb2
from tests.support.worker.worker_support import limits, prompt, start
from worker.config import Scheduling
from worker.engine.adapter_slots import AdapterLoad
from worker.engine.limits import Limits
from worker.engine.load import Counters, Load
from worker.engine.outcome import Abort, Outcome, SequenceKey, SequenceUpdate, Stop
from worker.engine.sequence import Sequence
from worker.engine.time_breakdown import TimeBreakdown
from worker.engine.time_breakdowns import SequenceBreakdown
from worker.grammar.absent import NoGrammars
from worker.serving.loop import FirstSteps, Report
from worker.serving.sessions import Session, Sessions

LIMITS = limits()


class RecordingEngine:
    def __init__(self) -> None:
        self.orders: list[object] = []

    def start(self, sequence: Sequence) -> None:
        self.orders.append(("start", sequence.key.epoch))

    def abort(self, abort: Abort) -> None:
        self.orders.append(("abort", abort.epoch))

    def load_adapter(self, load: AdapterLoad) -> None:
        raise AssertionError

    def inject(self, fault: chaos_pb2.Fault) -> None:
        self.orders.append(("inject", fault.rank))

    def set_policy(self, policy: EnginePolicy) -> None:
        self.orders.append(policy)

    def drain(self) -> None:
        self.orders.append("drain")


def load(**fields: int) -> Load:
    names = ("num_running", "num_waiting", "blocks_used", "blocks_total", "pending_prefill_tokens")
    names += ("committed_tokens", "step", "output_tokens", "preemptions")  # type: ignore[assignment]
    return Load(**dict.fromkeys(names, 0) | fields, counters=Counters())


def report(
    *outcomes: Outcome, started: tuple[SequenceKey, ...] = (), now: Load | None = None
) -> Report:
    return Report(started, outcomes, now or load(), occupants=None)


class Desk:
    """Sessions with an engine that only records its calls."""

    def __init__(self, bounds: Limits = LIMITS) -> None:
        self.engine = RecordingEngine()
        self.sessions = Sessions(bounds, load(blocks_total=16), self.engine, NoGrammars())
        self.notified: dict[str, int] = {}

    def join(self, router_id: str) -> Session:
        self.notified[router_id] = 0

        def notify() -> None:
            self.notified[router_id] += 1

        return self.sessions.open_session(router_id, notify)

    def send(
        self, session: Session, *starts: session_pb2.Start, aborts: tuple[int, ...] = ()
    ) -> None:
        messages = [session_pb2.Abort(epoch=epoch) for epoch in aborts]
        self.sessions.receive(
            session, session_pb2.RouterFrame(starts=starts, aborts=messages), now=0.0
        )

    def set_policy(self, session: Session, version: int, name: str, *epochs: int) -> None:
        """Set the policy in one frame with starts of these epochs."""
        frame = session_pb2.RouterFrame(
            engine_policy=session_pb2.EnginePolicy(version=version, name=name),
            starts=[start(epoch, prompt(3)) for epoch in epochs],
        )
        self.sessions.receive(session, frame, now=0.0)

    def stops(self, session: Session) -> dict[int, int]:
        return {p.epoch: p.stop for p in self.sessions.take_frame(session).progress}


def test_outcome_is_delivered_to_the_starting_router() -> None:
    desk = Desk()
    a, b = desk.join("a"), desk.join("b")
    desk.send(a, start(1, prompt(3)))
    desk.send(b, start(2, prompt(3)))
    assert desk.engine.orders == [("start", 1), ("start", 2)]
    desk.sessions.deliver(report(Outcome(SequenceKey(2, 0), 0, (7,))))
    assert not desk.sessions.take_frame(a).progress
    assert desk.sessions.take_frame(b).progress[0].token_ids == [7]


def test_engine_policy_of_the_newest_version_holds() -> None:
    desk = Desk()
    a, b = desk.join("a"), desk.join("b")
    desk.set_policy(a, 5, "slai", 1)
    desk.set_policy(b, 5, "slai")
    desk.set_policy(b, 4, "static")
    assert desk.engine.orders == ["slai", ("start", 1)]
    desk.set_policy(b, 6, "magnus")
    desk.sessions.end_session(b)
    desk.set_policy(a, 5, "slai")
    assert desk.engine.orders[2:] == ["magnus"]
    assert desk.sessions.take_frame(a).state.engine_policy == "magnus"


def test_default_policy_is_the_one_the_worker_started_with() -> None:
    desk = Desk(replace(LIMITS, scheduling=Scheduling("static")))
    a = desk.join("a")
    desk.set_policy(a, 1, "default")
    assert desk.engine.orders == [], "it is that one"
    for version, name in enumerate(("continuous", "default"), 2):
        desk.set_policy(a, version, name)
    assert desk.engine.orders == ["continuous", "static"]


def test_unknown_engine_policy_is_ignored() -> None:
    desk = Desk()
    a = desk.join("a")
    desk.set_policy(a, 7, "slai")
    desk.set_policy(a, 8, "newer")
    desk.set_policy(a, 9, "")
    assert desk.engine.orders == ["slai"]


def test_breakdowns_are_sent_to_the_router_of_their_sequence() -> None:
    desk = Desk()
    a, b = desk.join("a"), desk.join("b")
    desk.send(a, start(1, prompt(3)), start(2, prompt(3)))
    breakdowns = tuple(
        SequenceBreakdown(SequenceKey(epoch, 0), TimeBreakdown(9.0, decode_s=float(epoch)))
        for epoch in (1, 2, 3)
    )
    ended = report(Outcome(SequenceKey(1, 0), 0, (7,), Stop.EOS))
    desk.sessions.deliver(replace(ended, breakdowns=breakdowns))
    assert {it.epoch: it.decode_s for it in desk.sessions.take_frame(a).breakdowns} == {
        1: 1.0,
        2: 2.0,
    }
    assert not desk.sessions.take_frame(b).breakdowns
    desk.sessions.deliver(replace(report(), breakdowns=breakdowns))
    assert {it.epoch for it in desk.sessions.take_frame(a).breakdowns} == {2}, "the other is over"


def test_decoding_breakdown_is_sent_to_every_router() -> None:
    desk = Desk()
    a, b = desk.join("a"), desk.join("b")
    desk.sessions.deliver(replace(report(), decoding=TimeBreakdown(9.0, decode_s=3.0, steps=20.0)))
    times = session_pb2.TimeBreakdown(decode_s=3.0, steps=20)
    assert [desk.sessions.take_frame(each).state.decoding for each in (a, b)] == [times, times]


def test_start_is_counted_once_from_its_acknowledgement() -> None:
    desk = Desk()
    a = desk.join("a")
    desk.send(a, start(1, prompt(10)))
    state = desk.sessions.take_frame(a).state
    assert (state.num_waiting, state.pending_prefill_tokens, state.committed_tokens) == (1, 10, 10)
    counted = load(num_running=1, committed_tokens=11, step=1)
    desk.sessions.deliver(report(started=(SequenceKey(1, 0),), now=counted))
    state = desk.sessions.take_frame(a).state
    assert (state.num_running, state.num_waiting) == (1, 0)
    assert (state.pending_prefill_tokens, state.committed_tokens) == (0, 11)


def test_engine_work_is_sent_with_the_state() -> None:
    desk = Desk()
    a = desk.join("a")
    now = load(computed_tokens=70, released_blocks=3)
    desk.sessions.deliver(replace(report(now=now), busy_s=0.5))
    state = desk.sessions.take_frame(a).state
    assert (state.computed_tokens, state.released_blocks, state.busy_s) == (70, 3, 0.5)


def test_counters_are_sent_with_the_state() -> None:
    desk = Desk()
    a = desk.join("a")
    counters = Counters(*range(1, 10))
    desk.sessions.deliver(report(now=replace(load(), counters=counters)))
    reported = desk.sessions.take_frame(a).state.counters
    assert {field.name: value for field, value in reported.ListFields()} == asdict(counters)


def test_outcome_of_an_aborted_sequence_is_dropped() -> None:
    desk = Desk()
    a = desk.join("a")
    desk.send(a, start(1, prompt(3)))
    desk.sessions.deliver(report(Outcome(SequenceKey(1, 0), 0, (7,))))
    desk.send(a, aborts=(1,))
    desk.sessions.deliver(report(Outcome(SequenceKey(1, 0), 1, (8,), Stop.LENGTH)))
    assert not desk.sessions.take_frame(a).progress
    assert desk.engine.orders == [("start", 1), ("abort", 1)]
    assert desk.sessions.is_idle


def test_outcome_of_an_aborted_choice_reaches_no_sibling() -> None:
    desk = Desk()
    a = desk.join("a")
    desk.send(a, start(1, prompt(3)))
    desk.send(a, aborts=(1,))
    desk.send(a, start(1, prompt(3), choice=1))
    desk.sessions.deliver(report(Outcome(SequenceKey(1, 0), 0, (8,), Stop.LENGTH)))
    assert not desk.sessions.take_frame(a).progress
    assert not desk.sessions.is_idle


def test_epoch_can_be_aborted_only_by_its_router() -> None:
    desk = Desk()
    a, b = desk.join("a"), desk.join("b")
    desk.send(a, start(1, prompt(3)))
    desk.send(b, aborts=(1, 99))
    assert desk.engine.orders == [("start", 1)]
    desk.send(b, start(1, prompt(3)))
    assert desk.stops(b) == {1: session_pb2.STOP_CAUSE_REFUSED}
    assert desk.engine.orders == [("start", 1)]


def test_choices_of_an_epoch_end_one_by_one() -> None:
    desk = Desk()
    a = desk.join("a")
    desk.send(a, start(1, prompt(3)), start(1, prompt(3), choice=1))
    desk.sessions.deliver(report(Outcome(SequenceKey(1, 0), 0, (7,), Stop.LENGTH)))
    assert not desk.sessions.is_idle
    desk.sessions.deliver(report(Outcome(SequenceKey(1, 1), 0, (7,), Stop.LENGTH)))
    assert desk.sessions.is_idle


def test_session_end_aborts_its_sequences_once() -> None:
    desk = Desk()
    a, b = desk.join("a"), desk.join("b")
    desk.send(a, start(1, prompt(3)), start(2, prompt(3)))
    desk.send(b, start(3, prompt(3)))
    desk.sessions.end_session(a)
    desk.sessions.end_session(a)
    assert desk.engine.orders[3:] == [("abort", 1), ("abort", 2)]
    assert a.is_closed and not b.is_closed


def test_new_session_replaces_the_routers_old_one() -> None:
    desk = Desk()
    old = desk.join("a")
    desk.send(old, start(1, prompt(3)))
    new = desk.join("a")
    assert old.is_closed and desk.engine.orders == [("start", 1), ("abort", 1)]
    desk.send(new, start(2, prompt(3)))
    desk.sessions.end_session(old)
    assert not new.is_closed and len(desk.engine.orders) == 3


def test_new_session_is_sent_all_accepted_epochs() -> None:
    desk = Desk()
    desk.send(desk.join("a"), start(1, prompt(3)), start(2, prompt(3)))
    assert desk.sessions.take_frame(desk.join("b")).accepted_epochs == [1, 2]


def test_starts_are_acknowledged_even_if_refused() -> None:
    desk = Desk()
    a, b = desk.join("a"), desk.join("b")
    desk.send(a, start(1, prompt(3)), start(2, []))
    for session in (a, b):
        assert desk.sessions.take_frame(session).accepted_epochs == [1, 2]


def test_freed_room_notifies_every_router_at_once() -> None:
    desk = Desk()
    a, _ = desk.join("a"), desk.join("b")
    desk.send(a, start(1, prompt(3)))
    before = desk.notified["b"]
    desk.sessions.deliver(report(Outcome(SequenceKey(1, 0), 0, (7,))))
    assert desk.notified["b"] == before
    desk.sessions.deliver(report(Outcome(SequenceKey(1, 0), 1, (7,), Stop.EOS)))
    assert desk.notified["b"] == before + 1


def test_drain_is_ordered_once_and_returns_later_starts() -> None:
    desk = Desk()
    a = desk.join("a")
    desk.send(a, start(1, prompt(3)))
    desk.sessions.receive(a, session_pb2.RouterFrame(drain=True), now=0.0)
    desk.sessions.drain()
    desk.send(a, start(2, prompt(3), output=[4, 5]))
    frame = desk.sessions.take_frame(a)
    assert [(p.epoch, p.offset, p.stop) for p in frame.progress] == [
        (2, 2, session_pb2.STOP_CAUSE_RETURNED)
    ]
    assert frame.state.draining
    assert desk.engine.orders == [("start", 1), "drain"]


def test_drain_notifies_every_router_at_once() -> None:
    desk = Desk()
    for router_id in ("a", "b"):
        desk.join(router_id)
    desk.sessions.drain()
    assert desk.notified == {"a": 1, "b": 1}


def test_frames_are_numbered_over_all_sessions() -> None:
    desk = Desk()
    a, b = desk.join("a"), desk.join("b")
    numbers = [desk.sessions.take_frame(session).state.sequence_number for session in (a, b, a)]
    assert numbers == [1, 2, 3]


def first_steps(*epochs: int, to_confirm: tuple[int, ...] = ()) -> FirstSteps:
    outcomes = (
        Outcome(SequenceKey(epoch, 0), 0, update=SequenceUpdate(waited_s=0.5)) for epoch in epochs
    )
    return FirstSteps(tuple(outcomes), frozenset(SequenceKey(epoch, 0) for epoch in to_confirm))


def test_news_of_a_first_step_waits_for_the_next_frame() -> None:
    desk, calls = Desk(), list[str]()
    a = desk.join("a")
    desk.send(a, start(1, prompt(3)))
    before = desk.notified["a"]
    desk.sessions.announce(first_steps(1, 2), lambda: calls.append("confirmed"))
    assert calls == ["confirmed"] and desk.notified["a"] == before
    assert [(p.epoch, p.waited_s) for p in desk.sessions.take_frame(a).progress] == [(1, 0.5)]


def test_step_is_confirmed_by_every_router() -> None:
    desk, calls = Desk(), list[str]()
    a, b = desk.join("a"), desk.join("b")
    desk.send(a, start(1, prompt(3)), start(2, prompt(3)))
    desk.send(b, start(3, prompt(3)))
    before = desk.notified["a"]
    first = first_steps(1, 2, 3, to_confirm=(1, 3))
    desk.sessions.announce(first, lambda: calls.append("confirmed"))
    assert desk.notified["a"] > before
    for session, epoch in ((a, 1), (b, 3)):
        assert not calls
        desk.sessions.receive(session, session_pb2.RouterFrame(confirmed_epochs=[epoch]), now=0.0)
    assert calls == ["confirmed"]
    desk.sessions.receive(a, session_pb2.RouterFrame(confirmed_epochs=[1, 7]), now=0.0)
    assert calls == ["confirmed"]


def test_departure_or_abort_does_not_delay_a_first_step() -> None:
    desk, calls = Desk(), list[str]()
    a, b = desk.join("a"), desk.join("b")
    desk.send(a, start(1, prompt(3)))
    desk.send(b, start(2, prompt(3)))
    first = first_steps(1, 2, to_confirm=(1, 2))
    desk.sessions.announce(first, lambda: calls.append("confirmed"))
    desk.sessions.end_session(a)
    assert not calls
    desk.send(b, aborts=(2,))
    assert calls == ["confirmed"]


def test_overdue_confirmation_delays_no_other_step() -> None:
    desk, calls = Desk(), list[str]()
    a = desk.join("a")
    desk.send(a, start(1, prompt(3)), start(2, prompt(3)), start(3, prompt(3)))
    desk.sessions.announce(first_steps(1, to_confirm=(1,)), lambda: calls.append("1"))
    assert not calls
    desk.sessions.announce(first_steps(2, to_confirm=(2,)), lambda: calls.append("2"))
    assert calls == ["2"]
    desk.sessions.receive(a, session_pb2.RouterFrame(confirmed_epochs=[1]), now=0.0)
    desk.sessions.announce(first_steps(3, to_confirm=(3,)), lambda: calls.append("3"))
    assert calls == ["2"]
    desk.sessions.receive(a, session_pb2.RouterFrame(confirmed_epochs=[3]), now=0.0)
    assert calls == ["2", "3"]


def test_prefill_progress_goes_with_the_next_frame() -> None:
    desk = Desk()
    a = desk.join("a")
    desk.send(a, start(1, prompt(3)))
    desk.sessions.take_frame(a)
    before = desk.notified["a"]
    progress = tuple(Outcome(SequenceKey(epoch, 0), 0, prefilled_tokens=2) for epoch in (1, 9))
    desk.sessions.deliver(replace(report(), prefilling=progress))
    assert desk.notified["a"] == before
    assert [(p.epoch, p.prefilled_tokens) for p in desk.sessions.take_frame(a).progress] == [(1, 2)]
    assert not desk.sessions.take_frame(a).progress
