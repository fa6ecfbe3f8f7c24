"""Starts that name a LoRA adapter, without a socket."""

from __future__ import annotations

from dataclasses import replace

import pytest

from everlift.v1 import session_pb2
from tests.support.worker.worker_support import limits, start
from tests.unit.worker.serving.test_omitted_prefix import LOAD, RecordingEngine
from worker.grammar.absent import NoGrammars
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
