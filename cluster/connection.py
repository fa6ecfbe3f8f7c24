"""The cluster that a command means, and its way there."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated

import typer

from cluster import config as configuration
from cluster import endpoint
from cluster.config import ADDRESS_VARIABLE, API_KEY_VARIABLE, TLS_VARIABLES
from everlift import AsyncClient, Forbidden, Tls, Unauthenticated, Unreachable
from everlift.client.retries import RETRY_S
from everlift.handshake import refusal
from everlift.settings import SettingsError
from router.config import RouterConfig

Address = Annotated[
    str | None,
    typer.Option(
        envvar=ADDRESS_VARIABLE,
        metavar="HOST:PORT",
        help="The router; several separated by commas. Default: the cluster on this machine.",
    ),
]


@asynccontextmanager
async def connected(
    address: str | None, retry_s: float = RETRY_S, key: str | None = None
) -> AsyncIterator[AsyncClient]:
    """A client of a cluster that answers, with a ``key`` in the place of the environment's. Raises
    Unreachable and Unauthenticated with advice."""
    routers, shown = addresses(address), key or api_key()
    await _probe(routers, shown)
    async with AsyncClient(routers, tls=tls(), api_key=shown, retry_s=retry_s) as client:
        yield client


async def _probe(routers: Sequence[str], key: str | None) -> None:
    """Asks each router once. Raises as ``connected`` does."""
    async with AsyncClient(routers, tls=tls(), api_key=key, retry_s=0) as client:
        try:
            await client.status()
        except Unreachable as error:
            place, reason = ", ".join(routers), refusal(str(error))
            advice = reason or "start one with `everlift up`"
            raise Unreachable(f"no cluster answers at {place}: {advice}") from None
        except Unauthenticated as error:
            raise Unauthenticated(f"{error}; commands show what is in {API_KEY_VARIABLE}") from None
        except Forbidden:
            # It answers, and what this key is for is seen by what is asked next.
            pass


def api_key() -> str | None:
    """What the environment has to show to the routers."""
    return os.environ.get(API_KEY_VARIABLE) or None


def tls() -> Tls | None:
    """What the environment says of TLS to the routers. Raises SettingsError."""
    said = {name: os.environ.get(variable, "") for name, variable in TLS_VARIABLES.items()}
    try:
        return Tls(**said) if any(said.values()) else None
    except ValueError:
        raise SettingsError(
            f"{TLS_VARIABLES['cert']} must be set together with {TLS_VARIABLES['key']}"
        ) from None


def addresses(given: str | None) -> list[str]:
    """Of the routers: those that are ``given``, else those of the cluster on this machine."""
    if given:
        return [address.strip() for address in given.split(",")]
    defaults = RouterConfig()
    state_dir = configuration.load(None, os.environ).state_dir
    return endpoint.find(state_dir) or [f"{defaults.host}:{defaults.port}"]
