"""Location of a model's files: a directory, a GGUF file, or this machine's copy of a hub's model.

    pin        the commit that a revision is at this moment       asks the hub
    fetch      downloads what this machine lacks of it            asks the hub, if it lacks anything
    locate     the directory that holds it                        asks nobody

A GGUF file is named by its path, or by the name of a packaged model (``packaged_models``). Its
directory is made at the first use (``gguf_directory``).

The copies lie in huggingface_hub's cache, and what is known of that library holds here too:
HF_HOME and HF_HUB_CACHE say where, HF_ENDPOINT which hub, HF_TOKEN who asks, and HF_HUB_OFFLINE=1
that nobody does. It is imported when it is needed, since customers have no use for it.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from everlift.gguf_directory import LINK, GgufUnusable, directory_of, is_gguf
from everlift.hub import explain, is_commit, is_hub_id
from everlift.packaged_models import PACKAGED_MODELS
from everlift.progress import Progress, untold

_CONFIG = "config.json"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
#: Configuration and tokenizer. What lies in folders is for other programs.
_TEXTS = ("*.json", "*.jinja", "*.txt", "*.model")
_ELSEWHERE = "*/*"
#: By this name huggingface_hub calls the bar that counts bytes written.
_BYTES_BAR = "huggingface_hub.snapshot_download"

T = TypeVar("T")


class ModelUnavailable(OSError):
    """A model's files cannot be had. The message is one line that says why."""


async def pin(model: str, revision: str = "") -> str:
    """Return the commit of ``revision`` (default: main branch) of a hub id; "" for other models.

    If the hub cannot be asked, the last known commit. Raises ModelUnavailable.
    """
    if not is_hub_id(model, revision):
        return ""
    return await _in_thread(partial(_pin, model, revision))


async def fetch(
    model: str, revision: str = "", *, weights: bool, progress: Progress = untold
) -> None:
    """Download missing files of a hub id: configuration, tokenizer, and safetensors if ``weights``.

    Never pickles. A directory is left as it is, and that of a GGUF file is made.

    ``progress`` counts the texts first, then the weights; several threads call it, one at a time.
    Raises ModelUnavailable. When cancelled, the download ends with the piece that is under way.
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
    """Return the directory with all that ``fetch`` would have fetched. Raises ModelUnavailable."""
    if is_hub_id(model, revision):
        return _snapshot(model, revision, weights)
    path = Path(model).expanduser()
    if is_gguf_model(model):
        return _of_gguf(model, path)
    if path.is_dir():
        return path
    raise ModelUnavailable(
        f"no model at {model!r}: no such directory, not a GGUF file, and not a hub id (org/name)"
    )


def is_gguf_model(model: str) -> bool:
    """Return whether ``model`` names a GGUF file, by its path or as a packaged model."""
    return model in PACKAGED_MODELS or (is_gguf(model) and not Path(model).is_dir())


def _of_gguf(model: str, path: Path) -> Path:
    if model in PACKAGED_MODELS:
        path = PACKAGED_MODELS[model].path
        if not path.exists():
            raise ModelUnavailable(
                f"{model} is not on this machine: run 'everlift download {model}' (once)"
            )
    try:
        return directory_of(path)
    except FileNotFoundError:
        raise ModelUnavailable(f"no model at {model!r}: no such file") from None
    except (GgufUnusable, OSError) as error:
        raise ModelUnavailable(f"no model of {model!r}: {error}") from None


def weight_files(directory: Path) -> list[Path]:
    """Return the files of the weights, present or not: one, or those that an index names.

    Of a GGUF file's directory, the file.

    With both the one file counts, as for transformers. Raises ValueError for an index that is none,
    or that names what is not a file beside it.
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
        if not _is_beside(name):
            raise ValueError(f"{index} names {name!r}, which is no safetensors file beside it")
    return [directory / name for name in sorted(names)]


def _is_beside(name: object) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name


def _pin(model: str, revision: str) -> str:
    with _explained(model, revision):
        from huggingface_hub import HfApi

        return HfApi().resolve_revision(model, revision=revision or None).resolved


def _fetch(model: str, revision: str, weights: bool, relay: _Relay) -> None:
    if not (is_commit(revision) and _is_here(model, revision, weights)):
        _snapshot(model, revision, weights, _bar_class(relay))


def _is_here(model: str, revision: str, weights: bool) -> bool:
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        get_cached_repo_tree(model, revision=revision)
        _snapshot(model, revision, weights)
    except (CachedRepoTreeNotFoundError, ModelUnavailable):
        return False
    return True


def _snapshot(model: str, revision: str, weights: bool, bar: type[Any] | None = None) -> Path:
    directory = _download(model, revision, _TEXTS, bar)
    names = [_CONFIG]
    if weights:
        shards = _weight_names(model, directory)
        _download(model, revision, (_SINGLE, *shards), bar)
        names += shards
    for name in names:
        if not (directory / name).exists():
            only = " (pickled weights are not read)" if name == _SINGLE else ""
            raise ModelUnavailable(f"the hub's {model!r} lacks {name}{only}")
    return directory


def _weight_names(model: str, directory: Path) -> list[str]:
    try:
        return [path.name for path in weight_files(directory)]
    except ValueError as error:
        raise ModelUnavailable(f"no weights of {model!r}: {error}") from None


def _download(model: str, revision: str, patterns: Sequence[str], bar: type[Any] | None) -> Path:
    with _explained(model, revision):
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                model,
                revision=revision or None,
                allow_patterns=list(patterns),
                ignore_patterns=_ELSEWHERE,
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
    """Run ``work`` in a thread for which a cancelled caller does not wait."""
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
def _explained(model: str, revision: str) -> Iterator[None]:
    """Turn errors of huggingface_hub, its HTTP library and its storage into ModelUnavailable."""
    from huggingface_hub.utils import logging

    # Its warnings are of retries, and name signed addresses.
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    except _Stopped:
        raise
    except Exception as error:
        raise ModelUnavailable(f"no files of {model!r}: {explain(error, revision)}") from error
