"""Texts of clients, operators and other machines are shown unchanged: no bracket becomes markup."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from cluster.bar import bar
from cluster.chaos.run import Injection, describe

ODD = "[fd00::1] [/home] [bold]"


def printed(text: str) -> str:
    console = Console(highlight=False, width=200, file=StringIO())
    with console.capture() as capture:
        console.print(text)
    return capture.get()


def test_fault_description_shows_brackets_literally() -> None:
    assert ODD in printed(describe(Injection("kill worker", 10.0, ODD)))
    assert ODD in printed(describe(Injection("kill worker", 10.0, "", ODD)))


def test_progress_bar_shows_brackets_literally(capsys: pytest.CaptureFixture[str]) -> None:
    with bar(ODD, 1, shown=True) as advance:
        advance(1)
    assert "[fd00::1]" in capsys.readouterr().err
