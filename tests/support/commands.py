"""Calls of the command line in this process."""

from __future__ import annotations

import asyncio

from typer.testing import CliRunner

from cluster.cli import app


async def run(*arguments: str, status: int = 0, **environ: str) -> str:
    """Return the output of ``everlift`` with these arguments."""
    result = await asyncio.to_thread(CliRunner().invoke, app, arguments, env=environ)
    assert result.exit_code == status, result.output
    return result.output
