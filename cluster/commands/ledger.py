"""Command ``everlift ledger``: the ledger's server alone, for a cluster on several machines."""

from __future__ import annotations

import asyncio

from rich.console import Console

from cluster.commands.up import on_signal
from cluster.config import Config
from cluster.local.own_ledger import OwnLedger, url_file, write_url
from cluster.ray.ray_cluster import log_dir
from everlift import logs
from everlift.address import strip_brackets
from everlift.errors import SettingsError
from router.ledger.config import EMBEDDED, URL_VARIABLE, LedgerSetupError


def parse(listen: str) -> tuple[str, int]:
    """Return the host and the port of the text HOST:PORT.

    Raises SettingsError if ``listen`` is not of this form.
    """
    host, _, port = listen.rpartition(":")
    host = strip_brackets(host)
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise SettingsError(f"--listen: must be HOST:PORT, not {listen!r}")
    return host, int(port)


async def serve(config: Config, listen: tuple[str, int], console: Console) -> None:
    """Run the ledger's server at the host and port ``listen`` until SIGINT or SIGTERM.

    The server's URL, with its password, is written to a file in the state directory. Raises
    LedgerSetupError if the server cannot start, or if ``config`` has the URL of another server.
    """
    if config.ledger.url != EMBEDDED:
        raise LedgerSetupError("ledger.url names another server, so there is no server to start")
    logs.configure("ledger", config.log_level, log_dir(config) / "ledger.log")
    ledger = OwnLedger(config, listen)
    stopped = asyncio.Event()
    on_signal(stopped.set)
    try:
        url = (await ledger.start()).url
        write_url(config, url)
        console.print(
            f"the ledger listens on {listen[0]}:{listen[1]}; Ctrl-C stops it\n"
            f"  file with its URL and password: {url_file(config.state_dir)}\n"
            f"  before starting Ray: export {URL_VARIABLE}=$(cat {url_file(config.state_dir)})",
            soft_wrap=True,
        )
        await stopped.wait()
    finally:
        await ledger.stop()
