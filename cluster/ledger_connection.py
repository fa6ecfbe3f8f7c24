"""The ledger of a cluster, for commands that read it themselves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from cluster.config import Config
from cluster.errors import ClusterFailed
from everlift.settings import SettingsError
from router.ledger.config import EMBEDDED
from router.ledger.embedded.embedded import running_url

if TYPE_CHECKING:
    from router.ledger.redis.redis_ledger import RedisLedger


def with_ledger(config: Config, url: str | None) -> Config:
    """With the ledger at the ``url`` of --ledger, if there is one. Raises SettingsError."""
    if not url:
        return config
    try:
        return replace(config, ledger=replace(config.ledger, url=url))
    except ValueError as error:
        raise SettingsError(f"--ledger: {error}") from None


@asynccontextmanager
async def connected_ledger(config: Config) -> AsyncIterator[RedisLedger]:
    """The one that is configured, or the one that runs here. Raises ClusterFailed,
    LedgerSetupError, LedgerUnavailable."""
    # The other commands, which all import this one, have no use for Redis.
    from router.ledger.redis.redis_ledger import connect

    url = config.ledger.url
    if url == EMBEDDED:
        running = running_url(config.state_dir)
        if running is None:
            raise ClusterFailed(
                f"no ledger has ever run on {config.state_dir}: start a cluster with `everlift up`,"
                " or set ledger.url"
            )
        url = running
    ledger = await connect(replace(config.ledger, url=url))
    try:
        yield ledger
    finally:
        await ledger.close()
