"""Ids of objects in the ledger, and calls that create an object at most once."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress

from router.api.service import idempotency_key
from router.auth.caller import Caller
from router.ledger.base import Ledger
from router.ledger.objects import ObjectConflict, object_name

_KIND = "idempotency_keys"
_REST = re.compile("[0-9a-f]{32}")


def new_id(prefix: str, time_s: float) -> str:
    """Return an id for an object that is created at ``time_s``, in seconds since 1970.

    Ids are in the order of their times of creation.
    """
    return f"{prefix}{round(time_s * 1000):012x}{secrets.token_hex(10)}"


def is_id(prefix: str, object_id: str) -> bool:
    """Return whether ``object_id`` has the form of an id that ``new_id`` makes."""
    return object_id.startswith(prefix) and bool(_REST.fullmatch(object_id[len(prefix) :]))


async def id_of_call(
    ledger: Ledger,
    caller: Caller,
    headers: Mapping[str, str],
    prefix: str,
    time_s: float,
    retention_s: float,
) -> str:
    """Return the id, beginning with ``prefix``, of the object that a call at ``time_s`` creates.

    Calls of a tenant with the same idempotency key and prefix within ``retention_s`` seconds get
    the same id. A call without a key always gets a new id. Raises LedgerFull, LedgerUnavailable,
    and InvalidRequest if the key is malformed.
    """
    new = new_id(prefix, time_s)
    if not (key := idempotency_key(headers)):
        return new
    digest = hashlib.sha256(f"{prefix}{key}".encode()).hexdigest()
    name = object_name(caller.tenant, _KIND, digest)
    with suppress(ObjectConflict):
        await ledger.put_object(name, new.encode(), 0, retention_s)
        return new
    known = await ledger.get_object(name)
    return new if known is None else known.data.decode()
