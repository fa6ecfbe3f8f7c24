"""``everlift tenant``: commands that change and list the limits of tenants."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from cluster.access.opening import Assignments, SettingsFile, edit_document, read_document
from everlift.errors import InvalidRequest, SettingsError
from everlift.request_id import check_tenant
from router.auth.document import EVERYBODY, Document
from router.auth.limits import Limits

_NAMES = tuple(field.name for field in fields(Limits))
#: Option values that are not numbers: no limit, or the limit of EVERYBODY.
_NONE, _DEFAULT = "none", "default"

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Limits of tenants, if `router.access` is `file` or `ledger`.",
)

Tenant = Annotated[
    str,
    typer.Argument(
        metavar="TENANT",
        help=f"Name of the tenant; '{EVERYBODY}' applies to every tenant without its own limits.",
    ),
]


def _limit(text: str) -> Any:
    return typer.Option(metavar=f"N|{_NONE}|{_DEFAULT}", help=text)


@app.command(
    "set",
    epilog="""
**Examples**

- `everlift tenant set acme --requests-per-minute 600 --max-concurrent 50`
- `everlift tenant set '*' --tokens-per-minute 100000` for every tenant without its own limit
- `everlift tenant set acme --tokens-per-minute none --max-priority default`
- `everlift tenant set acme --weight 3` for three times the tokens of a tenant with weight 1, if
  both have queued requests
""",
)
def change(
    tenant: Tenant,
    requests_per_minute: Annotated[str | None, _limit("Maximum requests per minute.")] = None,
    tokens_per_minute: Annotated[
        str | None, _limit("Maximum prompt and output tokens per minute.")
    ] = None,
    max_concurrent: Annotated[
        str | None, _limit("Maximum unfinished requests, including queued ones.")
    ] = None,
    max_tokens: Annotated[
        str | None, _limit("Maximum output tokens of a request, over all choices.")
    ] = None,
    max_priority: Annotated[str | None, _limit("Maximum priority of a request.")] = None,
    weight: Annotated[
        str | None,
        typer.Option(
            metavar=f"N|{_DEFAULT}",
            help="Weight of the tenant in fair scheduling of queued requests.",
        ),
    ] = None,
    config: SettingsFile = None,
    assignments: Assignments = None,
) -> None:
    """Change the given limits of a tenant; the others stay as they are."""
    values = (
        requests_per_minute,
        tokens_per_minute,
        max_concurrent,
        max_tokens,
        max_priority,
        weight,
    )
    given = dict(zip(_NAMES, values, strict=True))
    _check_tenant(tenant)
    wanted = {name: _value(name, text) for name, text in given.items() if text is not None}

    def edit(document: Document) -> Document:
        own = {**document.tenants.get(tenant, {}), **wanted}
        return document.with_tenant(
            tenant, {name: value for name, value in own.items() if value != _DEFAULT}
        )

    document = edit_document(config, assignments, edit)
    Console(highlight=False, markup=False).print(_table(document, [tenant]))


@app.command("list", epilog="**Example:** `everlift tenant list --json`")
def show(
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
    config: SettingsFile = None,
    assignments: Assignments = None,
) -> None:
    """List the tenants that have keys or limits, with the limits in effect."""
    document = read_document(config, assignments)
    names = {key.tenant for key in document.keys.values()} | document.tenants.keys() | {EVERYBODY}
    if as_json:
        typer.echo(json.dumps({name: _limits(document, name) for name in sorted(names)}))
    else:
        Console(highlight=False, markup=False).print(_table(document, sorted(names)))


def _check_tenant(tenant: str) -> None:
    if tenant != EVERYBODY:
        try:
            check_tenant(tenant)
        except InvalidRequest as error:
            raise SettingsError(str(error)) from None


def _value(name: str, text: str) -> Any:
    if text == _DEFAULT:
        return text
    if text == _NONE:
        return None
    try:
        return int(text)
    except ValueError:
        option = name.replace("_", "-")
        raise SettingsError(
            f"--{option}: must be a number, none or default, not {text!r}"
        ) from None


def _limits(document: Document, tenant: str) -> dict[str, int | None]:
    limits = document.limits_of(tenant)
    return {name: getattr(limits, name) for name in _NAMES}


def _table(document: Document, tenants: list[str]) -> Table:
    table = Table("tenant", *(name.replace("_", " ") for name in _NAMES), box=SIMPLE)
    for tenant in tenants:
        values = _limits(document, tenant).values()
        table.add_row(tenant, *("-" if value is None else str(value) for value in values))
    return table
