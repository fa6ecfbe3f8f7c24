"""Ledger server that a cluster runs itself."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

from cluster.config import Config
from everlift import logs
from router.ledger.config import EMBEDDED, LedgerConfig, LedgerSetupError
from router.ledger.embedded.embedded import EmbeddedLedger

log = logs.get_logger(__name__)

#: Seconds between two checks whether the server runs, and after a failed restart.
_POLL_S, _RESTART_S = 0.2, 1.0


def url_file(state_dir: Path) -> Path:
    """Return the path of the file to which ``write_url`` writes the ledger's URL.

    The file need not exist. Only this user can read the file, because the URL contains the
    password.
    """
    return state_dir / "ledger.url"


def write_url(config: Config, url: str) -> None:
    config.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    url_file(config.state_dir).unlink(missing_ok=True)
    descriptor = os.open(url_file(config.state_dir), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(url)


class OwnLedger:
    """Embedded ledger server that is restarted whenever it ends by itself.

    If the configuration names another ledger, no server is run. ``listen`` is the host and port at
    which other machines connect; with port 0, only processes of this machine can connect.
    """

    def __init__(self, config: Config, listen: tuple[str, int] = ("", 0)) -> None:
        self._config = config
        self._server = EmbeddedLedger(config.ledger, listen)
        self._watching: asyncio.Task[None] | None = None

    @property
    def place(self) -> str:
        """Description of where the ledger keeps its data, without a password."""
        if self._config.ledger.url == EMBEDDED:
            return f"embedded, in {self._config.state_dir}"
        return "external (ledger.url)"

    @property
    def pid(self) -> int:
        """Process id of the server; 0 if this cluster runs none."""
        return self._server.pid

    async def start(self) -> LedgerConfig:
        """Start the server if the ledger is embedded; return the ledger's settings with its URL.

        The settings of another ledger are returned unchanged.

        Raises LedgerSetupError if the server cannot start.
        """
        config = self._config.ledger
        if config.url != EMBEDDED:
            return config
        url = await self._start()
        self._watching = asyncio.create_task(self._watch())
        return replace(config, url=url)

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await asyncio.to_thread(self._server.stop)

    async def _start(self) -> str:
        return await asyncio.to_thread(self._server.start, self._config.state_dir)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            if self._server.is_running:
                continue
            log.error("ledger server ended: restarting it")
            try:
                await self._start()
            except (LedgerSetupError, OSError) as error:
                log.error("ledger server restart failed", cause=str(error))
                await asyncio.sleep(_RESTART_S)
