"""The caller and its permissions. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from everlift.errors import Forbidden
from everlift.request_id import (
    bare,
    check_qualified,
    check_request_id,
    check_tenant,
    is_qualified,
    qualified,
)
from router.auth.limits import NO_LIMITS, Limits


class Scope(Enum):
    """Scope of a credential."""

    #: requests, and what belongs to them
    INFER = "infer"
    #: what changes a cluster, and every tenant's requests
    ADMIN = "admin"
    #: what is to be seen of a cluster, without its requests
    METRICS = "metrics"


@dataclass(frozen=True, slots=True)
class Caller:
    """Caller; ``tenant`` is empty if tenants are not told apart."""

    tenant: str = ""
    scopes: frozenset[Scope] = frozenset(Scope)
    limits: Limits = NO_LIMITS

    def check(self, *scopes: Scope) -> None:
        """Check that the caller has one of these scopes. Raises Forbidden."""
        if not self.scopes.intersection(scopes):
            names = " or ".join(scope.value for scope in scopes)
            raise Forbidden(f"this key lacks the scope {names}")

    def qualify(self, request_id: str) -> str:
        """Return the name inside the cluster of what this caller calls ``request_id``.

        Who administers the cluster may name any tenant's. Raises InvalidRequest.
        """
        if is_qualified(request_id) and Scope.ADMIN in self.scopes:
            return check_qualified(request_id)
        return qualified(self.tenant, check_request_id(request_id))

    def tenant_of_listing(self, tenant: str | None) -> str:
        """Return the tenant whose requests the caller may list; empty for all tenants.

        ``tenant`` None is the caller's own. Raises Forbidden for others' unless it administers the
        cluster, InvalidRequest.
        """
        its = self.tenant if tenant is None else tenant
        if its != self.tenant or not its:
            self.check(Scope.ADMIN)
        return check_tenant(its) if its else its

    def name(self, request_id: str) -> str:
        """Return a name inside the cluster as this caller may see it."""
        return request_id if Scope.ADMIN in self.scopes else bare(request_id)


#: Where nobody has to say who they are, and for routers among themselves.
ANYONE = Caller()


class Authenticator(Protocol):
    def admit(self, headers: Mapping[str, str]) -> Caller:
        """Return the caller with these headers, whose names are lower case.

        Raises Unauthenticated.
        """
        ...


class _OpenDoor:
    def admit(self, headers: Mapping[str, str]) -> Caller:
        return ANYONE


#: Everybody may come in, and do everything.
OPEN: Authenticator = _OpenDoor()
