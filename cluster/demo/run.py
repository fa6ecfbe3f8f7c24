"""Run of the demo: a load, a kill in the middle, and a comparison of the received outputs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from rich.console import Console
from rich.live import Live
from rich.table import Table

from cluster.demo.load import Load, Percentiles, Summary, Task
from cluster.demo.picture import Occupancy, draw
from cluster.demo.view import show
from cluster.errors import ClusterFailed
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import inference_pb2_grpc
from router.console.rates import Rates

_REFRESH_S = 0.1
#: A worker is killed when this share of all expected characters has arrived.
_KILL_AT = 0.3


@dataclass
class _Scene:
    occupancy: Occupancy = field(default_factory=Occupancy)
    rates: Rates = field(default_factory=Rates)
    killed: str = ""
    killed_at: float = 0.0
    note: str = "one of the two workers will be killed in the middle"
    kills: bool = True


async def run(address: str, tasks: Sequence[Task], picture: Path, console: Console) -> Summary:
    """Run the demo on the cluster at ``address``, write the picture and return the summary.

    If a task has no expected text, an undisturbed run of all tasks comes first, and its outputs
    become the expected ones. Raises ClusterFailed if a request of that run is not answered.
    """
    if any(task.expected is None for task in tasks):
        calm = _Scene(note="an undisturbed run, to compare with", kills=False)
        tasks = _finished_tasks(await _run(address, tasks, calm, console))
    scene = _Scene()
    load = await _run(address, tasks, scene, console)
    draw(scene.occupancy, scene.killed, scene.killed_at, picture)
    return load.summary()


def _finished_tasks(load: Load) -> list[Task]:
    for transcript in load.transcripts:
        if not transcript.finished:
            raise ClusterFailed(f"a request was not answered: {transcript.error}")
    return [transcript.as_task() for transcript in load.transcripts]


async def _run(address: str, tasks: Sequence[Task], scene: _Scene, console: Console) -> Load:
    load = Load(address, tasks)
    async with grpc.aio.insecure_channel(address) as channel:
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        work = asyncio.create_task(load.run())
        try:
            await _watch(stub, load, scene, work, console)
        finally:
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work
    return load


async def _watch(
    stub: inference_pb2_grpc.InferenceAsyncStub,
    load: Load,
    scene: _Scene,
    work: asyncio.Task[None],
    console: Console,
) -> None:
    with Live(console=console, refresh_per_second=8) as live:
        while True:
            status = await stub.GetStatus(pb.GetStatusRequest())
            now = time.monotonic() - load.started_at
            scene.occupancy.snapshot(now, _running(status))
            if scene.kills and not scene.killed and _has_reached_kill_point(load):
                _kill_busiest_worker(status, scene, now)
            live.update(show(status, load, scene.rates, now, scene.note))
            if work.done():
                return
            await asyncio.sleep(_REFRESH_S)


def _running(status: pb.GetStatusResponse) -> dict[tuple[str, int], str]:
    return {
        (worker.worker_id, sequence.slot): sequence.request_id
        for worker in status.workers
        if worker.alive
        for sequence in worker.running
    }


def _has_reached_kill_point(load: Load) -> bool:
    expected = sum(len(t.task.expected or "") for t in load.transcripts)
    return sum(len(t.text) for t in load.transcripts) >= _KILL_AT * expected


def _kill_busiest_worker(status: pb.GetStatusResponse, scene: _Scene, now: float) -> None:
    victim = max((w for w in status.workers if w.alive), key=lambda w: w.num_running)
    os.kill(victim.pid, signal.SIGKILL)
    scene.killed, scene.killed_at = victim.worker_id, now
    scene.note = (
        f"worker {scene.killed[:8]} (process {victim.pid}, {victim.num_running} running) was "
        f"killed after {now:.1f} s: its requests continue on the other worker"
    )


def describe(summary: Summary) -> Table:
    """Return the summary as a table for people."""
    table = Table("what", "value", title="everlift demo", title_justify="left")
    rows = [
        ("requests", f"{summary['completed']} of {summary['requests']} complete"),
        ("identical", f"{summary['identical']} of {summary['requests']}"),
        ("output tokens", str(summary["output_tokens"])),
        ("output tokens/s", f"{summary['output_tokens_per_s']:.0f}"),
        ("time to first token", _milliseconds(summary["ttft_ms"])),
        ("time between tokens", _milliseconds(summary["inter_token_ms"])),
        ("requests migrated", str(summary["migrated"])),
        ("tokens lost", str(summary["tokens_lost"])),
        ("tokens repeated", str(summary["tokens_repeated"])),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _milliseconds(percentiles: Percentiles) -> str:
    p50, p99 = percentiles["p50"], percentiles["p99"]
    return "-" if p50 is None or p99 is None else f"p50 {p50:.1f} ms, p99 {p99:.1f} ms"
