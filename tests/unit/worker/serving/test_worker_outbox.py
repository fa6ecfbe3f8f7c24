"""Messages that are still to be sent to a router."""

from everlift.errors import EngineFailed
from everlift.v1 import session_pb2
from tests.support.worker.worker_support import prompt
from worker.engine.load import Occupant
from worker.engine.outcome import Outcome, Residence, SequenceKey, SequenceUpdate, Stop
from worker.engine.time_breakdown import TimeBreakdown
from worker.engine.time_breakdowns import SequenceBreakdown
from worker.serving.outbox import _MAX_ACCEPTED, Outbox

A, B = SequenceKey(1, 0), SequenceKey(1, 1)


def outbox() -> Outbox:
    return Outbox(lambda: None)


def cut(this: Outbox) -> session_pb2.WorkerFrame:
    return this.take_frame(session_pb2.WorkerState(step=9))


def test_outbox_merges_tokens_until_frame_is_cut() -> None:
    this = outbox()
    this.push(Outcome(A, 5, (10,)))
    this.push(Outcome(B, 0, (20,)))
    this.push(Outcome(A, 6, (11, 12)))
    this.push(Outcome(A, 8, (13,), Stop.EOS))
    this.push(Outcome(B, 1, (), Stop.FAILED, EngineFailed("why")))
    assert list(cut(this).progress) == [
        session_pb2.Progress(
            epoch=1, offset=5, token_ids=[10, 11, 12, 13], stop=session_pb2.STOP_CAUSE_EOS
        ),
        session_pb2.Progress(
            epoch=1,
            choice=1,
            token_ids=[20],
            stop=session_pb2.STOP_CAUSE_FAILED,
            error="why",
            error_slug="engine_failed",
        ),
    ]
    assert not this
    this.push(Outcome(A, 9, (14,)))
    assert cut(this).progress[0].offset == 9


def test_outbox_merges_residence_and_news() -> None:
    """A frame has the last residence, and the sums of all counts since the previous frame."""
    this = outbox()
    this.push(
        Outcome(A, 5, num_computed=90, update=SequenceUpdate(Residence.PREEMPTED, preemptions=1))
    )
    this.push(Outcome(A, 5, num_computed=90, update=SequenceUpdate(Residence.RESUMED, 0, 40)))
    this.push(Outcome(A, 5, (7,), num_computed=91, update=SequenceUpdate(None, 0, 3)))
    this.push(Outcome(B, 0, update=SequenceUpdate(Residence.RESUMED)))
    this.push(Outcome(B, 0, update=SequenceUpdate(Residence.PREEMPTED, preemptions=1)))
    assert list(cut(this).progress) == [
        session_pb2.Progress(
            epoch=1,
            offset=5,
            token_ids=[7],
            residence=session_pb2.RESIDENCE_RESUMED,
            preemptions=1,
            recomputed_tokens=43,
            num_computed=91,
        ),
        session_pb2.Progress(
            epoch=1, choice=1, residence=session_pb2.RESIDENCE_PREEMPTED, preemptions=1
        ),
    ]


def test_outbox_sends_last_breakdown_with_next_frame() -> None:
    calls: list[int] = []
    this = Outbox(lambda: calls.append(1))
    this.add_breakdown(
        SequenceBreakdown(A, TimeBreakdown(2.0, prefill_s=1.5, decode_s=0.5, steps=2.0))
    )
    this.add_breakdown(
        SequenceBreakdown(A, TimeBreakdown(3.0, prefill_s=1.5, decode_s=1.5, steps=3.0))
    )
    this.add_breakdown(SequenceBreakdown(B, TimeBreakdown(3.0, waiting_s=3.0)))
    assert not calls and not this
    assert list(cut(this).breakdowns) == [
        session_pb2.TimeBreakdown(epoch=1, prefill_s=1.5, decode_s=1.5, steps=3),
        session_pb2.TimeBreakdown(epoch=1, choice=1, waiting_s=3.0),
    ]
    assert not cut(this).breakdowns


def test_outbox_frame_always_has_state() -> None:
    assert cut(outbox()) == session_pb2.WorkerFrame(state=session_pb2.WorkerState(step=9))


def test_outbox_does_not_send_dropped_sequences() -> None:
    this = outbox()
    this.push(Outcome(A, 0, (1,)))
    this.push(Outcome(B, 0, (2,)))
    this.add_breakdown(SequenceBreakdown(A, TimeBreakdown(2.0)))
    this.add_breakdown(SequenceBreakdown(B, TimeBreakdown(2.0)))
    this.drop(A)
    this.drop(SequenceKey(9, 0))
    frame = cut(this)
    assert [it.choice for it in frame.progress] == [it.choice for it in frame.breakdowns] == [1]


def test_outbox_sends_acknowledgements_once_and_bounded() -> None:
    this = outbox()
    for epoch in range(1, _MAX_ACCEPTED + 3):
        this.accept(epoch)
    accepted = cut(this).accepted_epochs
    assert (accepted[0], len(accepted)) == (3, _MAX_ACCEPTED)
    assert not cut(this).accepted_epochs


def test_outbox_occupants_do_not_trigger_a_frame() -> None:
    this = outbox()
    this.set_occupants((Occupant(2, "old"),))
    this.set_occupants((Occupant(3, "new", prefilling=True),))
    assert not this
    [occupant] = cut(this).state.running
    assert (occupant.slot, occupant.request_id, occupant.prefilling) == (3, "new", True)
    assert not cut(this).state.running


def test_outbox_notifies_of_pending_frame() -> None:
    calls: list[int] = []
    this = Outbox(lambda: calls.append(1))
    this.push(Outcome(A, 0, tuple(prompt(3))))
    this.accept(1)
    assert len(calls) == 2


def test_outbox_sends_the_last_state_of_each_chunk_once() -> None:
    this = outbox()
    this.add_chunks({1: True, 2: True}, {7: True})
    this.add_chunks({2: False, 3: False}, {8: False})
    this.add_prefilled(5)
    frame = cut(this)
    assert sorted(frame.stored_chunks) == [1] and sorted(frame.evicted_chunks) == [2, 3]
    assert list(frame.stored_host_chunks) == [7] and list(frame.evicted_host_chunks) == [8]
    assert list(frame.prefilled_epochs) == [5]
    frame = cut(this)
    assert not (frame.stored_chunks or frame.evicted_chunks or frame.prefilled_epochs)
