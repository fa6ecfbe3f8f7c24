"""Command ``everlift explain``, which shows where the time of a request went."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster import picture_file, request_ids
from cluster.connection import Address, connected
from cluster.explain import tables
from everlift.errors import InvalidRequest, UnknownRequest
from everlift.explanation import as_json
from everlift.v1 import inference_pb2 as pb

EXAMPLES = """
The parts add up to the total time. For an unfinished request they cover the time so far.

**Examples**

- `everlift explain --last`
- `everlift explain 3f2a` takes the request whose id begins with 3f2a
- `everlift explain 3f2a… --json | jq '.spans[] | select(.seconds > 0.1)'`
- `everlift explain 3f2a… --png 3f2a.png`
"""


def explain(
    request_id: Annotated[
        str, typer.Argument(metavar="ID", help="Request id, or a unique prefix of it.")
    ] = "",
    newest: Annotated[bool, typer.Option("--last", help="Explain the newest request.")] = False,
    for_programs: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    png: Annotated[
        Path | None,
        typer.Option("--png", metavar="FILE", help="File for a picture by kind of time."),
    ] = None,
    address: Address = None,
) -> None:
    """Show where the time of a request went."""
    if bool(request_id) == newest:
        raise InvalidRequest("give either a request id or --last")
    if png is not None:
        picture_file.check("--png", png)
    explanation = asyncio.run(_explanation(address, request_id))
    if for_programs:
        typer.echo(json.dumps(as_json(explanation), indent=2))
    else:
        console = Console(highlight=False)
        console.print(*tables.of(explanation), sep="\n")
    if png is not None:
        # Imported here because importing matplotlib is slow.
        from cluster.explain import picture

        picture.draw(explanation, png)


async def _explanation(address: str | None, request_id: str) -> pb.Explanation:
    async with connected(address) as client:
        try:
            return await client.explain(request_id or await request_ids.last(client))
        except UnknownRequest:
            if not request_id:
                raise
            found = await request_ids.completed(client, request_id)
        return await client.explain(found)
