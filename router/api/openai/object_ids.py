"""Ids of objects in the ledger, and calls that create an object at most once."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress

from everlift.errors import InvalidRequest
from everlift.request_id import is_request_id
from router.api.service import IDEMPOTENCY_KEY
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
    ledger: Ledger, caller: Caller, headers: Mapping[str, str], new: str, retention_s: float
) -> str:
    """Return the id of the object that a call creates: ``new``, or that of an earlier call.

    An earlier call is one with the same idempotency key and the same kind of object within
    ``retention_s`` seconds. Raises InvalidRequest if the key is malformed, and LedgerUnavailable.
    """
    key = headers.get(IDEMPOTENCY_KEY, "").strip('"')
    if not key:
        return new
    if not is_request_id(key):
        raise InvalidRequest(
            f"{IDEMPOTENCY_KEY} must be 1 to 128 characters of A-Z a-z 0-9 . _ : -",
            field=IDEMPOTENCY_KEY,
        )
    prefix = re.split("[0-9a-f]{32}", new)[0]
    digest = hashlib.sha256(f"{prefix}{key}".encode()).hexdigest()
    name = object_name(caller.tenant, _KIND, digest)
    with suppress(ObjectConflict):
        await ledger.put_object(name, new.encode(), 0, retention_s)
        return new
    known = await ledger.get_object(name)
    return new if known is None else known.data.decode()
