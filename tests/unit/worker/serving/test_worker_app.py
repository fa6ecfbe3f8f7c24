"""Announcement of a ready worker under Ray Serve; tests/e2e has end-to-end tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from everlift.errors import InvalidRequest, LedgerUnavailable

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


def ready_worker(monkeypatch: pytest.MonkeyPatch, answers: list[str | Exception]) -> Any:
    """Return a replica that will announce itself to a router with the given ``answers``."""
    from worker.serving import app

    async def announce(info: bytes) -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def info() -> bytes:
        return b"info"

    monkeypatch.setattr(app, "_ANNOUNCE_S", 0.0)
    made: Any = object.__new__(app.WorkerDeployment.func_or_class)
    made._router = SimpleNamespace(announce=SimpleNamespace(remote=announce))
    made._ranks = [SimpleNamespace(info=SimpleNamespace(remote=info))]
    return made


async def test_worker_retries_announcement_until_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[str | Exception] = [LedgerUnavailable("away"), OSError("no replica"), ""]
    await ready_worker(monkeypatch, answers)._join()
    assert not answers


async def test_worker_refused_by_router_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="refused this worker: another model"):
        await ready_worker(monkeypatch, ["another model"])._join()


async def test_announce_refuses_mismatch_and_raises_transient_error() -> None:
    from router import app

    async def announce(info: object) -> None:
        raise causes.pop(0)

    causes = [InvalidRequest("another model"), LedgerUnavailable("away")]
    router: Any = object.__new__(app.RouterDeployment.func_or_class)
    router._router = SimpleNamespace(announce=announce)
    assert await router.announce(b"") == "another model"
    with pytest.raises(LedgerUnavailable):
        await router.announce(b"")
    router._router = None
