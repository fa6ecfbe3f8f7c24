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


def changed(file: Path | None, assignments: Sequence[str] | None, edit: Edit) -> Document:
    """Change the stored document of keys and tenants by ``edit``, and return the new document.

    ``edit`` returns the new document for the present one. ``file`` and ``assignments`` are the
    settings that name the store. Raises SettingsError, LedgerSetupError, EverliftError, OSError.
    """
    return asyncio.run(_changed(_config(file, assignments), edit))


def kept(file: Path | None, assignments: Sequence[str] | None) -> Document:
    """Return the stored document of keys and tenants; raises the same errors as ``changed``."""
    return changed(file, assignments, lambda document: document)


def _config(file: Path | None, assignments: Sequence[str] | None) -> Config:
    return configuration.load(file, os.environ, assignments or ())


async def _changed(config: Config, edit: Edit) -> Document:
    async with _opened(config) as store:
        return await store.change(edit)


@asynccontextmanager
async def _opened(config: Config) -> AsyncIterator[Store]:
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
