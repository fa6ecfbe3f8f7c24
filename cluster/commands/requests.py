"""Command ``everlift requests``: list of the requests in the ledger, newest first."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, TypeAlias

import typer
from google.protobuf.json_format import MessageToDict
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from cluster.connection import Address, connected
from cluster.request_ids import listed
from everlift.errors import InvalidRequest
from everlift.explanation import state_name
from everlift.v1 import inference_pb2 as pb

_States: TypeAlias = Sequence[pb.RequestState.ValueType]

#: Width in columns that no table exceeds.
_UNBOUNDED = 10_000

EXAMPLES = """
**Examples**

- `everlift requests`
- `everlift requests --state queued --state running --limit 1000`
- `everlift requests --tenant acme --json` for administrators of the cluster
"""


def requests(
    state: Annotated[
        list[str] | None,
        typer.Option(metavar="STATE", help="State of the requests, e.g. running. Repeatable."),
    ] = None,
    limit: Annotated[
        int, typer.Option(min=1, metavar="N", help="Maximum number of requests to list.")
    ] = 100,
    tenant: Annotated[
        str | None,
        typer.Option(metavar="NAME", help='Tenant; "" for all. Default: your own.'),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per request.")
    ] = False,
    address: Address = None,
) -> None:
    """List requests, newest first."""
    states = [_state(name) for name in state or ()]
    asyncio.run(_list(address, states, tenant, limit, as_json))


def _state(name: str) -> pb.RequestState.ValueType:
    states = {state_name(state): state for state in pb.RequestState.values()[1:]}
    if name not in states:
        raise InvalidRequest(f"--state must be one of {', '.join(states)}, not {name!r}")
    return states[name]


async def _list(
    address: str | None, states: _States, tenant: str | None, limit: int, as_json: bool
) -> None:
    table = Table("request", "state", "arrived", "attempts", "tokens", "error", box=SIMPLE_HEAD)
    async with connected(address) as client:
        async for each in listed(client, states=states, tenant=tenant, limit=limit):
            if as_json:
                typer.echo(json.dumps(_as_json(each)))
            else:
                table.add_row(*_cells(each))
    if not as_json:
        console = Console(highlight=False, markup=False)
        # No cell is cut, so that ids can be copied; in a narrow terminal, lines wrap instead.
        unbounded = console.options.update(max_width=_UNBOUNDED)
        console.width = max(console.width, console.measure(table, options=unbounded).maximum)
        console.print(table)


def _cells(each: pb.RequestSummary) -> list[str]:
    arrived = datetime.fromtimestamp(each.arrived).isoformat(" ", "seconds")
    counts = str(each.attempts), str(each.output_tokens)
    return [each.request_id, state_name(each.state), arrived, *counts, each.error_slug]


def _as_json(each: pb.RequestSummary) -> dict[str, object]:
    fields = MessageToDict(
        each, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return fields | {"state": state_name(each.state)}
