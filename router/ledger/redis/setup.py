"""Checks of a ledger at connection: its servers, their durability, and its layout."""

from __future__ import annotations

import re
import secrets
import ssl

from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError

from everlift import logs
from everlift.errors import LedgerUnavailable
from router.ledger.config import LedgerConfig, LedgerSetupError
from router.ledger.redis.address import Kind, parse
from router.ledger.redis.connections import Command
from router.ledger.redis.server import (
    SCHEMA,
    Info,
    check_durability,
    check_layout,
    check_server,
    knows_waitaof,
)
from router.ledger.redis.shards import Shards

log = logs.get_logger(__name__)


async def check_ledger(shards: Shards, config: LedgerConfig) -> tuple[str, str]:
    """Check servers and layout; return the server's name and version, and the cluster's id.

    The layout (key schema, number of shards, cluster id) is written if the ledger is new. If there
    are several servers, the name and version are those of the first one. Raises LedgerSetupError
    for an unusable server or layout, and LedgerUnavailable if a server does not answer.
    """
    try:
        server = await check_servers(shards, config)
        return server, await _cluster_id(shards, config)
    except LedgerUnavailable as error:
        if reason := _refusal(error):
            raise LedgerSetupError(reason) from error
        raise


async def check_servers(shards: Shards, config: LedgerConfig) -> str:
    """Check every server; return the name and version of the first one as text.

    Also sets ``shards.knows_waitaof``. Raises LedgerSetupError for an unusable server,
    LedgerUnavailable if a server does not answer.
    """
    is_cluster = parse(config.url).kind is Kind.CLUSTER
    infos: list[Info | None] = await shards.run_on_each_server("connect", "INFO")
    settings = await shards.run_on_each_server("connect", "CONFIG GET", "appendfsync")
    if None in infos:
        raise LedgerSetupError("the ledger's user may not call INFO")
    known = [info for info in infos if info is not None]
    names = [check_server(info, is_cluster=is_cluster) for info in known]
    for info, setting in zip(known, settings, strict=True):
        check_durability(config.durability_class, info, (setting or {}).get("appendfsync"))
    _warn(config, known, has_settings=all(settings))
    shards.knows_waitaof = all(map(knows_waitaof, known))
    return names[0]


def _warn(config: LedgerConfig, infos: list[Info], *, has_settings: bool) -> None:
    demanded = config.durability_class
    if demanded in ("always", "replicated") and not has_settings:
        log.warning("appendfsync cannot be checked", durability_class=demanded)
    if demanded == "replicated" and not all(info.get("connected_slaves") for info in infos):
        # Only a warning, because a replica may connect soon.
        log.warning("ledger has no replica: requests are refused until it has one")


async def _cluster_id(shards: Shards, config: LedgerConfig) -> str:
    key = _layout_key(config)
    command = Command(key, ("HMGET", key, "schema", "shards", "cluster_id"))
    [stored] = await shards.run_commands("connect", command)
    if None in stored:
        # Written only if a field is missing: a full server refuses to write even existing fields.
        *_, stored = await shards.run_commands(
            "connect", *layout(config, secrets.token_hex(8)), command
        )
    schema, num_shards, cluster_id = stored
    check_layout(config, int(schema), int(num_shards))
    return str(cluster_id.decode())


def layout(config: LedgerConfig, cluster_id: str) -> list[Command]:
    """Return commands that store the key schema, number of shards and cluster id in the ledger.

    They do not change a field that exists already.
    """
    key = _layout_key(config)
    fields: dict[str, str | int] = {
        "schema": SCHEMA,
        "shards": config.shards,
        "cluster_id": cluster_id,
    }
    return [Command(key, ("HSETNX", key, name, value)) for name, value in fields.items()]


def _layout_key(config: LedgerConfig) -> str:
    return f"{config.key_prefix}:layout"


def _refusal(error: BaseException) -> str:
    causes = _causes(error)
    for cause in causes:
        if isinstance(cause, AuthenticationError):
            return "the ledger's server refuses the user or password"
        if isinstance(cause, NoPermissionError):
            return (
                f"the ledger's server does not permit our user {_command(cause)}; see the user's"
                " rule in router/ledger/README.md"
            )
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"the certificate of the ledger's server is invalid: {cause.verify_message}"
        if isinstance(cause, ResponseError) and "cluster support disabled" in str(cause):
            return "the ledger's server is not a cluster: begin its url with redis:// or rediss://"
    return ""


def _causes(error: BaseException) -> list[BaseException]:
    causes = [error]
    while inner := causes[-1].__cause__ or causes[-1].__context__:
        causes.append(inner)
    return causes


def _command(error: NoPermissionError) -> str:
    """Return the name of the command that the server refused, never its arguments."""
    found = re.search(r"'([a-z|]+)' command", str(error))
    return f"the command {found[1]}" if found else "a command or its keys"
