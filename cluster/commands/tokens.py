"""Commands ``everlift models``, ``everlift tokenize`` and ``everlift detokenize``."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated

import typer
from google.protobuf.json_format import MessageToDict
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from cluster.connection import Address, connected

MODELS_EXAMPLES = "**Example:** `everlift models --json`"
TOKENIZE_EXAMPLES = """
**Examples**

- `everlift tokenize "12 + 30 ="`
- `everlift detokenize $(everlift tokenize "12 + 30 =")`
"""
DETOKENIZE_EXAMPLES = "**Example:** `everlift detokenize 18 301 7`"

_Model = Annotated[str, typer.Option("--model", help="Model name. Default: the served model.")]
_Json = Annotated[bool, typer.Option("--json", help="Write JSON.")]


def models(as_json: _Json = False, address: Address = None) -> None:
    """Show the models that are served."""
    asyncio.run(_models(address, as_json))


def tokenize(
    text: Annotated[str, typer.Argument(metavar="TEXT")],
    model: _Model = "",
    as_json: _Json = False,
    address: Address = None,
) -> None:
    """Show the token ids of a text."""
    asyncio.run(_tokenize(address, text, model, as_json))


def detokenize(
    token_ids: Annotated[list[int], typer.Argument(metavar="ID...", min=0)],
    model: _Model = "",
    as_json: _Json = False,
    address: Address = None,
) -> None:
    """Show the text of token ids."""
    asyncio.run(_detokenize(address, token_ids, model, as_json))


async def _models(address: str | None, as_json: bool) -> None:
    async with connected(address) as client:
        served = (await client.models()).models
    if as_json:
        shown = [MessageToDict(model, preserving_proto_field_name=True) for model in served]
        typer.echo(json.dumps(shown))
        return
    columns = ("model", "longest request, tokens", "vocabulary", "sampling defaults")
    table = Table(*columns, box=SIMPLE_HEAD)
    for model in served:
        defaults = [f"{it.name} {value:g}" for it, value in model.sampling_defaults.ListFields()]
        longest = str(model.max_model_len or "not known yet")
        name = f"{model.name} (adapter of {model.parent})" if model.parent else model.name
        table.add_row(name, longest, str(model.vocab_size), ", ".join(defaults))
    Console(highlight=False, markup=False).print(table)


async def _tokenize(address: str | None, text: str, model: str, as_json: bool) -> None:
    async with connected(address) as client:
        answer = await client.tokenize(text, model=model)
    ids = list(answer.token_ids)
    if as_json:
        typer.echo(json.dumps({"token_ids": ids, "max_model_len": answer.max_model_len}))
    else:
        typer.echo(" ".join(map(str, ids)))


async def _detokenize(address: str | None, token_ids: list[int], model: str, as_json: bool) -> None:
    async with connected(address) as client:
        answer = await client.detokenize(token_ids, model=model)
    typer.echo(json.dumps({"text": answer.text}) if as_json else answer.text)
