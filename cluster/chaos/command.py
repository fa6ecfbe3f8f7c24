"""``everlift chaos``: commands that inject faults and check the ledger for broken requests."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from contextlib import suppress
from typing import Annotated, Any

import typer
from rich.console import Console

from cluster import config as configuration
from cluster.chaos.check import TIMEOUT_S, Result, check
from cluster.chaos.run import run
from cluster.chaos.view import as_json, fault_message, injections_table, outcome, result_table
from cluster.config import Config
from cluster.connection import Address, connected, connected_ledger, with_ledger
from everlift.checks import sendable
from everlift.errors import EverliftError, Forbidden
from everlift.v1 import chaos_pb2 as pb

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Inject faults into a cluster started with `everlift up --chaos`.",
)

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="Id or unique prefix of a worker or router; any-worker, any-router, leader or ledger.",
    ),
]
Seconds = Annotated[float, typer.Option(help="Duration in seconds.")]
Rank = Annotated[int, typer.Option(help="Rank of the worker whose process is affected.")]


@app.command(epilog="**Example:** `everlift chaos kill any-worker`")
def kill(target: Target, rank: Rank = 0, address: Address = None) -> None:
    """Kill the target's process."""
    _inject(address, pb.FAULT_KIND_KILL, target=target, rank=rank)


@app.command(epilog="**Example:** `everlift chaos pause leader --seconds 3`")
def pause(target: Target, seconds: Seconds = 3.0, rank: Rank = 0, address: Address = None) -> None:
    """Suspend the target's process, as SIGSTOP does, and resume it after some seconds."""
    _inject(address, pb.FAULT_KIND_PAUSE, target=target, seconds=seconds, rank=rank)


@app.command(epilog="**Example:** `everlift chaos partition any-router --peer ledger`")
def partition(
    target: Target,
    seconds: Seconds = 5.0,
    peer: Annotated[
        str,
        typer.Option(
            help="Only peer to cut off: a router, a worker or ledger. Default: all peers."
        ),
    ] = "",
    address: Address = None,
) -> None:
    """Delay all messages between the target and its peers for some seconds."""
    _inject(address, pb.FAULT_KIND_PARTITION, target=target, seconds=seconds, peer=peer)


@app.command(epilog="**Example:** `everlift chaos slow ledger --delay 0.2`")
def slow(
    target: Target,
    seconds: Seconds = 5.0,
    factor: Annotated[
        float, typer.Option(help="Factor by which a worker's steps take longer.")
    ] = 10.0,
    delay: Annotated[
        float, typer.Option(help="Seconds by which every call of the ledger takes longer.")
    ] = 0.2,
    address: Address = None,
) -> None:
    """Slow down a worker or the ledger for some seconds."""
    kind = pb.FAULT_KIND_SLOW
    _inject(address, kind, target=target, seconds=seconds, factor=factor, delay_s=delay)


@app.command("run", epilog="**Example:** `everlift chaos run --minutes 10 --every 5`")
def run_many(
    minutes: Annotated[float, typer.Option(help="Duration in minutes.")] = 1.0,
    every: Annotated[float, typer.Option(help="Seconds between faults.")] = 5.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the random faults.")] = None,
    address: Address = None,
) -> None:
    """Inject random faults until the time is up or Ctrl-C is pressed.

    At least one worker is always left healthy.
    """
    seed = secrets.randbits(32) if seed is None else seed
    console = Console(highlight=False)
    asyncio.run(_run(address, minutes * 60, every, seed, console))


@app.command("check", epilog="**Example:** `everlift chaos check --json`")
def check_ledger(
    ledger: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="URL of the ledger. Default: the configured one, or the one on this machine.",
        ),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any setting, e.g. ledger.shards=4."),
    ] = None,
    recheck_after: Annotated[
        float, typer.Option(help="Seconds until requests that look broken are examined again.")
    ] = TIMEOUT_S,
    as_lines: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Search the ledger for broken requests.

    Findings are lost requests, excess output tokens, repeated dispatches, events that contradict a
    request's state, orphaned requests or keys, keys that never expire, and wrong listings.

    The check changes nothing, and the cluster may be running. The exit status is 1 if there is any
    finding.
    """
    config = configuration.load(None, os.environ, assignments or ())
    result = asyncio.run(_check(with_ledger(config, ledger), recheck_after))
    if as_lines:
        typer.echo(json.dumps(as_json(result)))
    else:
        Console(highlight=False).print(result_table(result))
    raise typer.Exit(1 if result.findings else 0)


async def _run(
    address: str | None, seconds: float, every_s: float, seed: int, console: Console
) -> None:
    async with connected(address, retry_s=0) as client:
        before = await client.status()
        log = await run(client, seconds, every_s, seed, console)
        console.print(injections_table(log))
        try:
            console.print(outcome(log, before, await client.status()))
        except EverliftError as error:
            console.print(f"no status after the faults: {error}", markup=False)


async def _check(config: Config, timeout_s: float) -> Result:
    async with connected_ledger(config) as ledger:
        return await check(ledger, timeout_s)


def _inject(address: str | None, kind: pb.FaultKind.ValueType, **fields: Any) -> None:
    with sendable():
        fault = pb.Fault(kind=kind, **fields)
    typer.echo(asyncio.run(_injected(address, fault)))


async def _injected(address: str | None, fault: pb.Fault) -> str:
    async with connected(address) as client:
        running: dict[str, int] = {}
        # An API key may allow faults without allowing the status.
        with suppress(Forbidden):
            running = {it.worker_id: it.num_running for it in (await client.status()).workers}
        target = (await client.inject(fault)).target
    return fault_message(fault, target, running)
