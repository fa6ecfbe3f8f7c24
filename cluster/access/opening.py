"""Access to the configured store of API keys and tenants."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

import typer

from cluster import config as configuration
from cluster.config import Config
from cluster.connection import connected_ledger
from everlift.errors import SettingsError
from router.auth.document import Document
from router.auth.store import Edit, LedgerStore, Store

SettingsFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="The cluster's settings in YAML.")
]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any setting, e.g. router.access=ledger."),
]


def edit_document(file: Path | None, assignments: Sequence[str] | None, edit: Edit) -> Document:
    """Store the result of ``edit`` as the new document of keys and tenants, and return it.

    ``edit`` receives the stored document. The settings in ``file`` (YAML) and ``assignments`` (such
    as ``router.access=ledger``) determine whether the document is in the ledger or in a file.

    Raises SettingsError for an invalid setting or document, or if access control is off. Raises
    ClusterFailed, LedgerSetupError or LedgerUnavailable if the ledger cannot be used, OSError if
    the file cannot be read or written, and any error of ``edit``.
    """
    return asyncio.run(_edit_document(_config(file, assignments), edit))


def read_document(file: Path | None, assignments: Sequence[str] | None) -> Document:
    """Return the stored document of keys and tenants.

    The settings in ``file`` (YAML) and ``assignments`` determine where it is stored. Raises
    SettingsError for an invalid setting or document, or if access control is off. Raises
    ClusterFailed, LedgerSetupError, LedgerUnavailable or OSError if it cannot be read.
    """
    return edit_document(file, assignments, lambda document: document)


def _config(file: Path | None, assignments: Sequence[str] | None) -> Config:
    return configuration.load(file, os.environ, assignments or ())


async def _edit_document(config: Config, edit: Edit) -> Document:
    async with _open_store(config) as store:
        return await store.change(edit)


@asynccontextmanager
async def _open_store(config: Config) -> AsyncIterator[Store]:
    match config.router.access:
        case "off":
            raise SettingsError(
                "router.access is off, so clients need no key: set it to ledger, or to "
                "file with router.access_file, here and for `everlift up`"
            )
        case "file":
            from router.auth.file_store import FileStore

            yield FileStore(Path(config.router.access_file))
        case "ledger":
            async with connected_ledger(config) as ledger:
                yield LedgerStore(ledger)
