"""Commands of ``everlift bench``: send a load to an endpoint, and compare two reports."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cluster.bench import options
from cluster.bench.generator import TIMEOUT_S
from cluster.bench.load import INPUT_TOKENS, OUTPUT_TOKENS, Load
from cluster.bench.options import DEFAULT_PERCENTILES
from cluster.bench.report import Json, Setting, Slo, ramp_report, report, slo
from cluster.bench.run import SendOptions, ready
from cluster.bench.target import Target
from cluster.connection import Address
from cluster.errors import BenchFailed
from cluster.simulator.workloads import options as workloads

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Send a load to an endpoint and report latencies.",
)

_SERVE_EXAMPLES = """
Each request is sent at its due time, even if earlier requests are unfinished. Latencies are
measured from the due time.

**Examples**

- `everlift bench serve --rate 20 --duration 60 --html report.html`
- `everlift bench serve --url http://127.0.0.1:8000/v1 --chat --rate 5 --json a.json`
- `everlift bench serve --trace conv.csv --to 600 --speed 4 --goodput "ttft:500 tpot:50"`
- `everlift bench serve --ramp 1:64 --duration 30 --goodput ttft:500`
- `everlift bench serve --concurrency 32 --requests 500`
"""


@app.command(epilog=_SERVE_EXAMPLES)
def serve(
    url: options.Url = None,
    address: Address = None,
    chat: options.Chat = False,
    model: options.Model = None,
    api_key: options.ApiKey = None,
    ignore_eos: options.IgnoreEos = True,
    temperature: options.Temperature = 0.0,
    extra_body: options.ExtraBody = None,
    tokenizer: options.TokenizerFile = None,
    workload: workloads.Workloads = None,
    trace: workloads.TraceFile = None,
    begin: workloads.Begin = 0.0,
    end: workloads.End = None,
    speed: workloads.Speed = 1.0,
    steady: workloads.Steady = False,
    input_tokens: options.InputTokens = INPUT_TOKENS,
    output_tokens: options.OutputTokens = OUTPUT_TOKENS,
    longest_input: options.LongestInput = None,
    longest_output: options.LongestOutput = None,
    requests: options.Number = None,
    seed: workloads.Seed = 0,
    rate: options.Rate = None,
    burstiness: options.Burstiness = 1.0,
    duration: options.Duration = None,
    ramp: options.RampText = None,
    concurrency: options.Concurrency = None,
    warm_up: options.WarmUp = 4,
    timeout: options.Timeout = TIMEOUT_S,
    goodput: options.Goodput = None,
    percentiles: options.Percentiles = DEFAULT_PERCENTILES,
    json_file: options.JsonFile = None,
    html_file: options.HtmlFile = None,
    detailed: options.Detailed = False,
    label: options.Label = "",
) -> None:
    """Send a load to an endpoint, and report latencies and throughput."""
    # Imported here because other commands do not need these modules, aiohttp and numpy.
    import uvloop

    from cluster.bench.run import SendOptions
    from cluster.bench.target import Target, load_tokenizer

    climb = _ramp(ramp, rate, duration)
    config = BenchConfig(
        target=Target(
            url=url,
            address=address,
            is_chat=chat,
            model=model,
            api_key=api_key,
            ignore_eos=ignore_eos,
            temperature=temperature,
            fields=_fields(extra_body),
        ),
        load=Load(
            workloads=workload,
            trace=trace,
            begin_s=begin,
            end_s=end,
            speed=speed,
            is_steady=steady,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            longest_input=longest_input,
            longest_output=longest_output,
            rate=climb[0] if climb else rate,
            burstiness=burstiness,
            requests=requests,
            duration_s=duration,
            seed=seed,
        ),
        send_options=SendOptions(
            concurrency=concurrency,
            warm_up=warm_up,
            timeout_s=timeout,
            tokenizer=load_tokenizer(tokenizer) if tokenizer else None,
            is_shown=sys.stderr.isatty(),
        ),
        slo=slo(goodput or ()),
        percents=_percents(percentiles),
        ramp=climb,
        label=label,
        tokenizer=tokenizer.name if tokenizer else None,
        is_detailed=detailed,
    )
    found = uvloop.run(run_bench(config, datetime.now()))
    _show(found, json_file, html_file)
    if not found["completed"]:
        raise typer.Exit(1)


_COMPARE_EXAMPLES = """
Settings that differ are listed, because figures under different loads cannot be compared.

**Examples**

