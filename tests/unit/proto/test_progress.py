"""Progress in the log at intervals, and as a bar on a terminal."""

import logging
import os
import pty
import select
import sys
from collections.abc import Iterator

import pytest

from everlift.progress import log_progress, show_progress


def test_progress_is_logged_every_few_seconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "everlift")
    now = 0.0
    progress = log_progress("weights loading", lambda: now)
    for now in (0.0, 4.9, 5.0, 9.9, 10.0, 30.0):
        progress(int(now * 2**20), 40 << 20)
    fields = [record.everlift_fields for record in caplog.records]  # type: ignore[attr-defined]
    assert [(f["done_mib"], f["total_mib"]) for f in fields] == [(5, 40), (10, 40), (30, 40)]
    assert {record.getMessage() for record in caplog.records} == {"weights loading"}


def test_progress_without_terminal_draws_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with show_progress("weights loading") as progress:
        progress(1, 2)
    assert capfd.readouterr() == ("", "")


def test_progress_draws_bar_on_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with show_progress("weights loading") as progress:
            progress(3_000_000, 4_000_000)
    shown = b"".join(_read_to_the_end(ours)).decode()
    assert "weights loading" in shown and "3.0/4.0 MB" in shown


def test_progress_without_work_draws_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with show_progress("model downloading"):
            pass
        assert not select.select([ours], [], [], 0)[0]
    os.close(ours)


def _read_to_the_end(terminal: int) -> Iterator[bytes]:
    """Yield output of a terminal until its other end is closed, which is a read error."""
    with os.fdopen(terminal, "rb", buffering=0) as shown:
        try:
            while piece := shown.read(65536):
                yield piece
        except OSError:
            return
