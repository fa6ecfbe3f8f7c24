"""Objects of the ledger: small named values that routers share. Pure.

The name of an object is ``TENANT/KIND/ID``, or ``KIND/ID`` if tenants are not distinguished. An
object's version changes with every change, and a version is never used for another value of the
same name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from everlift.request_id import check_tenant, is_request_id, qualify

#: Maximum size of an object.
MAX_OBJECT_BYTES = 1 << 20
_KIND = re.compile(r"[a-z][a-z_]{0,31}")


@dataclass(frozen=True, slots=True)
class StoredObject:
    data: bytes
    version: int


class ObjectConflict(Exception):
    """Raised if an object has another version than the writer expects.

    ``version`` is its present version; 0 if it does not exist.
    """

    def __init__(self, version: int) -> None:
        super().__init__(f"the object has version {version}")
        self.version = version


def object_name(tenant: str, kind: str, object_id: str) -> str:
    """Return the name of an object; ``tenant`` is empty if tenants are not distinguished.

    Raises ValueError or InvalidRequest if the name would be invalid.
    """
    return check_object_name(f"{collection_of(tenant, kind)}/{object_id}")


def check_object_name(name: str) -> str:
    """Return ``name`` if it is the valid name of an object.

    Raises ValueError otherwise, and InvalidRequest if the tenant's name is invalid.
    """
    collection, _, object_id = name.rpartition("/")
    tenant, separator, kind = collection.rpartition("/")
    if separator:
        check_tenant(tenant)
    if not _KIND.fullmatch(kind) or not is_request_id(object_id):
        raise ValueError(f"an object's name must be TENANT/KIND/ID or KIND/ID, not {name!r:.200}")
    return name


def check_object(name: str, data: bytes) -> str:
    """Return ``name`` if an object of this name may contain ``data``.

    Raises ValueError otherwise, and InvalidRequest if the tenant's name is invalid.
    """
    if len(data) > MAX_OBJECT_BYTES:
        raise ValueError(f"an object has at most {MAX_OBJECT_BYTES} bytes, not {len(data)}")
    return check_object_name(name)


def collection_of(tenant: str, kind: str) -> str:
    """Return the part that the names of all objects of a tenant and kind begin with."""
    return qualify(tenant, kind)
