"""Connections of commands to a cluster and to its ledger."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import ValidationError

from cluster import config as configuration
from cluster import endpoint
from cluster.config import ADDRESS_VARIABLE, API_KEY_VARIABLE, TLS_VARIABLES, Config
from cluster.errors import ClusterFailed
from everlift import AsyncClient, Forbidden, Tls, Unauthenticated, Unreachable
from everlift.channels import refusal
from everlift.client.retries import RETRY_S
from everlift.errors import SettingsError
from everlift.settings import to_settings_error
from router.config import RouterConfig
from router.ledger.config import EMBEDDED, LedgerConfig
from router.ledger.embedded.embedded import running_url

if TYPE_CHECKING:
    from router.ledger.redis.redis_ledger import RedisLedger


Address = Annotated[
    str | None,
    typer.Option(
        envvar=ADDRESS_VARIABLE,
        metavar="HOST:PORT",
        help="Router, or several separated by commas. Default: the cluster on this machine.",
    ),
]


@asynccontextmanager
async def connected(
    address: str | None, retry_s: float = RETRY_S, key: str | None = None
) -> AsyncIterator[AsyncClient]:
    """Context manager: check that a cluster answers, and yield a client of it.

    ``address`` lists routers, separated by commas; None is the cluster on this machine. The
    client retries any call for ``retry_s`` seconds after a refusal for lack of capacity or quota.
    Calls other than streams are also retried for ``retry_s`` seconds while no router answers. The
    check is not retried. ``key`` replaces the API key of the environment.

    Raises Unreachable if no router answers, Unauthenticated if the API key is missing or unknown,
    and SettingsError for an invalid ``key`` or invalid settings in the environment. The messages
    say what to do.
    """
    routers, used_key = addresses(address), key or api_key()
    await _probe(routers, used_key)
    async with AsyncClient(routers, tls=tls(), api_key=used_key, retry_s=retry_s) as client:
        yield client


async def _probe(routers: Sequence[str], key: str | None) -> None:
    async with AsyncClient(routers, tls=tls(), api_key=key, retry_s=0) as client:
        try:
            await client.status()
        except Unreachable as error:
            place, reason = ", ".join(routers), refusal(str(error))
            advice = reason or "start one with `everlift up`, or set --address"
            raise Unreachable(f"no cluster answers at {place}: {advice}") from None
        except Unauthenticated as error:
            raise Unauthenticated(f"{error}; commands use the key in {API_KEY_VARIABLE}") from None
        except Forbidden:
            # The cluster answers. The command's own calls show what this key permits.
            pass


def api_key() -> str | None:
    """Return the API key from the environment, or None if it is not set."""
    return os.environ.get(API_KEY_VARIABLE) or None


def tls() -> Tls | None:
    """Return the TLS files that the environment variables name, or None if they name none.

    Raises SettingsError if only one of certificate and key is named.
    """
    files = {name: os.environ.get(variable, "") for name, variable in TLS_VARIABLES.items()}
    try:
        return Tls(**files) if any(files.values()) else None
    except ValueError:
        raise SettingsError(
            f"{TLS_VARIABLES['cert']} must be set together with {TLS_VARIABLES['key']}"
        ) from None


def addresses(text: str | None) -> list[str]:
    """Return the router addresses in ``text``, which are separated by commas.

    Without ``text``, these are the addresses of the cluster that runs on this machine, or a
    router's default address if none runs. Raises SettingsError for an invalid environment.
    """
    if text:
        return [address.strip() for address in text.split(",")]
    defaults = RouterConfig()
    state_dir = configuration.load(None, os.environ).state_dir
    return endpoint.find(state_dir) or [f"{defaults.host}:{defaults.port}"]


def with_ledger(config: Config, url: str | None) -> Config:
    """Return ``config`` with ``url`` as the ledger's URL; None or "" leaves it unchanged.

    Raises SettingsError if ``url`` is invalid.
    """
    if not url:
        return config
    try:
        return replace(config, ledger=replace(config.ledger, url=url))
    except ValidationError as error:
        raise SettingsError(f"--ledger: {to_settings_error(LedgerConfig, error)}") from None


@asynccontextmanager
async def connected_ledger(config: Config) -> AsyncIterator[RedisLedger]:
    """Context manager: connect to the configured ledger, and yield it.

    If the ledger is configured as embedded, the cluster that runs with the same state directory
    must have started it. Raises ClusterFailed if no such cluster runs, LedgerSetupError if the
    ledger cannot be used, and LedgerUnavailable if it does not answer.
    """
    # Imported here because most commands, which import this module, do not need Redis.
    from router.ledger.redis.redis_ledger import connect

    url = config.ledger.url
    if url == EMBEDDED:
        running = running_url(config.state_dir)
        if running is None:
            raise ClusterFailed(
                f"{config.state_dir} has no ledger: start a cluster with `everlift up`, or set "
                "ledger.url"
            )
        url = running
    ledger = await connect(replace(config.ledger, url=url))
    try:
        yield ledger
    finally:
        await ledger.close()
