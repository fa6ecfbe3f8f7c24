"""Command line ``everlift``. Modules that only one command needs are imported by that command."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape

from cluster import config as configuration
from cluster import picture_file
from cluster.access import keys, tenants
from cluster.batch import command as batching
from cluster.bench import command as benching
from cluster.chaos import command as chaos
from cluster.commands import (
    adapter,
    capacity_view,
    chat,
    download,
    generate,
    measure,
    plan,
    policy,
    replay,
    requests,
    simulate,
    tokens,
)
from cluster.commands.model_change import ModelChange
from cluster.commands.status_view import show
from cluster.connection import Address, connected
from cluster.errors import (
    BatchFailed,
    BenchFailed,
    ClusterFailed,
    ForecastFailed,
    VerificationFailed,
    WorkloadFailed,
)
from cluster.explain import command as explaining
from cluster.prediction import command as predicting
from cluster.verify import command as verifying
from everlift import AsyncClient, EverliftError, Stream
from everlift.errors import SettingsError
from everlift.explanation import state_name
from router.console.rates import Rates
from router.ledger.config import URL_VARIABLE, LedgerSetupError

_REFRESH_S = 0.5
_POLL_S = 0.1
#: Errors that the caller can act on. Any other error is a bug and is shown with its traceback.
_EXPLAINED = (
    EverliftError,
    SettingsError,
    LedgerSetupError,
    ClusterFailed,
    BatchFailed,
    BenchFailed,
    WorkloadFailed,
    ForecastFailed,
    VerificationFailed,
    OSError,
)

#: Headings under which the help groups the commands.
_SERVE, _ASK, _LOOK = "Serve", "Ask", "Look"
_OPERATE, _FORECAST, _BENCH = "Operate", "Forecast", "Bench"


class _Commands(typer.core.TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except _EXPLAINED as error:
            Console(stderr=True).print(f"[red]error:[/] {escape(str(error))}", soft_wrap=True)
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"everlift {version('everlift')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_show_version, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Serve large language models on a cluster; no request is lost."""


SettingsFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="Settings in YAML.")
]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any setting, e.g. router.port=0."),
]
RequestId = Annotated[str, typer.Argument(metavar="ID", help="Request id.")]


@app.command(
    rich_help_panel=_SERVE,
    epilog="""
**Examples**

- `everlift up` serves the demo model
- `everlift up --model smollm2` serves a small assistant
- `everlift up --model ~/models/qwen3-4b-q8_0.gguf`
- `everlift up --model ~/models/llama --workers 2 --tensor-parallel 2`
- `everlift up --model Qwen/Qwen3-0.6B` downloads the model, then serves it
- `everlift up --no-ray --set router.port=0 --set ledger.url=redis://10.0.0.5`
- `EVERLIFT_WORKER__MAX_NUM_SEQS=64 everlift up --config cluster.yaml`
""",
)
def up(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help='Hugging Face directory, GGUF file, hub id (org/name), "smollm2" or "fake". '
            "Default: the bundled demo model.",
        ),
    ] = None,
    model_revision: Annotated[
        str | None, typer.Option(metavar="REV", help="Branch, tag or commit of a hub id.")
    ] = None,
    load_format: Annotated[
        str | None,
        typer.Option(metavar="FORMAT", help="Weights: auto, or dummy for pseudo-random ones."),
    ] = None,
    workers: Annotated[int | None, typer.Option(metavar="N", help="Number of workers.")] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option(metavar="N", help="Number of ranks (GPUs) of each worker.")
    ] = None,
    no_ray: Annotated[
        bool, typer.Option("--no-ray", help="Use plain processes instead of Ray.")
    ] = False,
    chaos: Annotated[bool, typer.Option("--chaos", help="Allow `everlift chaos`.")] = False,
    config: SettingsFile = None,
    assignments: Assignments = None,
) -> None:
    """Serve on this machine until Ctrl-C."""
    from cluster.commands import up

    worker = _without_none(tensor_parallel=tensor_parallel, load_format=load_format)
    options = _without_none(
        model=model,
        model_revision=model_revision,
        num_workers=workers,
        chaos=chaos or None,
        worker=worker or None,
    )
    loaded = configuration.load(config, os.environ, assignments or (), options)
    asyncio.run(up.serve(loaded, Console(highlight=False), with_ray=not no_ray))


