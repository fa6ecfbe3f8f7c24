"""``everlift doctor``: run all checks and show their findings."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.config import Config
from cluster.doctor import certificates, ledger, machine
from cluster.doctor.finding import Finding, Level, broken
from cluster.ray.ray_cluster import LOCAL

_COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.ERROR: "red"}


def examine(config: Config) -> list[Finding]:
    """Return the findings for this machine, the certificates, the ledger and the nodes.

    Nodes are checked only if ``ray_address`` names a Ray cluster.
    """
    findings = [*machine.examine(config), *certificates.examine(config)]
    findings += asyncio.run(_ledger(config))
    if config.ray_address != LOCAL:
        findings += _nodes(config.ray_address)
    return findings


async def _ledger(config: Config) -> list[Finding]:
    return [finding async for finding in ledger.examine(config)]


def _nodes(address: str) -> list[Finding]:
    from cluster.doctor import nodes

    try:
        # Ray prints events of its nodes to the standard output, even if its logs are disabled.
        with redirect_stdout(sys.stderr):
            return list(nodes.examine(address))
    except ConnectionError as error:
        mend = "run `ray start --head` there, or set another ray_address"
        return [broken("Ray", f"no cluster at {address!r}: {error}", mend)]


def show(findings: Sequence[Finding], console: Console) -> None:
    table = Table("", "check", "finding", "fix", box=None, pad_edge=False)
    for each in findings:
        level = f"[{_COLOURS[each.level]}]{each.level.value}[/]"
        table.add_row(level, each.subject, escape(each.says), escape(each.mend))
    console.print(table)


def as_json(findings: Sequence[Finding]) -> list[dict[str, str]]:
    return [asdict(each) | {"level": each.level.value} for each in findings]


def has_errors(findings: Sequence[Finding]) -> bool:
    return any(each.level is Level.ERROR for each in findings)
