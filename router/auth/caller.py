"""Caller of an operation, and its permissions. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from everlift.errors import Forbidden
from everlift.request_id import (
    check_qualified,
    check_request_id,
    check_tenant,
    is_qualified,
    qualify,
    strip_tenant,
)
from router.auth.limits import NO_LIMITS, Limits


class Scope(Enum):
    """Group of operations that an API key may permit."""

    #: requests: submit, attach, cancel, forget, read
    INFER = "infer"
    #: changes of the cluster, and access to the requests of all tenants
    ADMIN = "admin"
    #: state of the cluster, without requests
    METRICS = "metrics"


@dataclass(frozen=True, slots=True)
class Caller:
    """Authenticated caller; ``tenant`` is empty if the cluster does not distinguish tenants."""

    tenant: str = ""
    scopes: frozenset[Scope] = frozenset(Scope)
    limits: Limits = NO_LIMITS

    def check(self, *scopes: Scope) -> None:
        """Check that the caller has at least one of ``scopes``. Raises Forbidden if it has none."""
        if not self.scopes.intersection(scopes):
            names = " or ".join(scope.value for scope in scopes)
            raise Forbidden(f"this key lacks the scope {names}")

    def qualify(self, request_id: str) -> str:
        """Return the name in the cluster (``TENANT/ID``) of the caller's request ``request_id``.

        An administrator may also pass the name in the cluster of any tenant's request, which is
        returned unchanged. Raises InvalidRequest if ``request_id`` is malformed.
        """
        if is_qualified(request_id) and Scope.ADMIN in self.scopes:
            return check_qualified(request_id)
        return qualify(self.tenant, check_request_id(request_id))

    def tenant_of_listing(self, tenant: str | None) -> str:
        """Return the tenant whose requests the caller may list; empty for all tenants.

        ``tenant`` is the requested tenant: None means the caller's, and an empty text all tenants.
        Raises InvalidRequest for a malformed name, and Forbidden if a caller without the scope
        ADMIN requests other tenants.
        """
        listed = self.tenant if tenant is None else tenant
        if listed != self.tenant or not listed:
            self.check(Scope.ADMIN)
        return check_tenant(listed) if listed else listed

    def name(self, request_id: str) -> str:
        """Return ``request_id``, a name in the cluster (``TENANT/ID``), as the caller may see it.

        For a caller without the scope ADMIN the tenant is removed.
        """
        return request_id if Scope.ADMIN in self.scopes else strip_tenant(request_id)


#: Caller of clusters without API keys, and of calls between routers.
ANYONE = Caller()


class Authenticator(Protocol):
    def admit(self, headers: Mapping[str, str]) -> Caller:
        """Return the caller that ``headers`` identify; the headers' names are in lower case.

        Raises Unauthenticated if the headers contain no valid API key.
        """
        ...


class _OpenAuthenticator:
    def admit(self, headers: Mapping[str, str]) -> Caller:
        return ANYONE


#: Authenticator that admits all callers, with all scopes.
OPEN: Authenticator = _OpenAuthenticator()