@app.command(
    rich_help_panel=_SERVE,
    epilog="""
**Examples**

- `everlift build --config cluster.yaml > serve.yaml`, then `serve deploy serve.yaml`
- `everlift build --set worker.device=cuda --set autoscale.max_workers=8 > serve.yaml`
""",
)
def build(
    config: SettingsFile = None,
    assignments: Assignments = None,
) -> None:
    """Write the settings as a file that Ray Serve deploys."""
    from cluster.ray.build import serve_yaml

    # The ledger's URL contains a password. It belongs in the cluster's environment, not in a file.
    environ = {name: value for name, value in os.environ.items() if name != URL_VARIABLE}
    typer.echo(serve_yaml(configuration.load(config, environ, assignments or ())), nl=False)


@app.command(
    rich_help_panel=_SERVE,
    epilog="""
**Examples**

- `everlift doctor`
- `everlift doctor --config cluster.yaml --set ray_address=auto` also checks every node
""",
)
def doctor(
    config: SettingsFile = None,
    assignments: Assignments = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this machine or a cluster, and suggest how to fix problems."""
    from cluster.doctor import command as doctoring

    findings = doctoring.examine(configuration.load(config, os.environ, assignments or ()))
    if as_json:
        typer.echo(json.dumps(doctoring.as_json(findings), indent=2))
    else:
        doctoring.show(findings, Console(highlight=False))
    if doctoring.has_errors(findings):
        raise typer.Exit(1)


@app.command(rich_help_panel=_SERVE, epilog="**Example:** `everlift ledger --listen 10.0.0.4:6379`")
def ledger(
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address that other machines connect to.")
    ],
    config: SettingsFile = None,
    assignments: Assignments = None,
) -> None:
    """Run the ledger's server alone, for a cluster on several machines, until Ctrl-C."""
    from cluster.commands import ledger

    loaded = configuration.load(config, os.environ, assignments or ())
    listen_address = ledger.parse(listen)
    asyncio.run(ledger.serve(loaded, listen_address, Console(highlight=False, markup=False)))


app.command(epilog=download.EXAMPLES, rich_help_panel=_SERVE)(download.download)
app.command(epilog=generate.EXAMPLES, rich_help_panel=_ASK)(generate.generate)
app.command(epilog=chat.EXAMPLES, rich_help_panel=_ASK)(chat.chat)
app.command(epilog=batching.EXAMPLES, rich_help_panel=_ASK)(batching.batch)
app.command(epilog=requests.EXAMPLES, rich_help_panel=_LOOK)(requests.requests)
app.command(epilog=explaining.EXAMPLES, rich_help_panel=_LOOK)(explaining.explain)
app.command(epilog=policy.EXAMPLES, rich_help_panel=_OPERATE)(policy.policy)
app.command(epilog=predicting.EXAMPLES, rich_help_panel=_OPERATE)(predicting.train_predictor)
app.command(epilog=tokens.MODELS_EXAMPLES, rich_help_panel=_ASK)(tokens.models)
app.command(epilog=tokens.TOKENIZE_EXAMPLES, rich_help_panel=_ASK)(tokens.tokenize)
app.command(epilog=tokens.DETOKENIZE_EXAMPLES, rich_help_panel=_ASK)(tokens.detokenize)
app.command(epilog=simulate.EXAMPLES, rich_help_panel=_FORECAST)(simulate.simulate)
app.command(epilog=measure.EXAMPLES, rich_help_panel=_FORECAST)(measure.measure)
app.command(epilog=plan.EXAMPLES, rich_help_panel=_FORECAST)(plan.plan)
app.command(epilog=replay.EXAMPLES, rich_help_panel=_FORECAST)(replay.replay)
app.command(epilog=verifying.EXAMPLES, rich_help_panel=_BENCH)(verifying.verify)
app.add_typer(adapter.app, name="adapter", rich_help_panel=_OPERATE)
app.add_typer(benching.app, name="bench", rich_help_panel=_BENCH)
app.add_typer(chaos.app, name="chaos", rich_help_panel=_OPERATE)
app.add_typer(keys.app, name="key", rich_help_panel=_OPERATE)
app.add_typer(tenants.app, name="tenant", rich_help_panel=_OPERATE)


@app.command(rich_help_panel=_ASK, epilog="**Example:** `everlift attach 3f2a… --from-offset 100`")
def attach(
    request_id: RequestId,
    from_offset: Annotated[int, typer.Option(help="Offset of the first token to show.")] = 0,
    address: Address = None,
) -> None:
    """Stream an existing request. Ctrl-C disconnects without cancelling it."""
    asyncio.run(_attach(address, request_id, from_offset))


@app.command(rich_help_panel=_ASK, epilog="**Example:** `everlift cancel 3f2a…`")
def cancel(request_id: RequestId, address: Address = None) -> None:
    """Cancel a request."""
    asyncio.run(_cancel(address, request_id))


@app.command(rich_help_panel=_ASK, epilog="**Example:** `everlift forget 3f2a…`")
def forget(request_id: RequestId, address: Address = None) -> None:
    """Erase a request, its prompt and its outputs."""
    asyncio.run(_forget(address, request_id))


@app.command(
    rich_help_panel=_LOOK,
    epilog="""
**Columns** since the worker's start

- **budget:** largest number of tokens in a step (a setting)
- **busy:** share of the batch slots that were in use
- **hits:** share of prompt tokens found in the prefix cache
- **drafts:** share of draft tokens that were accepted
- **KV empty:** share of the used KV blocks that is empty, now
- **recomputed:** tokens computed again, for example after preemption
- **swapped:** KV blocks copied to host memory / back

**Example:** `everlift status --watch`
""",
)
def status(
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C.")] = False,
    address: Address = None,
) -> None:
    """Show workers, queue and requests."""
    asyncio.run(_watch(address) if watch else _status(address))


@app.command(rich_help_panel=_LOOK, epilog="**Example:** `everlift capacity --json`")
def capacity(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    address: Address = None,
) -> None:
    """Show capacity, use and the estimated queue wait."""
    asyncio.run(_capacity(address, as_json))


@app.command(
    "change-model",
    rich_help_panel=_OPERATE,
    epilog="**Example:** `everlift change-model 3f2a Qwen/Qwen3-4B --wait`",
)
def change_model(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Worker id or a unique prefix.")],
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name of a model of the cluster.")],
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the worker has joined with the model.")
    ] = False,
    address: Address = None,
) -> None:
    """Make a worker serve another model; its requests resume on other workers."""
    asyncio.run(_change_model(address, worker, model, wait))


