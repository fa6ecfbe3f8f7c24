"""Predictor file: reloaded when it changes, unless it is invalid."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from router.prediction.file import PredictorFile
from router.prediction.model import Model
from tests.support.router.prediction_support import learnt


@pytest.fixture
def log_lines(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, object]]]:
    """Return a list to which log lines are added: level and event, and fields."""
    lines: list[tuple[str, dict[str, object]]] = []

    def logger(level: str) -> Callable[..., None]:
        return lambda event, **fields: lines.append((f"{level}: {event}", fields))

    for level in ("info", "error"):
        monkeypatch.setattr(f"router.prediction.file.log.{level}", logger(level))
    return lines


def write(path: Path, text: str) -> None:
    """Replace the file's content."""
    path.with_suffix(".new").write_text(text)
    os.replace(path.with_suffix(".new"), path)


async def test_predictor_file_is_loaded_once_per_version(
    tmp_path: Path, log_lines: list[tuple[str, dict[str, object]]]
) -> None:
    path, loaded = tmp_path / "lengths.json", list[Model]()
    file = PredictorFile(path, loaded.append)
    await file.reload()
    assert [fields["cause"] for _, fields in log_lines] == ["No such file or directory"]
    write(path, learnt()[0])
    for _ in range(3):
        await file.reload()
    assert len(loaded) == 1
    write(path, learnt()[0])
    await file.reload()
    assert len(loaded) == 2
    assert [line for line, _ in log_lines[1:]] == ["info: predictor loaded"] * 2


async def test_predictor_file_is_loaded_at_start(
    tmp_path: Path, log_lines: list[tuple[str, dict[str, object]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, requests of the first second would be predicted without it."""
    monkeypatch.setattr("router.prediction.file._POLL_INTERVAL_S", 3600.0)
    write(tmp_path / "lengths.json", learnt()[0])
    loaded = asyncio.Event()
    file = PredictorFile(tmp_path / "lengths.json", lambda _: loaded.set())
    following = asyncio.create_task(file.run())
    async with asyncio.timeout(60.0):
        await loaded.wait()
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following


async def test_broken_predictor_file_is_logged_once_and_not_loaded(
    tmp_path: Path, log_lines: list[tuple[str, dict[str, object]]]
) -> None:
    path, loaded = tmp_path / "lengths.json", list[Model]()
    file = PredictorFile(path, loaded.append)
    for text in (learnt()[0], '{"kind": "else"}', learnt()[0][:-90]):
        write(path, text)
        for _ in range(3):
            await file.reload()
    assert len(loaded) == 1
    assert [fields.get("cause") for _, fields in log_lines] == [
        None,
        "is not a predictor of output lengths",
        "is not JSON",
    ]
    write(path, learnt()[0])
    await file.reload()
    assert len(loaded) == 2


async def test_mismatched_predictor_file_is_logged_once(
    tmp_path: Path, log_lines: list[tuple[str, dict[str, object]]]
) -> None:
    def refuse(model: Model) -> None:
        raise ValueError("is of 'a', and 'b' is served")

    path = tmp_path / "lengths.json"
    file = PredictorFile(path, refuse)
    write(path, learnt()[0])
    for _ in range(3):
        await file.reload()
    assert log_lines == [
        (
            "error: predictor not loaded",
            {"path": str(path), "cause": "is of 'a', and 'b' is served"},
        )
    ]


async def test_oversized_predictor_file_is_not_read(
    tmp_path: Path, log_lines: list[tuple[str, dict[str, object]]]
) -> None:
    path = tmp_path / "lengths.json"
    path.touch()
    os.truncate(path, 1 << 34)
    await PredictorFile(path, lambda _: None).reload()
    assert [fields["cause"] for _, fields in log_lines] == [f"has more than {16 << 20} bytes"]
