"""Stores of keys and tenants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from router.auth.document import Document, changes, from_records
from router.ledger.base import Ledger

Edit = Callable[[Document], Document]


class Store(Protocol):
    async def read_if_changed(self) -> Document | None:
        """Return the keys and tenants, or None if they have not changed since the last call.

        Raises SettingsError if the stored contents are invalid; later calls return None until the
        contents change. Raises OSError if a file cannot be read, and LedgerUnavailable if the
        ledger cannot be reached.
        """
        ...

    async def change(self, edit: Edit) -> Document:
        """Apply ``edit`` to the stored document, store the changes, and return the new document.

        ``edit`` may run in another thread. If it raises an error, nothing is stored, and this
        method raises the error. A missing key file is created from an empty document. Raises
        SettingsError if the stored contents are invalid, OSError if the file cannot be read or
        written, and LedgerUnavailable if the ledger cannot be reached.
        """
        ...


class LedgerStore:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._version = -1

    async def read_if_changed(self) -> Document | None:
        records = await self._ledger.access(self._version)
        if records is None:
            return None
        # The same invalid version is reported only once.
        self._version = records.version
        return from_records(records.texts)

    async def change(self, edit: Edit) -> Document:
        """Store the records that ``edit`` changes, and return the new document.

        If two callers change the same key or tenant at the same time, the later write wins. Raises
        SettingsError if the stored contents are invalid, LedgerUnavailable, and errors of ``edit``.
        """
        records = await self._ledger.access()
        assert records is not None
        before = from_records(records.texts)
        after = edit(before)
        if changed := changes(before, after):
            await self._ledger.put_access(changed)
        return after
