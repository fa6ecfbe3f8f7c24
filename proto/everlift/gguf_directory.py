"""Conversion of a GGUF file to a directory with the files of a Hugging Face model.

    python -m everlift.gguf_directory FILE DIRECTORY

This command writes config.json, generation_config.json, the tokenizer's files and the chat
template, and creates ``weights.gguf`` as a symbolic link to the GGUF file. It runs in a separate
process, because it needs transformers, which takes seconds and hundreds of MiB to import and which
routers do not need.

DIRECTORY must exist. ``directory_of`` runs this command and keeps the directory in the user's
cache, under a name that depends on the file's path, size and time of modification.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from everlift.gguf_config import UnsupportedGguf, check_tokenizer, config_of, generation_config_of
from everlift.gguf_header import SUFFIX, BadGguf, read_gguf_header

LINK = f"weights{SUFFIX}"
#: Version of the directory's contents. Increment it when the contents change.
_FORMAT = 1


class GgufUnusable(ValueError):
    """Raised if a GGUF file cannot be converted to a directory.

    The message is one line with the cause.
    """


def cache_directory() -> Path:
    """Return Everlift's directory in the user's cache, whether or not it exists."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "everlift"


def directory_of(path: Path) -> Path:
    """Return the directory in the cache with the model files of the GGUF file ``path``.

    The directory is created if it is missing. Raises GgufUnusable if the file cannot be read or
    converted, and OSError if the cache cannot be written.
    """
    path = path.resolve()
    if not path.is_file():
        raise GgufUnusable(f"{path} is not a file")
    directory = cache_directory() / "gguf" / f"{path.stem}-{_key(path)}"
    if not directory.is_dir():
        _convert(path, directory)
    return directory


def _key(path: Path) -> str:
    stat = path.stat()
    facts = f"{_FORMAT}\0{path}\0{stat.st_size}\0{stat.st_mtime_ns}"
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def _convert(path: Path, directory: Path) -> None:
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        converted = Path(scratch) / directory.name
        converted.mkdir()
        command = [sys.executable, "-P", "-m", __name__, str(path), str(converted)]
        offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=offline, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise GgufUnusable(lines[-1])
        # Another process may have created the same directory in the meantime.
        with suppress(OSError):
            converted.rename(directory)
    if not directory.is_dir():
        raise GgufUnusable(f"{directory} cannot be written")


def write(path: Path, directory: Path) -> None:
    """Convert the GGUF file ``path`` to a Hugging Face model in an existing directory.

    The configuration and the tokenizer's files are written, with a symbolic link to the resolved
    ``path``. Raises BadGguf if the file is damaged or has no usable tokenizer, UnsupportedGguf for
    an unsupported model, and OSError if a file cannot be read or written.
    """
    header = read_gguf_header(path)
    config = config_of(header)
    check_tokenizer(header)

    from transformers import PreTrainedTokenizerFast

    (directory / LINK).symlink_to(path.resolve())
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, gguf_file=LINK)
    except Exception as error:
        raise BadGguf(f"{path} has no usable tokenizer: {type(error).__name__}: {error}") from error
    tokenizer.save_pretrained(directory)
    _write(directory / "config.json", config)
    _write(directory / "generation_config.json", generation_config_of(header))


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        write(Path(sys.argv[1]), Path(sys.argv[2]))
    except (BadGguf, UnsupportedGguf, OSError) as error:
        sys.exit(" ".join(str(error).split()))
