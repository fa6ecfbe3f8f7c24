"""The ledger's moves as Lua scripts, one file each, ``common.lua`` in front of every one. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Script:
    """``sha`` is the name under which a server that has loaded ``source`` runs it."""

    name: str
    source: str
    sha: str


def _load(name: str) -> Script:
    common, own = (_HERE / f"{part}.lua" for part in ("common", name))
    source = common.read_text("utf-8") + own.read_text("utf-8")
    # Redis names scripts so; nothing is secured by it.
    return Script(name, source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


OPEN = _load("open")
DISPATCH = _load("dispatch")
APPEND = _load("append")
RELEASE = _load("release")
TAKE_OVER = _load("take_over")
DISCARD = _load("discard")
END = _load("end")
GET = _load("get")
READ = _load("read")
BEAT = _load("beat")
LEAVE = _load("leave")
LEASES = _load("leases")
ORPHANS = _load("orphans")
LEAD = _load("lead")
FENCE = _load("fence")
RESIGN = _load("resign")
SET_WORKER = _load("set_worker")
