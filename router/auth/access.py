"""Authentication of callers by API key, with keys that are reloaded from a store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from everlift import logs
from everlift.errors import LedgerUnavailable, SettingsError, Unauthenticated
from router.auth.caller import Caller, Scope
from router.auth.document import EVERYBODY, Document
from router.auth.file_store import FileStore
from router.auth.key import Key, hash_of, split_key
from router.auth.limits import Limits
from router.auth.store import LedgerStore, Store
from router.config import RouterConfig
from router.ledger.base import Ledger

_BEARER = "bearer"
#: Headers in which clients of other services send their keys.
_OTHER_HEADERS = ("x-api-key", "api-key")
#: Key that a secret with an unknown id is compared with, so that the response time does not reveal
#: which ids exist.
_UNKNOWN_KEY = Key("nobody", (Scope.INFER,), hash_of(""), "1970-01-01T00:00:00Z")


class Table:
    """Callers by API key, and limits by tenant, according to one document."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self._callers = {
            key_id: Caller(key.tenant, frozenset(key.scopes), document.limits_of(key.tenant))
            for key_id, key in document.keys.items()
        }
        self._limits = {tenant: document.limits_of(tenant) for tenant in document.tenants}
        self._limits_of_others = document.limits_of(EVERYBODY)

    def admit(self, headers: Mapping[str, str], now: float) -> Caller:
        """Return the caller whose API key is in ``headers``; ``now`` is in seconds since 1970.

        Raises Unauthenticated if there is no key, or if the key is unknown or has expired.
        """
        presented = split_key(_presented_key(headers))
        key_id, secret = presented or ("", "")
        key = self.document.keys.get(key_id, _UNKNOWN_KEY)
        if not key.matches(secret) or key is _UNKNOWN_KEY:
            raise Unauthenticated("unknown API key")
        if key.has_expired(now):
            raise Unauthenticated(f"the API key {key_id} has expired")
        return self._callers[key_id]

    def limits_of(self, tenant: str) -> Limits:
        return self._limits.get(tenant, self._limits_of_others)


def _presented_key(headers: Mapping[str, str]) -> str:
    if authorization := headers.get("authorization"):
        scheme, _, presented = authorization.partition(" ")
        if scheme.lower() != _BEARER:
            raise Unauthenticated("the authorization header must be: Bearer KEY")
        return presented.strip()
    for name in _OTHER_HEADERS:
        if headers.get(name):
            return headers[name].strip()
    raise Unauthenticated("an API key is required: send it as authorization: Bearer KEY")


log = logs.get_logger(__name__)

#: Seconds between two reads of the store, after which a created or revoked key takes effect.
_POLL_INTERVAL_S = 1.0


def store_of(config: RouterConfig, ledger: Ledger) -> Store | None:
    """Return the store of API keys that ``config`` selects, or None if access control is off."""
    match config.access:
        case "file":
            return FileStore(Path(config.access_file))
        case "ledger":
            return LedgerStore(ledger)
        case _:
            return None


class Access:
    """Authenticator that uses the API keys and tenants' limits in a store.

    If the store cannot be read any more, the contents that were read last stay in effect without a
    time limit.
    """

    def __init__(self, store: Store, document: Document) -> None:
        self._store = store
        self._table = Table(document)
        #: cause of the failure of the last read; empty if it succeeded
        self._cause = ""

    @classmethod
    async def open(cls, store: Store) -> Self:
        """Read the store and return the authenticator.

        Raises SettingsError if the key file cannot be read or the contents of the store are
        invalid, and LedgerUnavailable if the ledger cannot be reached.
        """
        try:
            document = await store.read_if_changed()
        except OSError as error:
            raise SettingsError(
                f"router.access_file: {error.strerror}: {error.filename}; create it with "
                "`everlift key create`"
            ) from None
        assert document is not None
        if not document.keys:
            log.warning("no API key yet: create one with everlift key create")
        return cls(store, document)

    def admit(self, headers: Mapping[str, str]) -> Caller:
        return self._table.admit(headers, time.time())

    def limits_of(self, tenant: str) -> Limits:
        return self._table.limits_of(tenant)

    def weight_of(self, tenant: str) -> float:
        return self.limits_of(tenant).weight

    async def run(self) -> None:
        """Check the store every second and reload it if it has changed, until cancelled."""
        while True:
            await asyncio.sleep(_POLL_INTERVAL_S)
            await self.reload()

    async def reload(self) -> None:
        """Load keys and tenants again if they have changed.

        If the store cannot be read or is invalid, the present keys and tenants stay in effect, and
        nothing is raised.
        """
        try:
            document = await self._store.read_if_changed()
        except LedgerUnavailable:
            # The heartbeat already reports that the ledger is unavailable.
            return
        except OSError as error:
            self._report_failure(error.strerror or type(error).__name__)
        except SettingsError as error:
            self._report_failure(str(error))
        else:
            self._cause = ""
            if document is not None:
                self._table = Table(document)
                log.info("API keys and tenants reloaded", keys=len(document.keys))

    def _report_failure(self, cause: str) -> None:
        if cause != self._cause:
            log.error("access file not reloaded", cause=cause)
        self._cause = cause
