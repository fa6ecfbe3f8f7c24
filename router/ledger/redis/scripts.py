"""Lua scripts of the ledger's operations: each is ``common.lua`` and a file of its own. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from router.ledger.entry import MAX_EVENTS

_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Script:
    """Lua script; ``sha`` is the hexadecimal SHA-1 of ``source``, by which EVALSHA calls it."""

    name: str
    source: str
    sha: str


def script(name: str, common: str, own: str) -> Script:
    """Return the script that consists of the constant MAX_EVENTS, ``common`` and ``own``.

    ``common`` is the Lua code that all scripts share, ``own`` the code of this script.
    """
    source = f"local MAX_EVENTS = {MAX_EVENTS}\n{common}{own}"
    # Redis identifies scripts by SHA-1; security does not depend on it.
    return Script(name, source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


def text(name: str) -> str:
    return (_HERE / "scripts" / f"{name}.lua").read_text("utf-8")


def _load(name: str) -> Script:
    return script(name, text("common"), text(name))


OPEN = _load("open")
DISPATCH = _load("dispatch")
APPEND = _load("append")
RELEASE = _load("release")
TAKE_OVER = _load("take_over")
DISCARD = _load("discard")
END = _load("end")
EXPLAIN = _load("explain")
FORGET = _load("forget")
REASSERT = _load("reassert")
EVENTS = _load("events")
AUDIT = _load("audit")
GET = _load("get")
READ = _load("read")
LIST = _load("list")
TURNS = _load("turns")
BEAT = _load("beat")
LEAVE = _load("leave")
LEASES = _load("leases")
ORPHANS = _load("orphans")
LEAD = _load("lead")
FENCE = _load("fence")
RESIGN = _load("resign")
SET_WORKER = _load("set_worker")
SET_LOAD = _load("set_load")
GET_LOAD = _load("get_load")
ACTIVE = _load("active")
SET_SCALING = _load("set_scaling")
GET_SCALING = _load("get_scaling")
CHARGE = _load("charge")
SETTLE = _load("settle")
HOLD = _load("hold")
GET_ACCESS = _load("get_access")
SET_ACCESS = _load("set_access")
SET_POLICY = _load("set_policy")
PUT_OBJECT = _load("put_object")
DELETE_OBJECT = _load("delete_object")
LIST_OBJECTS = _load("list_objects")