@app.command(rich_help_panel=_OPERATE, epilog="**Example:** `everlift drain 3f2a --wait`")
def drain(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Worker id or a unique prefix.")],
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the worker has no request left.")
    ] = False,
    address: Address = None,
) -> None:
    """Drain a worker: its requests resume on other workers, and it accepts no new ones."""
    asyncio.run(_drain(address, worker, wait))


@app.command(
    rich_help_panel=_SERVE,
    epilog="""
**Examples**

- `everlift demo`
- `everlift demo --model demo` uses the bundled demo model
- `everlift demo --no-ray --json summary.json --picture slots.png`
""",
)
def demo(
    model: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help='Any value of `everlift up --model` with a chat template, or "demo".',
        ),
    ] = "smollm2",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="File for the summary as JSON.")
    ] = None,
    picture: Annotated[
        Path, typer.Option(metavar="FILE", help="File for a picture of the batch slots over time.")
    ] = Path("everlift-demo.png"),
    no_ray: Annotated[
        bool, typer.Option("--no-ray", help="Use plain processes instead of Ray.")
    ] = False,
) -> None:
    """Start a cluster, kill a worker under load, and compare outputs with the expected ones."""
    from cluster.demo import demonstrate

    picture_file.check("--picture", picture)
    try:
        console = Console(highlight=False)
        summary = asyncio.run(demonstrate(model, picture, console, with_ray=not no_ray))
    except asyncio.CancelledError:
        raise typer.Abort() from None
    if json_file is not None:
        json_file.write_text(json.dumps(summary, indent=2) + "\n")


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Characters that the terminal's encoding lacks are shown as question marks.
            stream.reconfigure(errors="replace")
    app()


