"""``everlift key``: commands that create, list, rotate and revoke API keys."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table

from cluster.access.opening import Assignments, SettingsFile, edit_document, read_document
from everlift.errors import SettingsError
from router.auth import key as keys
from router.auth.caller import Scope
from router.auth.document import Document
from router.auth.key import Key

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="API keys of clients, if `router.access` is `file` or `ledger`.",
)

KeyId = Annotated[
    str, typer.Argument(metavar="ID", help="Id of a key: the part between its two underscores.")
]


@app.command(
    epilog="""
**Examples**

- `everlift key create --tenant acme --name laptop --set router.access=ledger`
- `everlift key create --tenant ops --scope admin --scope metrics --expires 90d`
"""
)
def create(
    tenant: Annotated[str, typer.Option(help="Tenant of the key.")],
    scope: Annotated[
        list[Scope] | None,
        typer.Option(help="Scope that the key grants; default infer. Repeatable."),
    ] = None,
    name: Annotated[str, typer.Option(help="Display name of the key.")] = "",
    expires: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Time until the key expires: 30m, 12h, 90d. Default: never."
        ),
    ] = None,
    config: SettingsFile = None,
    assignments: Assignments = None,
) -> None:
    """Create a key and print it.

    Only a hash of the key is stored, so it cannot be shown again.
    """
    now = time.time()
    until = None if expires is None else keys.iso_timestamp(now + _seconds("--expires", expires))
    key_id, secret = keys.new_id(), keys.new_secret()
    key = _key(tenant, tuple(scope or [Scope.INFER]), secret, now, until, name)
    edit_document(config, assignments, lambda document: document.with_key(key_id, key))
    typer.echo(keys.join_key(key_id, secret))


@app.command("list", epilog="**Example:** `everlift key list --config cluster.yaml`")
def show(
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
    config: SettingsFile = None,
    assignments: Assignments = None,
) -> None:
    """List the keys without their secrets."""
    document, now = read_document(config, assignments), time.time()
    if as_json:
        plain = document.to_plain()["keys"]
        typer.echo(
            json.dumps([{"id": key_id} | _without_hash(key) for key_id, key in plain.items()])
        )
    else:
        Console(highlight=False, markup=False).print(_table(document, now))


@app.command(epilog="**Example:** `everlift key revoke 3f9a1c2b4d5e`")
def revoke(key_id: KeyId, config: SettingsFile = None, assignments: Assignments = None) -> None:
    """Revoke a key. Routers that can read the key store refuse it within two seconds."""

    def edit(document: Document) -> Document:
        _find_key(document, key_id)
        return document.with_key(key_id, None)

    edit_document(config, assignments, edit)
    typer.echo(f"{key_id} is revoked")


@app.command(epilog="**Example:** `everlift key rotate 3f9a1c2b4d5e --overlap 1d`")
def rotate(
    key_id: KeyId,
    overlap: Annotated[
        str,
        typer.Option(metavar="TIME", help="Time for which the old key stays valid: 30m, 12h, 1d."),
    ] = "1d",
    config: SettingsFile = None,
    assignments: Assignments = None,
) -> None:
    """Create a key with the tenant, scopes, name and expiry of an old one, and print it.

    The old key expires after `--overlap`, or at its own expiry if that is earlier. If it has
    expired already, the new key has expired too.
    """
    now = time.time()
    ends = now + _seconds("--overlap", overlap)
    new_id, secret = keys.new_id(), keys.new_secret()

    def edit(document: Document) -> Document:
        old = _find_key(document, key_id)
        new = replace(old, sha256=keys.hash_of(secret), created=keys.iso_timestamp(now))
        if not old.has_expired(ends):
            old = replace(old, expires=keys.iso_timestamp(ends))
        return document.with_key(key_id, old).with_key(new_id, new)

    edit_document(config, assignments, edit)
    typer.echo(keys.join_key(new_id, secret))


def _key(
    tenant: str, scopes: tuple[Scope, ...], secret: str, now: float, until: str | None, name: str
) -> Key:
    try:
        return Key(tenant, scopes, keys.hash_of(secret), keys.iso_timestamp(now), until, name)
    except ValueError as error:
        raise SettingsError(f"--{error}") from None


def _find_key(document: Document, key_id: str) -> Key:
    if (key := document.keys.get(key_id)) is None:
        raise SettingsError(f"there is no key {key_id}: see `everlift key list`")
    return key


def _seconds(option: str, text: str) -> float:
    try:
        return keys.duration(text)
    except ValueError as error:
        raise SettingsError(f"{option}: {error}") from None


def _without_hash(key: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in key.items() if name != "sha256"}


def _table(document: Document, now: float) -> Table:
    columns = ("id", "tenant", "scopes", "created", "expires", "name")
    table = Table(*(Column(name, no_wrap=name != "name") for name in columns), box=SIMPLE)
    for key_id, key in sorted(document.keys.items(), key=lambda item: item[1].created):
        scopes = " ".join(scope.value for scope in key.scopes)
        expires = f"{_day(key.expires)}{' (expired)' if key.has_expired(now) else ''}"
        table.add_row(key_id, key.tenant, scopes, _day(key.created), expires, key.name)
    return table


def _day(timestamp: str | None) -> str:
    return timestamp[:10] if timestamp else "never"
