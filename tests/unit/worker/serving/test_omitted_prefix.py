"""Starts that leave out tokens which the worker should have, without a socket."""

from __future__ import annotations

import pytest

from everlift.engine_policy import EnginePolicy
from everlift.hashes import CHUNK_SIZE, chunk_hashes
from everlift.v1 import chaos_pb2, session_pb2
from tests.support.worker.worker_support import limits, shortened, start
from worker.engine.adapter_slots import AdapterLoad
from worker.engine.blocks import ChunkChanges
from worker.engine.load import Counters, Load
from worker.engine.outcome import Abort, Outcome, SequenceKey, Stop
from worker.engine.sequence import Sequence
from worker.grammar.absent import NoGrammars
from worker.serving.loop import Report
from worker.serving.sessions import Session, Sessions

BOUNDS = limits(num_blocks=256, max_model_len=8192)
LOAD = Load(0, 0, 0, 256, 0, 0, 0, 0, 0, Counters())
PROMPT = [(3 * i) % 1000 for i in range(2 * CHUNK_SIZE + 50)]
SALT = b"s" * 32


class RecordingEngine:
    def __init__(self) -> None:
        self.started: list[Sequence] = []
        self.aborted: list[int] = []

    def start(self, sequence: Sequence) -> None:
        self.started.append(sequence)

    def abort(self, abort: Abort) -> None:
        self.aborted.append(abort.epoch)

    def load_adapter(self, load: AdapterLoad) -> None:
        raise AssertionError

    def inject(self, fault: chaos_pb2.Fault) -> None:
        raise AssertionError

    def set_policy(self, policy: EnginePolicy) -> None:
        raise AssertionError

    def drain(self) -> None:
        pass


class Worker:
    def __init__(self) -> None:
        self.engine = RecordingEngine()
        self.sessions = Sessions(BOUNDS, LOAD, self.engine, NoGrammars())
        self.notified = 0
        self.router = self.join("a")
        self.frame()

    def join(self, name: str) -> Session:
        return self.sessions.open_session(name, self.notify)

    def notify(self) -> None:
        self.notified += 1

    def send(
        self, *starts: session_pb2.Start, aborts: tuple[int, ...] = ()
    ) -> session_pb2.WorkerFrame:
        messages = [session_pb2.Abort(epoch=epoch) for epoch in aborts]
        frame = session_pb2.RouterFrame(starts=starts, aborts=messages)
        self.sessions.receive(self.router, frame, now=0.0)
        return self.frame()

    def frame(self) -> session_pb2.WorkerFrame:
        return self.sessions.take_frame(self.router)

    def end(self, epoch: int, choice: int = 0) -> None:
        outcome = Outcome(SequenceKey(epoch, choice), 0, (), Stop.LENGTH)
        self.sessions.deliver(Report((), (outcome,), LOAD, occupants=None))

    @property
    def pending(self) -> int:
        return self.frame().state.num_waiting

    @property
    def num_stored(self) -> int:
        return len(self.sessions._chunks)


def whole(epoch: int, choice: int = 0, output: tuple[int, ...] = ()) -> session_pb2.Start:
    return start(epoch, PROMPT, 600, output, choice, salt=SALT)


def incomplete(frame: session_pb2.WorkerFrame) -> list[tuple[int, int]]:
    return [(it.epoch, it.choice) for it in frame.incomplete_starts]


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_start_is_completed_from_a_running_prompt(num_chunks: int) -> None:
    worker = Worker()
    worker.send(whole(1))
    frame = worker.send(shortened(whole(2), num_chunks))
    assert not incomplete(frame) and list(frame.accepted_epochs) == [2]
    first, second = worker.engine.started
    assert second.to_start() == whole(2)
    assert second.tokens == first.tokens and second.num_prompt == len(PROMPT)
    assert second._hashes[:8] == first._hashes[:8]
    assert worker.pending == 2


def test_choices_of_a_request_share_its_prompt() -> None:
    worker = Worker()
    worker.send(whole(1), shortened(whole(1, 1), 2), shortened(whole(1, 2), 2))
    assert [it.to_start() for it in worker.engine.started] == [whole(1, i) for i in range(3)]
    worker.end(1)
    worker.end(1, 1)
    assert worker.num_stored == 2
    worker.end(1, 2)
    assert worker.num_stored == 0


def test_output_is_completed_as_well() -> None:
    worker = Worker()
    output = tuple(range(5, 5 + CHUNK_SIZE))
    worker.send(whole(1, output=output))
    (first,) = worker.engine.started
    worker.send(shortened(whole(2, output=(*output, 7)), 3))
    assert first.num_output == CHUNK_SIZE
    assert worker.engine.started[1].to_start() == whole(2, output=(*output, 7))


def test_cached_chunks_complete_a_later_turn() -> None:
    worker = Worker()
    worker.send(whole(1))
    names = chunk_hashes(PROMPT, SALT)
    changes = ChunkChanges(dict.fromkeys(names, True))
    worker.sessions.deliver(Report((), (), LOAD, occupants=None, chunks=changes))
    worker.end(1)
    assert not incomplete(worker.send(shortened(whole(2), 2)))
    changes = ChunkChanges({names[1]: False})
    worker.sessions.deliver(Report((), (), LOAD, occupants=None, chunks=changes))
    worker.end(2)
    assert incomplete(worker.send(shortened(whole(3), 2))) == [(3, 0)]
    assert not incomplete(worker.send(shortened(whole(4), 1)))


