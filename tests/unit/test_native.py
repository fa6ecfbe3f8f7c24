"""C++ compiled at first use: when it is, when it is not, and what happens where it cannot be."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from worker import native

SOURCE = 'extern "C" int answer() { return 42; }\n'

needs_compiler = pytest.mark.skipif(
    subprocess.call(["sh", "-c", "command -v g++"], stdout=subprocess.DEVNULL) != 0,
    reason="no g++ here",
)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "answer.cpp"
    path.write_text(SOURCE)
    return path


def libraries(source: Path) -> list[Path]:
    return sorted((source.parent / "cache" / "everlift" / "native").iterdir())


@needs_compiler
def test_it_is_compiled_once_and_again_when_it_changes(source: Path) -> None:
    library = native.compiled(source)
    assert library is not None and library.answer() == 42
    (made,) = libraries(source)
    moment = made.stat().st_mtime_ns
    assert native.compiled(source) is not None
    assert [path.stat().st_mtime_ns for path in libraries(source)] == [moment]
    source.write_text(SOURCE.replace("42", "43"))
    changed = native.compiled(source)
    assert changed is not None and changed.answer() == 43
    assert len(libraries(source)) == 2


@needs_compiler
def test_a_header_that_changes_makes_another_library(source: Path) -> None:
    header = source.with_name("number.h")
    source.write_text('#include "number.h"\nextern "C" int answer() { return NUMBER; }\n')
    for number in (1, 2):
        header.write_text(f"#define NUMBER {number}\n")
        library = native.compiled(source)
        assert library is not None and library.answer() == number


@needs_compiler
def test_other_flags_are_another_library(source: Path) -> None:
    source.write_text('extern "C" int answer() { return ANSWER; }\n')
    for answer in (1, 2):
        library = native.compiled(source, [f"-DANSWER={answer}"])
        assert library is not None and library.answer() == answer


@needs_compiler
def test_what_does_not_compile_is_none_and_says_why(
    source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source.write_text("this is not C++\n")
    assert native.compiled(source) is None
    assert "compiling failed" in caplog.text
    assert not libraries(source)


def test_without_a_compiler_there_is_none(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    assert native.compiled(source) is None
    assert "no C++ compiler" in caplog.text


@needs_compiler
def test_a_directory_to_which_others_can_write_is_not_used(source: Path) -> None:
    directory = source.parent / "cache" / "everlift" / "native"
    directory.mkdir(parents=True)
    os.chmod(directory, 0o777)
    assert native.compiled(source) is None
    assert not list(directory.iterdir())
