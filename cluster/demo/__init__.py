"""`everlift demo`: a cluster on this machine that loses a worker and no token."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from cluster.commands.up import on_signal
from cluster.config import DEMO_MODEL, Config
from cluster.demo.load import Summary
from cluster.local.processes import ProcessCluster
from cluster.ray.ray_cluster import RayCluster
from everlift import logs
from router.config import RouterConfig
from worker.config import WorkerConfig

_SLOTS = 16


async def demonstrate(picture: Path, console: Console, *, with_ray: bool) -> Summary:
    """Start a temporary cluster, show it at work, print the counts, and leave nothing behind.

    At SIGINT or SIGTERM it raises CancelledError.
    """
    from cluster.demo.run import describe, run

    task = asyncio.current_task()
    assert task is not None
    on_signal(task.cancel)
    with tempfile.TemporaryDirectory(prefix="everlift-demo-") as scratch:
        config = _config(Path(scratch))
        logs.configure("demo", config.log_level, config.state_dir / "demo.log")
        cluster = RayCluster(config) if with_ray else ProcessCluster(config, revive=True)
        with console.status("starting a ledger, a router and two workers"):
            await cluster.start()
        # Ray takes SIGTERM for itself when it starts.
        on_signal(task.cancel)
        try:
            summary = await run(cluster.address, picture, console)
        finally:
            with console.status("stopping"):
                await cluster.stop()
    console.print()
    console.print(describe(summary))
    console.print(
        f"who had which batch slot when: {escape(str(picture.absolute()))}", soft_wrap=True
    )
    return summary


def _config(scratch: Path) -> Config:
    """Return the demo's configuration.

    It has fewer slots than requests, so that some wait, and fp32, so that answers are exact.
    """
    return Config(
        model=str(DEMO_MODEL),
        num_workers=2,
        state_dir=scratch,
        router=RouterConfig(port=0, http_port=0, drain=1.0),
        worker=WorkerConfig(model="", max_num_seqs=_SLOTS, num_blocks=512, dtype="float32"),
    )
