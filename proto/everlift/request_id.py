"""Names of requests. Pure.

A client names its request as it likes, and no other tenant's names matter to it: inside the cluster
the name has the tenant's before it, with a slash between. Where tenants are not told apart both
names are the same.
"""

from __future__ import annotations

import re

from everlift.errors import InvalidRequest

_BARE = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TENANT = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_BETWEEN = "/"
#: What names begin with that clients did not give.
_UNNAMED = "unnamed-"


def check_request_id(request_id: str) -> str:
    """Return ``request_id`` if a client may use it. Raises InvalidRequest."""
    if not is_request_id(request_id):
        raise InvalidRequest(
            "request_id must be 1 to 128 characters of A-Z a-z 0-9 . _ : -", field="request_id"
        )
    return request_id


def is_request_id(request_id: str) -> bool:
    """Return whether a client may use the id."""
    return _BARE.fullmatch(request_id) is not None


def unnamed(nonce: str) -> str:
    """Return the name of a request whose client gave it none."""
    return _UNNAMED + nonce


def is_named(request_id: str) -> bool:
    """Return whether the client chose the id."""
    return not bare(request_id).startswith(_UNNAMED)


def check_tenant(tenant: str) -> str:
    """Return ``tenant`` if it is a valid name. Raises InvalidRequest."""
    if not _TENANT.fullmatch(tenant):
        raise InvalidRequest(
            "a tenant's name must be 1 to 63 characters of a-z 0-9 . _ -, a letter or digit first"
        )
    return tenant


def check_qualified(request_id: str) -> str:
    """Return ``request_id`` if it is a valid name inside the cluster. Raises InvalidRequest."""
    tenant, between, name = request_id.rpartition(_BETWEEN)
    if between:
        check_tenant(tenant)
    check_request_id(name)
    return request_id


def is_qualified(request_id: str) -> bool:
    """Return whether the id names a tenant."""
    return _BETWEEN in request_id


def qualified(tenant: str, request_id: str) -> str:
    """Return the name inside the cluster of what ``tenant`` calls ``request_id``."""
    return f"{tenant}{_BETWEEN}{request_id}" if tenant else request_id


def bare(request_id: str) -> str:
    """Return the id without the tenant."""
    return request_id.rpartition(_BETWEEN)[2]


def tenant_of(request_id: str) -> str:
    """Return the tenant of the id; empty if there is none."""
    return request_id.rpartition(_BETWEEN)[0]