async def _attach(address: str | None, request_id: str, from_offset: int) -> None:
    async with connected(address) as client, client.attach(request_id, from_offset) as stream:
        await _print(stream)


async def _print(stream: Stream) -> None:
    async for chunk in stream:
        typer.echo(chunk.text, nl=False)
    typer.echo()
    console = Console(stderr=True, highlight=False)
    if console.is_terminal and stream.usage is not None and stream.finish_reason is not None:
        console.print(
            f"[dim]{stream.usage.output_tokens} tokens, {stream.finish_reason.name.lower()}, "
            f"request {escape(stream.request_id)}[/]"
        )


async def _cancel(address: str | None, request_id: str) -> None:
    async with connected(address) as client:
        response = await client.cancel(request_id)
    typer.echo(state_name(response.state))


async def _forget(address: str | None, request_id: str) -> None:
    async with connected(address) as client:
        await client.forget(request_id)
    typer.echo("forgotten")


async def _drain(address: str | None, worker: str, wait: bool) -> None:
    async with connected(address) as client:
        answer = await client.drain(worker)
        typer.echo(f"{answer.worker_id} is draining: it returns {answer.num_running} sequences")
        if wait:
            while await _has_work(client, answer.worker_id):
                await asyncio.sleep(_POLL_S)
            typer.echo(f"{answer.worker_id} has no requests left")


async def _change_model(address: str | None, worker: str, model: str, wait: bool) -> None:
    async with connected(address) as client:
        before = (await client.status()).workers
        answer = await client.change_model(worker, model)
        typer.echo(
            f"{answer.worker_id} changes to {answer.model}: it returns {answer.num_running} "
            "sequences"
        )
        if not wait:
            return
        changing = next(it for it in before if it.worker_id == answer.worker_id)
        known = frozenset(it.worker_id for it in before)
        change = ModelChange(changing, answer.model, known)
        while not (joined := change.joined(await client.status())):
            await asyncio.sleep(_POLL_S)
        typer.echo(f"joined as {joined}")


async def _capacity(address: str | None, as_json: bool) -> None:
    async with connected(address) as client:
        answer = await client.capacity()
    if as_json:
        typer.echo(json.dumps(capacity_view.as_json(answer)))
    else:
        Console(highlight=False, markup=False).print(capacity_view.show(answer))


async def _has_work(client: AsyncClient, worker_id: str) -> bool:
    workers = {each.worker_id: each for each in (await client.status()).workers if each.alive}
    worker = workers.get(worker_id)
    if worker is None:
        return False
    return not worker.draining or worker.num_running + worker.num_waiting > 0


async def _status(address: str | None) -> None:
    async with connected(address) as client:
        Console().print(show(await client.status()))


async def _watch(address: str | None) -> None:
    rates = Rates()
    async with connected(address) as client:
        with Live(console=Console()) as live:
            while True:
                live.update(show(await client.status(), rates, time.monotonic()))
                await asyncio.sleep(_REFRESH_S)


def _without_none(**options: object) -> dict[str, object]:
    return {name: value for name, value in options.items() if value is not None}


if __name__ == "__main__":
    main()
