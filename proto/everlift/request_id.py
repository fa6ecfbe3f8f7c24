"""Request ids, as clients choose them and as the cluster uses them. Pure.

Inside the cluster, the name of the tenant and a slash precede the id that the client chose, so that
tenants can choose ids independently of each other. If tenants are not distinguished, both ids are
the same.
"""

from __future__ import annotations

import hashlib
import re

from everlift.errors import InvalidRequest

_CLIENT_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TENANT = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_SEPARATOR = "/"
#: Text between an id and its session's tag, which selects the shard of the ledger.
_TAG_SEPARATOR = "::"
#: Prefix of the ids that clients did not choose.
_UNNAMED_PREFIX = "unnamed-"


def check_request_id(request_id: str) -> str:
    """Return ``request_id`` if a client may choose it: 1 to 128 letters, digits, and . _ : -.

    Raises InvalidRequest otherwise.
    """
    if not is_request_id(request_id):
        raise InvalidRequest(
            "request_id must be 1 to 128 characters of A-Z a-z 0-9 . _ : -", field="request_id"
        )
    return request_id


def is_request_id(request_id: str) -> bool:
    """Return whether ``request_id`` has the form of an id that a client may choose."""
    return _CLIENT_ID.fullmatch(request_id) is not None


def unnamed_request_id(nonce: str) -> str:
    """Return an id for a request whose client chose none, made unique by the text ``nonce``."""
    return _UNNAMED_PREFIX + nonce


def in_session(request_id: str, session_id: str) -> str:
    """Return ``request_id`` with a tag that all requests of the session share.

    If ``session_id`` is empty, ``request_id`` is returned unchanged. The ledger stores requests
    with the same tag on the same shard (``shard_key``), where they share the chunks of their
    prompts.
    """
    if not session_id:
        return request_id
    tag = hashlib.sha256(session_id.encode()).hexdigest()[:16]
    return f"{request_id}{_TAG_SEPARATOR}{tag}"


def shard_key(request_id: str) -> str:
    """Return the text that selects the shard of a request.

    The text is the tenant and the session's tag if the id has a tag, else the whole id.
    """
    _, separator, rest = request_id.rpartition(_TAG_SEPARATOR)
    if not separator:
        return request_id
    # If a call has several requests, a colon and the index of the request follow the tag.
    tag, _, _ = rest.partition(":")
    return f"{tenant_of(request_id)}{_SEPARATOR}{tag}"


def is_named(request_id: str) -> bool:
    """Return whether the client chose ``request_id``, which may begin with a tenant's name."""
    return not strip_tenant(request_id).startswith(_UNNAMED_PREFIX)


def check_tenant(tenant: str) -> str:
    """Return ``tenant`` if it is a valid name. Raises InvalidRequest otherwise."""
    if not _TENANT.fullmatch(tenant):
        raise InvalidRequest(
            "a tenant's name must be 1 to 63 characters of a-z 0-9 . _ -, and begin with a letter "
            "or digit"
        )
    return tenant


def check_qualified(request_id: str) -> str:
    """Return ``request_id`` if it is a valid id inside the cluster, with or without a tenant.

    Raises InvalidRequest otherwise.
    """
    tenant, separator, name = request_id.rpartition(_SEPARATOR)
    if separator:
        check_tenant(tenant)
    check_request_id(name)
    return request_id


def is_qualified(request_id: str) -> bool:
    """Return whether the id begins with the name of a tenant."""
    return _SEPARATOR in request_id


def qualify(tenant: str, request_id: str) -> str:
    """Return the id inside the cluster of the request that ``tenant`` calls ``request_id``.

    If ``tenant`` is empty, both ids are the same.
    """
    return f"{tenant}{_SEPARATOR}{request_id}" if tenant else request_id


def strip_tenant(request_id: str) -> str:
    """Return the id as the client knows it, without the name of the tenant."""
    return request_id.rpartition(_SEPARATOR)[2]


def tenant_of(request_id: str) -> str:
    """Return the name of the tenant in the id; empty if there is none."""
    return request_id.rpartition(_SEPARATOR)[0]
