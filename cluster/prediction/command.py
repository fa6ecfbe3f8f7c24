"""Command ``everlift train-predictor``: train a predictor of output lengths."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster import config as configuration

EXAMPLES = """
**Examples**

- `everlift train-predictor lengths.json`, then
  `everlift up --set router.predictor=lengths.json`
- `everlift train-predictor lengths.json --keep monday.jsonl` also writes the training examples,
  without prompts, so that they outlive the requests in the ledger
- `everlift train-predictor lengths.json --examples monday.jsonl --examples tuesday.jsonl`
"""


def train_predictor(
    out: Annotated[
        Path, typer.Argument(metavar="FILE", help="File that routers load (router.predictor).")
    ],
    examples: Annotated[
        list[Path] | None,
        typer.Option(metavar="JSONL", help="File of examples. Repeatable. Default: the ledger."),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="JSONL", help="File to which the examples are written, without prompts."
        ),
    ] = None,
    limit: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Number of requests to read from the ledger, newest first."
        ),
    ] = 50_000,
    ledger: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="URL of the ledger. Default: the configured one, or the one on this machine.",
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="Settings in YAML.")
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any setting, e.g. model=org/name."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train a predictor of output lengths and report its accuracy.

    Routers load a new file within two seconds.
    """
    from cluster.prediction.report import table
    from cluster.prediction.run import train

    loaded = configuration.load(config, os.environ, assignments or ())
    report = asyncio.run(train(loaded, out, keep, examples or (), ledger, limit))
    if as_json:
        typer.echo(json.dumps(report.plain()))
    else:
        Console(highlight=False, markup=False).print(table(report))
