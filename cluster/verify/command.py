"""Command ``everlift verify``."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from cluster.connection import api_key
from cluster.verify.endpoint import Endpoint
from cluster.verify.verdict import Verdict
from cluster.verify.verification import Case, Probe, Verification, probes

EXAMPLES = """
Half of the chats are greedy, half are sampled with a seed. Each disturbed stream must have the text
of the undisturbed one; streams that have ended before are not counted. The API key is read from
EVERLIFT_API_KEY.

- **exact:** the client received the undisturbed output
- **lost:** the stream ended early
- **repeated:** a part of the output came twice
- **restarted:** the output began again within the stream, or after a broken connection
- **changed:** the output differs

The exit status is 1 if any stream is not exact.

**Examples**

- `everlift verify http://127.0.0.1:8000/v1 --body '{"on_disconnect": "grace"}'`
- `everlift verify http://127.0.0.1:8000/v1 --kill "kill -9 $(cat worker.pid)" --at 1,8,32`
"""


def verify(
    url: Annotated[str, typer.Argument(metavar="URL", help="Base URL of an OpenAI endpoint.")],
    model: Annotated[
        str, typer.Option(metavar="NAME", help="Model. Default: the first one listed.")
    ] = "",
    num_chats: Annotated[
        int, typer.Option("--chats", metavar="N", min=2, help="Number of concurrent chats.")
    ] = 16,
    max_tokens: Annotated[
        int, typer.Option(metavar="N", min=2, help="Maximum number of tokens of a chat.")
    ] = 64,
    at: Annotated[
        str,
        typer.Option(metavar="N,...", help="Disturb a stream after these numbers of pieces."),
    ] = "1,8,32",
    kill: Annotated[
        str,
        typer.Option(metavar="COMMAND", help="Shell command that kills a process of the endpoint."),
    ] = "",
    body: Annotated[
        str,
        typer.Option(metavar="JSON", help="Fields to add to each request, as a JSON object."),
    ] = "{}",
    output: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the results as JSON.")
    ] = None,
) -> None:
    """Verify that an OpenAI endpoint neither loses, repeats nor changes output when disturbed."""
    places = [_place(each) for each in at.split(",")]
    chats = probes(num_chats, {"max_tokens": max_tokens, **_fields(body)})
    model, cases = asyncio.run(_verify(url, model, chats, places, kill))
    table = Table(Column("", no_wrap=True), *(each.value for each in Verdict), box=SIMPLE_HEAD)
    for case in cases:
        table.add_row(case.name, *(str(number) for number in case.verdicts.values()))
    Console(highlight=False).print(table)
    if output is not None:
        found = {case.name: case.verdicts for case in cases}
        report = {"url": url, "model": model, "cases": found}
        output.write_text(json.dumps(report, indent=2) + "\n")
    raise typer.Exit(0 if all(case.is_exact for case in cases) else 1)


def _place(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise typer.BadParameter(f"--at needs numbers above 0, not {text!r}")
    return int(text)


def _fields(body: str) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except ValueError as error:
        raise typer.BadParameter(f"--body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise typer.BadParameter("--body must be a JSON object")
    return fields


async def _verify(
    url: str, model: str, chats: list[Probe], places: list[int], kill: str
) -> tuple[str, list[Case]]:
    key = api_key()
    async with aiohttp.ClientSession(
        headers={"authorization": f"Bearer {key}"} if key else {},
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_read=60.0),
    ) as session:
        endpoint = Endpoint(session, url)
        await endpoint.find_model(model)
        verification = Verification(endpoint, chats)
        cases = [await verification.undisturbed()]
        for place in places:
            cases.append(await verification.broken_connection(place))
        for place in places if kill else ():
            cases.append(await verification.killed(kill, place))
    return endpoint.model, cases
