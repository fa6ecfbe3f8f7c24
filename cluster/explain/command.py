"""Command ``everlift explain``, which shows where the time of a request went."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster import picture_file, request_ids
from cluster.connection import Address, connected
from cluster.explain import session, tables
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
- `everlift explain --session chat-7` shows all turns of a session, and the time between them
"""

#: Maximum number of turns of a session that are explained, the newest ones.
_MAX_TURNS = 1000
#: Number of explanations that are requested at once.
_AT_ONCE = 8


def explain(
    request_id: Annotated[
        str, typer.Argument(metavar="ID", help="Request id, or a unique prefix of it.")
    ] = "",
    newest: Annotated[bool, typer.Option("--last", help="Explain the newest request.")] = False,
    session_id: Annotated[
        str,
        typer.Option("--session", metavar="SESSION", help="Explain all turns of a session."),
    ] = "",
    for_programs: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
    png: Annotated[
        Path | None,
        typer.Option("--png", metavar="FILE", help="File for a picture of the times."),
    ] = None,
    address: Address = None,
) -> None:
    """Show where the time of a request went, or that of all turns of a session."""
    if sum([bool(request_id), newest, bool(session_id)]) != 1:
        raise InvalidRequest("give either a request id, --last or --session")
    if session_id:
        _explain_session(session_id, address, for_programs=for_programs, png=png)
        return
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


def _explain_session(
    session_id: str, address: str | None, *, for_programs: bool, png: Path | None
) -> None:
    if png is not None:
        raise InvalidRequest("--png works only for one request, not for a session")
    turns = asyncio.run(_turns(address, session_id))
    if for_programs:
        typer.echo(json.dumps(session.as_json(session_id, turns), indent=2))
    else:
        Console(highlight=False).print(*session.tables(session_id, turns), sep="\n")


async def _turns(address: str | None, session_id: str) -> list[session.Turn]:
    async with connected(address) as client:
        listing = request_ids.listed(client, session_id=session_id, limit=_MAX_TURNS)
        found = [each async for each in listing]
        if not found:
            raise UnknownRequest(f"there are no requests in session {session_id!r}")
        slots = asyncio.Semaphore(_AT_ONCE)

        async def turn(summary: pb.RequestSummary) -> session.Turn | None:
            async with slots:
                # A request may have been deleted since it was listed.
                with suppress(UnknownRequest):
                    explanation = await client.explain(summary.request_id)
                    return session.Turn(summary.arrived, explanation)
            return None

        turns = await asyncio.gather(*map(turn, reversed(found)))
    return [each for each in turns if each is not None]


async def _explanation(address: str | None, request_id: str) -> pb.Explanation:
    async with connected(address) as client:
        try:
            return await client.explain(request_id or await request_ids.last(client))
        except UnknownRequest:
            if not request_id:
                raise
            found = await request_ids.completed(client, request_id)
        return await client.explain(found)