def test_missing_prefix_is_reported_and_counted_as_load() -> None:
    worker = Worker()
    worker.join("b")
    notified = worker.notified
    frame = worker.send(shortened(whole(1), 2))
    assert worker.notified > notified
    assert incomplete(frame) == [(1, 0)] and list(frame.accepted_epochs) == [1]
    assert not frame.progress and not frame.prefilled_epochs and not worker.engine.started
    assert frame.state.num_waiting == 1
    assert frame.state.pending_prefill_tokens == frame.state.committed_tokens == len(PROMPT)
    assert not worker.sessions.is_idle
    assert not incomplete(worker.frame()), "it is reported once"


def test_whole_start_replaces_the_incomplete_one() -> None:
    worker = Worker()
    worker.send(shortened(whole(1), 2), shortened(whole(1, 1), 2))
    frame = worker.send(whole(1), shortened(whole(1, 1), 2))
    assert not incomplete(frame) and not frame.progress
    frame = worker.send(whole(1, 1), whole(1), whole(1, 1))
    assert [it.to_start() for it in worker.engine.started] == [whole(1), whole(1, 1)]
    assert frame.state.committed_tokens == 2 * len(PROMPT) and not frame.prefilled_epochs
    worker.end(1)
    worker.end(1, 1)
    assert worker.sessions.is_idle and worker.num_stored == 0


def test_incomplete_start_that_is_repeated_is_reported_again() -> None:
    worker = Worker()
    for _ in range(2):
        frame = worker.send(shortened(whole(1), 2))
        assert incomplete(frame) == [(1, 0)] and frame.state.num_waiting == 1
    assert not frame.prefilled_epochs and not worker.engine.started


def test_whole_start_that_is_invalid_is_refused() -> None:
    worker = Worker()
    worker.send(shortened(whole(1), 2))
    bad = whole(1)
    bad.max_tokens = 0
    frame = worker.send(bad)
    assert [it.stop for it in frame.progress] == [session_pb2.STOP_CAUSE_REFUSED]
    assert worker.sessions.is_idle and frame.state.num_waiting == 0
    assert list(frame.prefilled_epochs) == [1]


@pytest.mark.parametrize("by", ["abort", "end of the session"])
def test_incomplete_start_is_aborted(by: str) -> None:
    worker = Worker()
    other = worker.join("b")
    worker.sessions.take_frame(other)
    worker.send(shortened(whole(1), 2))
    if by == "abort":
        worker.send(aborts=(1,))
    else:
        worker.sessions.end_session(worker.router)
    frame = worker.sessions.take_frame(other)
    assert worker.sessions.is_idle and not worker.sessions._incomplete
    assert list(frame.prefilled_epochs) == [1] and frame.state.num_waiting == 0


def test_abort_removes_the_report_of_a_missing_prefix() -> None:
    worker = Worker()
    frame = worker.send(shortened(whole(1), 2), aborts=(1,))
    assert not incomplete(frame)


def test_drain_returns_incomplete_starts() -> None:
    worker = Worker()
    output = tuple(range(5, 5 + CHUNK_SIZE))
    worker.send(shortened(whole(1, output=output), 3))
    worker.sessions.drain()
    (progress,) = worker.frame().progress
    assert progress.stop == session_pb2.STOP_CAUSE_RETURNED and progress.offset == CHUNK_SIZE
    assert worker.sessions.is_idle and worker.pending == 0
    (later,) = worker.send(shortened(whole(2, output=output), 3)).progress
    assert later.stop == session_pb2.STOP_CAUSE_RETURNED and later.offset == CHUNK_SIZE


def test_prompt_of_another_tenant_is_not_completed() -> None:
    worker = Worker()
    worker.send(whole(1))
    other = shortened(whole(2), 2)
    other.salt = b"t" * 32
    assert incomplete(worker.send(other)) == [(2, 0)]
    assert len(worker.engine.started) == 1


@pytest.mark.parametrize("num_prompt", [256, 3 * 256])
def test_prefix_of_another_length_is_not_completed(num_prompt: int) -> None:
    worker = Worker()
    worker.send(whole(1))
    wrong = shortened(whole(2), 2)
    wrong.omitted_prefix.num_prompt = num_prompt
    assert incomplete(worker.send(wrong)) == [(2, 0)]


@pytest.mark.parametrize(
    ("num_prompt", "num_output", "prompt"),
    [
        (255, 0, [1]),
        (512, 1, []),
        (256, 256, [1]),
        (0, 256, [1]),
        (1 << 31, 0, [1]),
        ((1 << 32) - 256, (1 << 32) - 256, []),
        ((1 << 32) - 1, (1 << 32) - 1, []),
    ],
)
def test_malformed_prefix_is_refused(num_prompt: int, num_output: int, prompt: list[int]) -> None:
    worker = Worker()
    worker.send(whole(1))
    bad = shortened(whole(2), 2)
    del bad.prompt_ids[:]
    bad.prompt_ids.extend(prompt)
    bad.omitted_prefix.num_prompt, bad.omitted_prefix.num_output = num_prompt, num_output
    (progress,) = worker.send(bad, whole(3)).progress
    assert (progress.epoch, progress.stop) == (2, session_pb2.STOP_CAUSE_REFUSED)
    assert [it.key.epoch for it in worker.engine.started] == [1, 3]


def test_empty_prefix_leaves_a_start_whole() -> None:
    worker = Worker()
    message = whole(1)
    message.omitted_prefix.SetInParent()
    worker.send(message)
    assert [it.to_start() for it in worker.engine.started] == [whole(1)]
