"""Search for leftovers after each test, while other tests run on the same machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import conftest

_MAPPED = "import mmap, os; held = mmap.mmap(os.open(path, os.O_RDWR), 0); os.closerange(3, 9)"
_OPEN = "held = open(path)"


@pytest.fixture
def segment() -> Iterator[Path]:
    path = Path(f"/dev/shm/everlift-test-{os.getpid()}")
    yield path
    path.unlink()


def test_leftover_shared_memory_fails_the_test(
    segment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "_TIMEOUT_S", 0.0)
    with pytest.raises(AssertionError, match=segment.name), conftest.leaving_nothing():
        segment.write_bytes(b"-" * 4096)


@pytest.mark.parametrize("holding", [_MAPPED, _OPEN], ids=["mapped", "open"])
def test_leftover_check_ignores_segments_of_other_processes(
    segment: Path, holding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = conftest._things()
    segment.write_bytes(b"-" * 4096)
    program = f"import sys; path = sys.argv[1]; {holding}; print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program, str(segment)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None and other.stdout is not None
        other.stdout.readline()
        assert conftest._left(before).shared_memory == {segment.name}, "a child's is ours"
        monkeypatch.setattr(conftest, "_family", lambda pid: [pid])
        assert not conftest._left(before)
        other.stdin.close()
