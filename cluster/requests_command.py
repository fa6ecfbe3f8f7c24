"""``everlift requests``: what the ledger knows of requests, newest first."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Annotated

import typer
from google.protobuf.json_format import MessageToDict
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from cluster.connection import Address, addresses, api_key, tls
from cluster.operating import Operator, operating
from everlift.errors import InvalidRequest
from everlift.v1 import inference_pb2 as pb

_STATE = "REQUEST_STATE_"
#: One page of the listing, at most.
_PAGE = 1000

EXAMPLES = """
**Examples**

- `everlift requests`
- `everlift requests --state queued --state running --limit 1000`
- `everlift requests --tenant acme --json` for who administers the cluster
"""


def requests(
    state: Annotated[
        list[str] | None, typer.Option(metavar="STATE", help="Only these, e.g. running.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="So many at most.")] = 100,
    tenant: Annotated[
        str | None,
        typer.Option(metavar="NAME", help='Whose; "" is everybody. Default: your own.'),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A line for each, for programs.")] = False,
    address: Address = None,
) -> None:
    """List requests, newest first."""
    asked = pb.ListRequestsRequest(states=map(_state, state or ()), tenant=tenant)
    asyncio.run(_list(addresses(address), asked, limit, as_json))


def _state(name: str) -> pb.RequestState.ValueType:
    """Raises InvalidRequest."""
    names = {each.removeprefix(_STATE).lower(): each for each in pb.RequestState.keys()[1:]}
    if name not in names:
        raise InvalidRequest(f"--state must be one of {', '.join(names)}, not {name!r}")
    return pb.RequestState.Value(names[name])


async def _list(
    routers: list[str], asked: pb.ListRequestsRequest, limit: int, as_json: bool
) -> None:
    table = Table("request", "state", "arrived", "attempts", "tokens", "error", box=SIMPLE_HEAD)
    async with operating(routers, tls(), api_key()) as operator:
        async for each in _listed(operator, asked, limit):
            if as_json:
                typer.echo(json.dumps(_as_json(each)))
            else:
                table.add_row(*_cells(each))
    if not as_json:
        Console(highlight=False).print(table)


async def _listed(
    operator: Operator, asked: pb.ListRequestsRequest, limit: int
) -> AsyncIterator[pb.RequestSummary]:
    """Page by page."""
    while limit:
        asked.page_size = min(limit, _PAGE)
        page = await operator.list_requests(asked)
        for each in page.requests:
            yield each
        limit -= len(page.requests)
        asked.page_token = page.next_page_token
        if not page.next_page_token:
            return


def _cells(each: pb.RequestSummary) -> list[str]:
    arrived = datetime.fromtimestamp(each.arrived).isoformat(" ", "seconds")
    counts = str(each.attempts), str(each.output_tokens)
    return [each.request_id, _name(each.state), arrived, *counts, each.error_slug]


def _as_json(each: pb.RequestSummary) -> dict[str, object]:
    fields = MessageToDict(
        each, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return fields | {"state": _name(each.state)}


def _name(state: pb.RequestState.ValueType) -> str:
    return pb.RequestState.Name(state).removeprefix(_STATE).lower()
