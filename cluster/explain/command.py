"""``everlift explain``: where the time of a request went."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cluster.connection import Address, connected
from cluster.explain import tables
from cluster.explain.what_if import WhatIf
from cluster.forecast.command import machines
from everlift.explanation import as_json
from everlift.v1 import inference_pb2 as pb

EXAMPLES = """
The parts add up to the whole. Of a request that goes on, it is told what came to pass so far.

**Examples**

- `everlift explain 3f2a…`
- `everlift explain 3f2a… --json | jq '.spans[] | select(.seconds > 0.1)'`
- `everlift explain 3f2a… --png 3f2a.png`
- `everlift explain 3f2a… --what-if shortest,hrrn`: how long it would have taken under other
  policies, by simulations of what the ledger knows of that time, and how far these are off
"""

WhatIfs = Annotated[
    list[str] | None,
    typer.Option(
        "--what-if",
        metavar="ORDER,...",
        help="Estimate how long it would have taken: an order of the queue, maybe with settings "
        "behind it, as for `everlift replay`. Repeatable.",
    ),
]


def explain(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="The request's id.")],
    for_programs: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="Draw it there, by kind of time.")
    ] = None,
    what_if: WhatIfs = None,
    config: machines.SettingsFile = None,
    assignments: machines.Assignments = None,
    address: Address = None,
) -> None:
    """Tell where the time of a request went."""
    explanation = asyncio.run(_explanation(address, request_id))
    estimated = None
    if what_if:
        # It imports what takes a while.
        from cluster.explain.replayed import replayed

        estimated = asyncio.run(replayed(explanation, what_if, address, config, assignments))
    if for_programs:
        typer.echo(json.dumps(_as_json(explanation, estimated), indent=2))
    else:
        console = Console(highlight=False)
        console.print(*tables.of(explanation), sep="\n")
        if estimated is not None:
            console.print(*tables.estimates(estimated, explanation.total_s), sep="\n")
    if png is not None:
        # So does this.
        from cluster.explain import picture

        picture.draw(explanation, png)


def _as_json(explanation: pb.Explanation, estimated: WhatIf | None) -> dict[str, Any]:
    told = as_json(explanation)
    return told if estimated is None else {**told, "what_if": estimated.as_json()}


async def _explanation(address: str | None, request_id: str) -> pb.Explanation:
    async with connected(address) as client:
        return await client.explain(request_id)
