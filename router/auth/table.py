"""Who comes with which key. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from everlift.errors import Unauthenticated
from router.auth.caller import Caller, Scope
from router.auth.document import EVERYBODY, Document
from router.auth.key import Key, hash_of, parts
from router.auth.limits import Limits

_BEARER = "bearer"
#: Where clients of other services put their keys.
_OTHER_HEADERS = ("x-api-key", "api-key")
#: What a key that there is not is compared with: nobody learns from the time which ids there are.
_NOBODYS = Key("nobody", (Scope.INFER,), hash_of(""), "1970-01-01T00:00:00Z")


class Table:
    def __init__(self, document: Document) -> None:
        self.document = document
        self._callers = {
            key_id: Caller(key.tenant, frozenset(key.scopes), document.limits_of(key.tenant))
            for key_id, key in document.keys.items()
        }
        self._limits = {tenant: document.limits_of(tenant) for tenant in document.tenants}
        self._limits_of_others = document.limits_of(EVERYBODY)

    def admit(self, headers: Mapping[str, str], now: float) -> Caller:
        """Who comes with these headers; ``now`` is seconds since 1970. Raises Unauthenticated."""
        shown = parts(_shown(headers))
        key_id, secret = shown or ("", "")
        key = self.document.keys.get(key_id, _NOBODYS)
        if not key.opens_with(secret) or key is _NOBODYS:
            raise Unauthenticated("this API key is not known")
        if key.has_expired(now):
            raise Unauthenticated(f"the API key {key_id} has expired")
        return self._callers[key_id]

    def limits_of(self, tenant: str) -> Limits:
        return self._limits.get(tenant, self._limits_of_others)


def _shown(headers: Mapping[str, str]) -> str:
    """Raises Unauthenticated where there is nothing."""
    if authorization := headers.get("authorization"):
        scheme, _, shown = authorization.partition(" ")
        if scheme.lower() != _BEARER:
            raise Unauthenticated("the authorization must be a Bearer's: Bearer KEY")
        return shown.strip()
    for name in _OTHER_HEADERS:
        if headers.get(name):
            return headers[name].strip()
    raise Unauthenticated("an API key is needed: send it as authorization: Bearer KEY")
