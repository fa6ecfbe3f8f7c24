"""Commands ``everlift adapter``: load, unload and list LoRA adapters of a running cluster."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from cluster.connection import Address, connected
from everlift.adapters import AdapterSource
from everlift.errors import InvalidRequest
from everlift.v1 import admin_pb2 as pb

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Load and unload LoRA adapters of a running cluster.",
)


@app.command(epilog="**Example:** `everlift adapter load sql=org/sql-lora@v2`")
def load(
    adapter: Annotated[
        str,
        typer.Argument(
            metavar="NAME=SOURCE",
            help="Name for clients, and a hub id or a directory below worker.adapter_dir.",
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            help="Model of the adapter. Default: that of its present version, or the first."
        ),
    ] = "",
    address: Address = None,
) -> None:
    """Add an adapter, or a new version of one, after a worker has checked its files."""
    try:
        source = AdapterSource.parse(adapter)
    except ValueError as error:
        raise InvalidRequest(f"NAME=SOURCE {error}") from None
    asyncio.run(_load(address, source, model))


async def _load(address: str | None, source: AdapterSource, model: str) -> None:
    location = str(source).partition("=")[2]
    async with connected(address) as client:
        answer = await client.load_adapter(source.name, location, model=model)
        typer.echo(f"{answer.name} is served from {answer.source}")


@app.command(epilog="**Example:** `everlift adapter unload sql`")
def unload(
    name: Annotated[str, typer.Argument(help="Name of the adapter.")], address: Address = None
) -> None:
    """Remove an adapter.

    Requests for the adapter continue if they are at a worker or already have output; others fail.
    """
    asyncio.run(_unload(address, name))


async def _unload(address: str | None, name: str) -> None:
    async with connected(address) as client:
        await client.unload_adapter(name)
        typer.echo(f"{name} is not served any more")


@app.command("list", epilog="**Example:** `everlift adapter list`")
def list_adapters(address: Address = None) -> None:
    """Show the adapters of the cluster, and how many workers have each in memory."""
    asyncio.run(_list(address))


async def _list(address: str | None) -> None:
    async with connected(address) as client:
        for adapter in (await client.adapters()).adapters:
            typer.echo(_line(adapter))


def _line(adapter: pb.AdapterInfo) -> str:
    origin = "configured" if adapter.configured else "loaded"
    workers = f"in memory of {len(adapter.workers)} workers"
    return f"{adapter.name:<20} {origin:<10} {workers}  {adapter.source}"
