"""Compilation of C++ code at its first use: cache, shipped libraries and failures."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cluster.config import DEMO_MODEL
from worker.attention.cpu import kernel_flags
from worker.device.device import arithmetic
from worker.model.panels import panel_flags
from worker.model.stack import stack_flags
from worker.native import native, ship

AVX2 = "avx avx2 bmi1 bmi2 f16c fma abm movbe sse4_2"
SOURCE = 'extern "C" int answer() { return 42; }\n'

needs_compiler = pytest.mark.skipif(
    subprocess.call(["sh", "-c", "command -v g++"], stdout=subprocess.DEVNULL) != 0,
    reason="no g++ here",
)


@pytest.fixture(autouse=True)
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the CPU level that limits the other tests."""
    monkeypatch.delenv(native.LEVEL_VARIABLE, raising=False)
    monkeypatch.setattr(native, "_failed", set())


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "answer.cpp"
    path.write_text(SOURCE)
    return path


def libraries(source: Path) -> list[Path]:
    return sorted((source.parent / "cache" / "everlift" / "native").iterdir())


@needs_compiler
def test_native_source_is_recompiled_only_when_changed(source: Path) -> None:
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
def test_native_header_change_rebuilds_library(source: Path) -> None:
    header = source.with_name("number.h")
    source.write_text('#include "number.h"\nextern "C" int answer() { return NUMBER; }\n')
    for number in (1, 2):
        header.write_text(f"#define NUMBER {number}\n")
        library = native.compiled(source)
        assert library is not None and library.answer() == number


@needs_compiler
def test_native_flags_select_separate_library(source: Path) -> None:
    source.write_text('extern "C" int answer() { return ANSWER; }\n')
    for answer in (1, 2):
        library = native.compiled(source, [f"-DANSWER={answer}"])
        assert library is not None and library.answer() == answer


@needs_compiler
def test_native_compile_error_is_logged_and_remembered(
    source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker without its compiled code announces no arithmetic: its results may differ."""
    assert arithmetic(torch.device("cpu"), torch.float32)
    source.write_text("this is not C++\n")
    assert native.compiled(source) is None
    assert "compilation failed" in caplog.text
    assert not libraries(source)
    assert source.name in native.why_no_code()
    assert not arithmetic(torch.device("cpu"), torch.float32)


def test_native_without_compiler_returns_none(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    assert native.compiled(source) is None
    assert "no C++ compiler" in caplog.text
    assert native.why_no_code().startswith("there is no C++ compiler (g++,")


@needs_compiler
def test_native_cache_rejects_world_writable_directory(source: Path) -> None:
    directory = source.parent / "cache" / "everlift" / "native"
    directory.mkdir(parents=True)
    os.chmod(directory, 0o777)
    assert native.compiled(source) is None
    assert not list(directory.iterdir())


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace the directory of shipped libraries."""
    monkeypatch.setattr(native, "_SHIPPED", tmp_path / "shipped")
    native.shipped_level.cache_clear()
    yield
    native.shipped_level.cache_clear()


@needs_compiler
def test_native_shipped_library_needs_no_compiler(
    source: Path, shipped: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.write_text('extern "C" int answer() { return ANSWER; }\n')
    for level in native.LEVELS:
        native.ship(source, ["-DANSWER=7"], level)
    monkeypatch.setenv("PATH", "")
    library = native.compiled(source, ["-DANSWER=7"])
    assert library is not None and library.answer() == 7
    assert not (source.parent / "cache").exists()
    assert arithmetic(torch.device("cpu"), torch.float32)
    # No library was shipped for other flags, or for another source.
    assert native.compiled(source, ["-DANSWER=8"]) is None
    assert source.name in native.why_no_code()
    assert not arithmetic(torch.device("cpu"), torch.float32)
    source.write_text(source.read_text() + "// changed")
    assert native.compiled(source, ["-DANSWER=7"]) is None


@pytest.mark.parametrize(
    ("features", "name"),
    [
        (AVX2, "avx2"),
        (f"{AVX2} avx512f avx512bw avx512cd avx512dq avx512vl", "avx512"),
        (f"{AVX2} avx512f avx512bw avx512cd avx512dq avx512vl avx512_bf16", "avx512_bf16"),
        ("avx sse4_2", ""),
    ],
)
def test_native_shipped_level_is_highest_supported(
    features: str, name: str, shipped: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert native.shipped_level() is None
    native.shipped_level.cache_clear()
    (tmp_path / "shipped").mkdir()
    monkeypatch.setattr(native, "_cpu", lambda: f"vendor_id : x\nflags : {features}")
    level = native.shipped_level()
    assert (level.name if level else "") == name


def test_native_ships_libraries_of_demo_model() -> None:
    dims = json.loads((DEMO_MODEL / "config.json").read_text())["head_dim"]
    for level in native.LEVELS:
        flags = {(source.name, given) for source, given in ship.libraries(level)}
        assert ("paged.cpp", kernel_flags(dims, torch.float32)) in flags
        assert {"argmax.cpp", "collectives.cpp", "pointwise.cpp"} <= {name for name, _ in flags}
        has_bfloat16 = level.name == "avx512_bf16"
        assert (("paged.cpp", kernel_flags(dims, torch.bfloat16)) in flags) == has_bfloat16
        fp32, bf16 = torch.float32, torch.bfloat16
        for dtype, weights in ((fp32, fp32), (fp32, bf16), (bf16, bf16)):
            is_shipped = has_bfloat16 or dtype == fp32
            assert (("stack.cpp", stack_flags(dims, dtype, weights)) in flags) == is_shipped
            assert (("panels.cpp", panel_flags(dtype, weights)) in flags) == is_shipped
            quantised = stack_flags(128, dtype, weights, "int4")
            assert (("stack.cpp", quantised) in flags) == is_shipped


def test_native_level_variable_limits_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_cpu", lambda: f"flags : {AVX2} avx512f")
    assert native.level_limit() is None
    monkeypatch.setenv(native.LEVEL_VARIABLE, "avx2")
    assert native.level_limit() == native.LEVELS[-1]
    assert not native.has_bfloat16()
    monkeypatch.setenv(native.LEVEL_VARIABLE, "avx512")
    with pytest.raises(ValueError, match=r"this CPU supports: avx2$"):
        native.level_limit()


@needs_compiler
def test_native_compiles_for_level_variable(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if native.highest_level() is None:
        pytest.skip("a CPU without levels")
    source.write_text(SOURCE + "#ifdef __AVX512F__\n#error\n#endif\n")
    monkeypatch.setenv(native.LEVEL_VARIABLE, "avx2")
    assert native.compiled(source) is not None
