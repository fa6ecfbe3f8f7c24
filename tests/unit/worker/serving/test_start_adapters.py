"""Starts that name a LoRA adapter, without a socket."""

from __future__ import annotations

from dataclasses import replace

import pytest

from everlift.v1 import session_pb2
from tests.support.worker.worker_support import limits, start
from tests.unit.worker.serving.test_omitted_prefix import LOAD, RecordingEngine
from worker.engine.adapter_slots import AdapterLoad, AdapterLoaded
from worker.grammar.absent import NoGrammars
from worker.serving.loop import Report
from worker.serving.sessions import Sessions

BOUNDS = replace(limits(), adapters={"sql": "digest"})


def sent(adapter: str, digest: str) -> tuple[RecordingEngine, session_pb2.WorkerFrame]:
    engine = RecordingEngine()
    sessions = Sessions(BOUNDS, LOAD, engine, NoGrammars())
    router = sessions.open_session("router", lambda: None)
    message = start(1, [5, 6, 7], output=[8])
    message.adapter, message.adapter_digest = adapter, digest
    sessions.receive(router, session_pb2.RouterFrame(starts=[message]), now=0.0)
    return engine, sessions.take_frame(router)


@pytest.mark.parametrize(("adapter", "digest"), [("", ""), ("sql", ""), ("sql", "digest")])
def test_start_with_a_served_adapter_is_accepted(adapter: str, digest: str) -> None:
    engine, frame = sent(adapter, digest)
    [sequence] = engine.started
    assert sequence.adapter == sequence.to_start().adapter == adapter
    assert not frame.progress


@pytest.mark.parametrize(
    ("adapter", "digest", "cause"),
    [
        ("sql", "another", "the files of the adapter 'sql' differ at this worker"),
        ("other", "", "this worker does not serve the adapter 'other'"),
    ],
)
def test_start_with_another_adapter_can_continue_elsewhere(
    adapter: str, digest: str, cause: str
) -> None:
    engine, frame = sent(adapter, digest)
    [progress] = frame.progress
    assert not engine.started
    assert progress.stop == session_pb2.STOP_CAUSE_FAILED
    assert (progress.offset, progress.error, progress.error_slug) == (1, cause, "engine_failed")


class LoadingEngine(RecordingEngine):
    """Engine that records loads of adapters, and the number of starts before the drain."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[AdapterLoad] = []
        self.drained_after: int | None = None

    def load_adapter(self, load: AdapterLoad) -> None:
        self.loads.append(load)

    def drain(self) -> None:
        self.drained_after = len(self.started)


def test_drain_ends_starts_that_wait_for_an_adapter_slot() -> None:
    """The end of the second start gives the third one its slot, and the drain returns that."""
    engine = LoadingEngine()
    sessions = Sessions(replace(limits(), num_adapter_slots=1), LOAD, engine, NoGrammars())
    router = sessions.open_session("router", lambda: None)
    for epoch, adapter in enumerate(("one", "two", "one"), 1):
        message = start(epoch, [5, 6, 7])
        message.adapter, message.adapter_digest = adapter, f"digest of {adapter}"
        message.adapter_source = f"{adapter}=org/{adapter}"
        sessions.receive(router, session_pb2.RouterFrame(starts=[message]), now=0.0)
        if epoch == 1:
            [load] = engine.loads
            loaded = AdapterLoaded(load, 0.0, 1.0)
            sessions.deliver(Report((), (), LOAD, occupants=None, adapters=(loaded,)))
    assert [it.key.epoch for it in engine.started] == [1]
    sessions.drain()
    assert [it.epoch for it in sessions.take_frame(router).progress] == [2]
    assert [it.key.epoch for it in engine.started] == [1, 3]
    assert engine.drained_after == 2
