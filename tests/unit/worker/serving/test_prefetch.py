"""Prefetch of a model's weights into the page cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from worker.serving import prefetch

MIB = 1 << 20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for number, mib in ((1, 20), (2, 9)):
        (tmp_path / f"model-0000{number}-of-00002.safetensors").write_bytes(bytes(mib * MIB))
    index = '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "%s"}}'
    (tmp_path / "model.safetensors.index.json").write_text(
        index % "model-00002-of-00002.safetensors"
    )
    return tmp_path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Return the list of (file, start, length) of each call of posix_fadvise."""
    asked: list[tuple[str, int, int]] = []

    def advise(descriptor: int, start: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        asked.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, start, length))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    return asked


@pytest.mark.parametrize("ranks", [1, 3])
def test_prefetch_of_ranks_covers_each_byte_once(
    ranks: int, model: Path, asked: list[tuple[str, int, int]]
) -> None:
    for rank in range(ranks):
        prefetch._prefetch(str(model), "", rank, ranks)
    for number, mib in ((1, 20), (2, 9)):
        parts = sorted(
            (start, start + length) for file, start, length in asked if f"0000{number}-" in file
        )
        assert [start for start, _ in parts] == [0, *(end for _, end in parts[:-1])]
        assert parts[-1][1] == mib * MIB
        assert all(end - start <= 8 * MIB for start, end in parts)


def test_prefetch_is_skipped_without_memory_room(
    model: Path, asked: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "_max_bytes", lambda: 29 * MIB - 1)
    prefetch._prefetch(str(model), "", 0, 1)
    assert asked == []


def test_prefetch_ignores_missing_model(tmp_path: Path, asked: list[tuple[str, int, int]]) -> None:
    for model in (tmp_path, tmp_path / "none"):
        prefetch._prefetch(str(model), "", 0, 1)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    prefetch._prefetch(str(tmp_path), "", 0, 1)
    assert asked == []
