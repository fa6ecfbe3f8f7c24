"""The door of a cluster that wants keys."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from everlift import logs
from everlift.errors import LedgerUnavailable
from everlift.settings import SettingsError
from router.auth.caller import Caller
from router.auth.document import Document
from router.auth.file_store import FileStore
from router.auth.limits import Limits
from router.auth.store import LedgerStore, Store
from router.auth.table import Table
from router.config import RouterConfig
from router.ledger.base import Ledger

log = logs.get(__name__)

#: A key that was made or revoked holds everywhere so soon.
_LOOK_S = 1.0


def store_of(config: RouterConfig, ledger: Ledger) -> Store | None:
    """None where everybody may come in."""
    match config.access:
        case "file":
            return FileStore(Path(config.access_file))
        case "ledger":
            return LedgerStore(ledger)
        case _:
            return None


class Access:
    """A Door. What it knows is what the store held when it was last asked, however long ago."""

    def __init__(self, store: Store, document: Document) -> None:
        self._store = store
        self._table = Table(document)
        #: why the store could not be read when it was last asked
        self._cause = ""

    @classmethod
    async def open(cls, store: Store) -> Self:
        """Raises SettingsError, LedgerUnavailable."""
        try:
            document = await store.news()
        except OSError as error:
            raise SettingsError(
                f"router.access_file: {error.strerror}: {error.filename}; `everlift key create` "
                "makes it"
            ) from None
        assert document is not None
        if not document.keys:
            log.warning("there is no key yet, and nobody may come in: everlift key create")
        return cls(store, document)

    def admit(self, headers: Mapping[str, str]) -> Caller:
        return self._table.admit(headers, time.time())

    def limits_of(self, tenant: str) -> Limits:
        return self._table.limits_of(tenant)

    def weight_of(self, tenant: str) -> float:
        return self.limits_of(tenant).weight

    async def run(self) -> None:
        """Follows the store until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            await self.look()

    async def look(self) -> None:
        """What cannot be used changes nothing."""
        try:
            document = await self._store.news()
        except LedgerUnavailable:
            # Its beats tell of it.
            return
        except OSError as error:
            self._keep(error.strerror or type(error).__name__)
        except SettingsError as error:
            self._keep(str(error))
        else:
            self._cause = ""
            if document is not None:
                self._table = Table(document)
                log.info("access changed", keys=len(document.keys))

    def _keep(self, cause: str) -> None:
        """Tells of it once."""
        if cause != self._cause:
            log.error("access is not read again", cause=cause)
        self._cause = cause