- `everlift bench compare before.json after.json`
- `everlift bench compare vllm.json everlift.json --html compared.html`
"""


@app.command(epilog=_COMPARE_EXAMPLES)
def compare(
    a: Annotated[
        Path,
        typer.Argument(
            metavar="A.json", help="Report of `everlift bench serve` or `vllm bench serve`."
        ),
    ],
    b: Annotated[Path, typer.Argument(metavar="B.json", help="Report to compare with.")],
    html_file: options.HtmlFile = None,
) -> None:
    """Show two reports side by side, with the ratios of their figures."""
    from cluster.bench import comparison, page, report, tables

    of_a, of_b = report.read(a), report.read(b)
    found = comparison.compare(of_a, of_b)
    console = Console(highlight=False, markup=False)
    console.print(tables.comparison_table(found))
    for warning in found.warnings:
        console.print(f"note: {warning}", style="yellow", soft_wrap=True)
    if html_file is not None:
        _write_page(page.comparison_page(of_a, of_b, found), html_file)


def _show(found: dict[str, Any], json_file: Path | None, html_file: Path | None) -> None:
    from cluster.bench import page, report, tables

    console = Console(highlight=False, markup=False)
    for table in tables.tables(found):
        console.print(table)
    if json_file is not None:
        report.write(found, json_file)
    if html_file is not None:
        _write_page(page.report_page(found), html_file)


def _write_page(text: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    typer.echo(f"written: {path}")


def _fields(text: str | None) -> dict[str, object]:
    try:
        found = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise BenchFailed("--extra-body must be a JSON object")
    return found


def _percents(text: str) -> tuple[float, ...]:
    try:
        found = sorted({float(each) for each in text.split(",")})
    except ValueError:
        found = []
    if not found or not 0 <= found[0] <= found[-1] <= 100:
        raise BenchFailed(
            f"--percentiles {text}: must be numbers from 0 to 100, such as 50,90,99.9"
        )
    return tuple(found)


def _ramp(
    text: str | None, rate: float | None, duration: float | None
) -> tuple[float, float] | None:
    if text is None:
        return None
    if rate is not None or duration is None:
        raise BenchFailed("--ramp needs --duration (of each stage) and excludes --rate")
    try:
        first, most = map(float, text.split(":"))
    except ValueError:
        first = most = 0.0
    if not 0 < first <= most or not isfinite(most):
        raise BenchFailed(f"--ramp {text}: must be two rates, the lower one first, such as 1:64")
    return first, most


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """Requested load, and options of its report.

    ``ramp`` has the first and the highest rate in requests per second. If it is None, the load is
    sent once, without a search for the highest rate. ``percents`` are the percentiles to report.
    """

    target: Target
    load: Load
    send_options: SendOptions
    slo: Slo
    percents: Sequence[float]
    ramp: tuple[float, float] | None = None
    label: str = ""
    tokenizer: str | None = None
    is_detailed: bool = False


async def run_bench(config: BenchConfig, now: datetime) -> Json:
    """Send the load and return its report, which bears the date ``now``.

    Raises BenchFailed if the load cannot be sent, WorkloadFailed if its requests cannot be created,
    and EverliftError or SettingsError if a cluster cannot be connected.
    """
    async with ready(config.target, config.load, config.send_options) as run:
        setting = _setting(config, run.model, now)
        if config.ramp is None:
            result = await run.send(config.load)
            return report(setting, result, is_detailed=config.is_detailed)
        stages = await run.climb(config.load, *config.ramp, config.slo)
        return ramp_report(setting, stages, is_detailed=config.is_detailed)


def _setting(config: BenchConfig, model: str, now: datetime) -> Setting:
    target, load = config.target, config.load
    return Setting(
        date=now.strftime("%Y%m%d-%H%M%S"),
        label=config.label,
        backend=target.backend,
        endpoint_address=target.endpoint_address,
        model=model,
        tokenizer=config.tokenizer,
        rate=load.rate,
        burstiness=load.burstiness,
        concurrency=config.send_options.concurrency,
        load=_described(load, config),
        slo=config.slo,
        percents=config.percents,
    )


def _described(load: Load, config: BenchConfig) -> Mapping[str, object]:
    has_own_lengths = load.workloads or load.trace
    found = {
        "workload": ", ".join(load.workloads) if load.workloads else None,
        "trace": load.trace.name if load.trace else None,
        "from": load.begin_s or None,
        "to": load.end_s,
        "speed": load.speed if load.trace else None,
        "steady": load.is_steady or None,
        "input tokens": None if has_own_lengths else load.input_tokens,
        "output tokens": None if has_own_lengths else load.output_tokens,
        "longest input": load.longest_input,
        "longest output": load.longest_output,
        "duration, s": load.duration_s,
        "ramp": ":".join(f"{rate:g}" for rate in config.ramp) if config.ramp else None,
        "seed": load.seed,
        "ignore_eos": config.target.ignore_eos,
        "temperature": config.target.temperature,
        "fields": ", ".join(config.target.fields) or None,
        "warm-up": config.send_options.warm_up,
    }
    return {name: value for name, value in found.items() if value is not None}
