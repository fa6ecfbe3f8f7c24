"""What a model is called, and whether that names a directory or a repository of the hub. Pure.

/models/llama      a directory; its clients call it "llama"
org/llama          the same, where there is such a directory and no revision is asked for
org/llama          else a repository of the Hugging Face hub, which clients call "org/llama"
"""

from __future__ import annotations

import re
from pathlib import Path

_HUB_ID = re.compile(r"[a-z0-9_][a-z0-9_.-]*/[a-z0-9_][a-z0-9_.-]*", re.ASCII | re.IGNORECASE)
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_hub_id(model: str, revision: str = "") -> bool:
    return bool(_HUB_ID.fullmatch(model)) and (bool(revision) or not Path(model).is_dir())


def is_commit(revision: str) -> bool:
    """What it names never changes; a branch's or a tag's may."""
    return bool(_COMMIT.fullmatch(revision))


def name_for_clients(model: str, revision: str = "") -> str:
    return model if is_hub_id(model, revision) else Path(model).resolve().name
