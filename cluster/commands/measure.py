"""Command ``everlift measure``: step times of this machine."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from cluster import config as configuration
from cluster.config import Config
from cluster.connection import Address, connected
from cluster.errors import ForecastFailed
from cluster.simulator import as_json
from cluster.simulator.hardware import learned
from cluster.threads import threads_per_rank, wait_passively
from everlift import logs

if TYPE_CHECKING:
    from cluster.simulator.hardware.fit import Fit, Step
    from worker.engine.engine import Engine

EXAMPLES = """
The command runs steps of known sizes with a worker's engine and fits a model of step times to them.
`everlift simulate` and `everlift plan` read the file. Keep the machine otherwise idle.

**Examples**

- `everlift measure --model ~/models/llama me.json`, then `everlift simulate --workers me.json=4`
- `everlift measure here.json --set worker.max_num_batched_tokens=256`
- `everlift measure ours.json --running` writes the step times that a running cluster has learned
"""


def measure(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="File for the step times, NAME.json.")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Any value of `everlift up --model`. Default: the demo model."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="Settings in YAML.")
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Setting of a worker."),
    ] = None,
    running: Annotated[
        bool,
        typer.Option(
            "--running",
            help="Write the step times that a running cluster has learned, instead of measuring.",
        ),
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Device of the workers, with --running."),
    ] = None,
    address: Address = None,
) -> None:
    """Measure the step times of this machine for the simulator."""
    if file.suffix != ".json":
        raise ForecastFailed(f"{file}: the file name must end with .json")
    if running:
        if model or config or assignments:
            raise ForecastFailed("--running excludes --model, --config and --set")
        asyncio.run(_write_learned(file, device, address))
    else:
        _measure(file, model, config, assignments or ())


async def _write_learned(file: Path, device: str | None, address: str | None) -> None:
    async with connected(address) as client:
        kind = learned.only((await client.capacity()).kinds, device)
    as_json.write(learned.content(kind), file)
    step = kind.step_time
    error = f"; recent error {step.error:.1%}" if step.HasField("error") else ""
    typer.echo(f"{file}: step times that {kind.workers} workers have learned{error}")


def _measure(
    file: Path, model: str | None, config: Path | None, assignments: Sequence[str]
) -> None:
    from cluster.simulator.hardware.fit import fitted
    from cluster.simulator.measurement import Measurement

    options = {} if model is None else {"model": model}
    loaded = configuration.load(config, os.environ, assignments, options)
    if loaded.worker.is_fake:
        raise ForecastFailed("the fake runner cannot be measured: worker.fake sets its step times")
    if loaded.worker.tensor_parallel > 1:
        raise ForecastFailed("worker.tensor_parallel must be 1: only one rank can be measured")
    console = Console(highlight=False, markup=False)
    with _engine(loaded) as engine:
        measurement, started_at = Measurement(engine), time.monotonic()
        steps: list[Step] = []
        for step in measurement.steps():
            steps.append(step)
            remaining_s = (time.monotonic() - started_at) * (len(measurement) / len(steps) - 1)
            progress = f"{len(steps):3}/{len(measurement)}"
            console.print(f"{progress}  {_line(step)}  {remaining_s:4.0f} s left", soft_wrap=True)
        worker = _worker(engine)
    fit = fitted(steps)
    as_json.write(_as_json(loaded, worker, steps, fit), file)
    console.print(
        f"{file}: fitted step times, with a mean error of {fit.mean_error:.1%} and a largest error "
        f"of {fit.largest_error:.0%}",
        soft_wrap=True,
    )


@contextmanager
def _engine(config: Config) -> Iterator[Engine]:
    wait_passively()
    # Imported only after ``wait_passively`` has set OpenMP's environment variables, which are read
    # when torch is imported.
    from cluster.model import fetched
    from worker.engine.engine import Engine
    from worker.engine.limits import Limits
    from worker.parallel.group import Group
    from worker.runner.build import build_runner

    logs.configure("measure", config.log_level, config.state_dir / "logs" / "measure.log")
    config = asyncio.run(fetched(config.single_worker()))
    [group] = config.groups
    threads = threads_per_rank([group], group, len(os.sched_getaffinity(0)))
    worker = replace(config.worker, num_threads=threads)
    try:
        runner = build_runner(worker, Group.single())
    except ValueError as error:
        raise ForecastFailed(str(error)) from error
    try:
        yield Engine(runner, Limits.of(worker, runner))
    finally:
        runner.close()


def _worker(engine: Engine) -> Mapping[str, object]:
    limits = engine.limits
    return {
        "num_blocks": limits.num_blocks,
        "max_model_len": limits.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
    }


def _as_json(
    config: Config, worker: Mapping[str, object], steps: Sequence[Step], fit: Fit
) -> dict[str, object]:
    return {
        "step_time": asdict(fit.roofline),
        "worker": worker,
        "measured": {
            "model": config.worker.name,
            "mean_error": fit.mean_error,
            "largest_error": fit.largest_error,
            "steps": [{**step.size._asdict(), "seconds": step.seconds} for step in steps],
        },
    }


def _line(step: Step) -> str:
    size = step.size
    return (
        f"{size.num_rows:4.0f} rows {size.num_tokens:6.0f} tokens {size.kv_tokens:8.0f} in the "
        f"cache  {step.seconds * 1e3:9.3f} ms"
    )
