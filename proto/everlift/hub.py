"""Models on the Hugging Face Hub: their ids, and explanations of the hub's errors."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from pathlib import Path

from everlift.gguf_header import is_gguf

_HUB_ID = re.compile(r"[a-z0-9_][a-z0-9_.-]*/[a-z0-9_][a-z0-9_.-]*", re.ASCII | re.IGNORECASE)
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_hub_id(model: str, revision: str = "") -> bool:
    """Return whether ``model`` has the form of a hub id, org/name. The hub is not asked.

    The result is False for the name of a GGUF file, or if ``revision`` is empty and ``model`` is a
    local directory, which is then used instead.
    """
    if not _HUB_ID.fullmatch(model) or is_gguf(model):
        return False
    return bool(revision) or not Path(model).is_dir()


def is_commit(revision: str) -> bool:
    """Return whether ``revision`` is a commit hash, whose content never changes."""
    return bool(_COMMIT.fullmatch(revision))


def name_for_clients(model: str, revision: str = "") -> str:
    """Return the name with which clients request the model.

    The name is the hub id, the name of the directory, or that of the GGUF file without its suffix.
    """
    if is_hub_id(model, revision):
        return model
    name = Path(model).resolve().name
    return Path(name).stem if is_gguf(name) else name


_DENIED = (401, 403)


def explain(error: BaseException, revision: str) -> str:
    """Return a description of why the download of a model's ``revision`` failed with ``error``."""
    from httpx2 import TransportError
    from huggingface_hub import constants, errors

    for cause in _causes(error):
        match cause:
            case errors.GatedRepoError():
                return "the model is gated, and HF_TOKEN has no access to it"
            case errors.RepositoryNotFoundError():
                return (
                    "the hub has no such model or HF_TOKEN has no access to it, and there is no "
                    "such directory"
                )
            case errors.RevisionNotFoundError():
                name = revision or constants.DEFAULT_REVISION
                return f"the hub has no revision {name!r} of the model"
            case errors.HfHubHTTPError() if cause.response.status_code in _DENIED:
                return f"HF_TOKEN is missing or the hub rejects it ({_answer(cause)})"
            case errors.HfHubHTTPError():
                return f"the hub answers with an error: {_answer(cause)}"
            case errors.OfflineModeIsEnabled():
                return f"HF_HUB_OFFLINE is set, and {constants.HF_HUB_CACHE} lacks some of them"
            case TransportError():
                return f"the connection to {constants.ENDPOINT} failed: {_line(cause)}"
            case OSError(errno=errno.ENOSPC):
                return f"no space is left in {constants.HF_HUB_CACHE}"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return f"{constants.HF_HUB_CACHE} lacks some of them"
    return f"{type(error).__name__}: {_line(error)}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _answer(error: BaseException) -> str:
    from huggingface_hub.errors import HfHubHTTPError

    assert isinstance(error, HfHubHTTPError)
    status = error.response.status_code
    return f"{status}, {_line(error.server_message)}" if error.server_message else f"{status}"


def _line(words: object) -> str:
    return " ".join(str(words).split())
