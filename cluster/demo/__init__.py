"""`everlift demo`: a local cluster that loses a worker but no token."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from cluster.commands.up import on_signal
from cluster.config import DEMO_MODEL, Config
from cluster.demo.load import Summary, Task
from cluster.local.processes import ProcessCluster
from cluster.ray.ray_cluster import RayCluster
from everlift import logs
from router.config import RouterConfig
from worker.config import WorkerConfig

#: Name of the bundled demo model, which solves only the tasks in ``cluster.demo.tasks``.
COUNTING_MODEL = "demo"
REQUESTS = 32
_SEED = 1
_SLOTS = 16


async def demonstrate(model: str, picture: Path, console: Console, *, with_ray: bool) -> Summary:
    """Run the demo on a temporary cluster, print the summary and return it.

    The demo sends requests, kills a worker while they run, and compares the received outputs with
    the expected ones. The expected outputs of a model other than COUNTING_MODEL are those of a
    preceding run of the same requests without a kill (the undisturbed run).

    The cluster and its state directory are removed at the end; only the file ``picture`` is kept.

    Args:
        model: COUNTING_MODEL, or the id or directory of a model with a chat template.
        picture: File to which the picture of the batch slots is written.
        console: Terminal for the live view and the summary.
        with_ray: Run the cluster under Ray Serve instead of in plain processes.

    Raises:
        CancelledError: The process received SIGINT or SIGTERM.
        ModelUnavailable: The model cannot be loaded.
        NoChatTemplate: The model has no chat template.
        ClusterFailed: The cluster did not start, or did not answer a request of the undisturbed
            run.
        LedgerSetupError, SettingsError: The cluster did not start.
        OSError: The cluster did not start, or the picture cannot be written.
        grpc.aio.AioRpcError: The router did not answer a call for the status or a stored request.
    """
    from cluster.demo.run import describe, run

    task = asyncio.current_task()
    assert task is not None
    on_signal(task.cancel)
    tasks = await _tasks(model)
    with tempfile.TemporaryDirectory(prefix="everlift-demo-") as scratch:
        config = _config(model, Path(scratch))
        logs.configure("demo", config.log_level, config.state_dir / "demo.log")
        cluster = RayCluster(config) if with_ray else ProcessCluster(config, revive=True)
        with console.status("starting a ledger, a router and two workers"):
            await cluster.start()
        # Ray installs its own SIGTERM handler when it starts, so this one is installed again.
        on_signal(task.cancel)
        try:
            summary = await run(cluster.address, tasks, picture, console)
        finally:
            with console.status("stopping"):
                await cluster.stop()
    console.print()
    console.print(describe(summary))
    console.print(f"batch slots over time: {escape(str(picture.absolute()))}", soft_wrap=True)
    return summary


async def _tasks(model: str) -> list[Task]:
    # Only the modules of the chosen kind are imported, because the imports take a moment.
    if model == COUNTING_MODEL:
        from cluster.demo.prompts import counting_tasks

        return counting_tasks(REQUESTS, _SEED)
    from cluster.demo.chats import chat_tasks

    return await chat_tasks(model, REQUESTS)


def _config(model: str, scratch: Path) -> Config:
    """Return the demo's configuration.

    Each of the two workers has fewer slots than there are requests. Requests therefore wait after
    the demo has killed one worker. The data type is fp32, so that the texts do not depend on which
    requests share a batch.
    """
    return Config(
        model=str(DEMO_MODEL) if model == COUNTING_MODEL else model,
        num_workers=2,
        state_dir=scratch,
        router=RouterConfig(port=0, http_port=0, drain=1.0),
        worker=WorkerConfig(model="", max_num_seqs=_SLOTS, num_blocks=512, dtype="float32"),
    )
