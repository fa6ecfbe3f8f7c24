"""Thread of a rank's engine."""

from __future__ import annotations

from typing import Any

import pytest

from worker.config import WorkerConfig
from worker.engine.engine import EngineBroken
from worker.parallel.rendezvous import RankLinks
from worker.runner.fake_runner import FakeRunner
from worker.serving import engine_thread
from worker.serving.engine_thread import EngineThread
from worker.serving.inbox import Inbox
from worker.serving.startup import Startup


def test_engine_thread_keeps_cause_if_runner_close_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU answers every call after an illegal access with that error."""

    class Lost(FakeRunner):
        def close(self) -> None:
            raise RuntimeError("CUDA error")

    class Breaking:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def run(self) -> None:
            raise EngineBroken("step 7")

    config = WorkerConfig(model="fake")
    monkeypatch.setattr(
        engine_thread, "_build_runner", lambda *_: Lost(config.num_blocks or 8, config.fake)
    )
    monkeypatch.setattr(engine_thread, "LeadingLoop", Breaking)
    thread = EngineThread(config, RankLinks, Inbox(), print, print, Startup(), print)
    error = thread.ended.exception(timeout=60)
    assert isinstance(error, EngineBroken) and str(error) == "step 7"


@pytest.mark.parametrize("chaos", [False, True])
def test_engine_thread_checks_integrity_only_with_chaos(
    chaos: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {}

    class Recording:
        def __init__(self, *_: object, **given: object) -> None:
            options.update(given)

        def run(self) -> None:
            pass

    monkeypatch.setattr(engine_thread, "LeadingLoop", Recording)
    config = WorkerConfig(model="fake", chaos=chaos)
    thread = EngineThread(config, RankLinks, Inbox(), print, print, Startup(), print)
    thread.ended.result(timeout=60)
    assert options["checks_integrity"] is chaos
