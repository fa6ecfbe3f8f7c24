"""Process of a cluster without Ray: a router or a rank.

Command: ``python -m cluster.local.process router`` or ``rank``.

    stdin     two lines: the parent's process id, and the start parameters (launch.py)
    stdout    reports, each a line of JSON: the addresses once it serves (ranks other than 0: an
              empty report), or the cause of a failure. Rank 0 of a worker with several ranks first
              reports the address at which the ranks connect to each other (launch.py).
    stderr    log

SIGTERM stops the process gracefully. SIGUSR1 notifies it that its machine is about to be reclaimed:
a router stops gracefully, rank 0 returns all requests of its worker to the routers and keeps
running, and any other rank keeps running.
On Linux, the kernel kills the process when its parent ends.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import uvloop

from cluster.local.gpus import VISIBLE
from cluster.local.launch import Launch, RankLaunch, Report, RouterLaunch, decode
from cluster.local.start_reporter import Announcer, StartReporter
from everlift import heap, logs
from everlift.errors import EverliftError, SettingsError
from everlift.transport import internal
from everlift.v1 import session_pb2
from router.ledger.config import LedgerSetupError
from worker.child_process import die_with_parent

if TYPE_CHECKING:
    from worker.serving.rank import Rank

log = logs.get_logger(__name__)

SendReport = Callable[[Report], None]


def main() -> None:
    send_report = _take_stdout()
    die_with_parent(int(sys.stdin.readline()))
    launch = decode(sys.argv[1], sys.stdin.readline().encode())
    logs.configure(launch.name, launch.log_level)
    try:
        uvloop.run(_run(launch, send_report))
    except (EverliftError, LedgerSetupError, SettingsError, OSError, ValueError) as error:
        log.error("process failed", cause=str(error))
        send_report({"error": str(error)})
        sys.exit(1)
    except Exception as error:
        log.exception("process failed")
        send_report({"error": f"{type(error).__name__}: {error}"})
        sys.exit(1)


def _take_stdout() -> SendReport:
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send_report(report: Report) -> None:
        print(json.dumps(report), file=reports, flush=True)

    return send_report


async def _run(launch: Launch, send_report: SendReport) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    if isinstance(launch, RouterLaunch):
        await _run_router(launch, send_report, stop)
    else:
        await _run_rank(launch, send_report, stop)


async def _run_router(launch: RouterLaunch, send_report: SendReport, stop: asyncio.Event) -> None:
    # Imported here so that a router does not import torch, and a rank does not import Redis.
    with heap.pause_gc():
        from router.ledger.redis.redis_ledger import connect
        from router.router import Router

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, stop.set)
    ledger = await connect(launch.ledger)
    router = await Router.start(launch.router, ledger, ledger_config=launch.ledger)
    router.reconfigure(launch.router, {}, launch.num_workers)
    heap.freeze_heap()
    send_report(
        {
            "address": router.address,
            "internal_address": router.internal_address,
            "metrics_address": router.metrics_address,
            "http_address": router.http_address,
        }
    )
    try:
        await _first(stop.wait(), router.wait())
    finally:
        await router.stop()


async def _run_rank(launch: RankLaunch, send_report: SendReport, stop: asyncio.Event) -> None:
    if launch.gpu:
        # CUDA reads this variable when it is first used, which is later than here.
        os.environ[VISIBLE] = launch.gpu
        log.info("GPU assigned", gpu=launch.gpu)
    routers = launch.routers if launch.rank == 0 else ()
    transport = internal(launch.worker.internal_tls)
    async with StartReporter(launch.worker.name, routers, transport) as start_reporter:
        from worker.serving.rank import Rank

        models = {worker.name: worker for worker in launch.models}
        rank = Rank(launch.worker, launch.rank, launch.rendezvous, models=models)
        if launch.rank == 0 and launch.worker.num_ranks > 1:
            send_report({"rendezvous": await rank.open()})
        while successor := await _run_model(rank, launch, send_report, start_reporter, stop):
            rank = successor


async def _run_model(
    rank: Rank,
    launch: RankLaunch,
    send_report: SendReport,
    start_reporter: StartReporter,
    stop: asyncio.Event,
) -> Rank | None:
    """Run a rank until it ends or ``stop`` is set.

    Return a new Rank that serves the worker's next model if the rank ended because the worker
    changes its model. Otherwise drain the rank and return None.
    """
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, rank.reclaim)
    try:
        await _first(stop.wait(), _live(rank, launch, send_report, start_reporter))
        if not stop.is_set() and (successor := await rank.successor()) is not None:
            return successor
        await rank.drain()
    finally:
        await rank.stop()
        if rank.is_stuck:
            # Exits the process before CUDA's own exit handler would wait for the stuck step.
            atexit.register(os._exit, 1)
    return None


async def _live(
    rank: Rank, launch: RankLaunch, send_report: SendReport, start_reporter: StartReporter
) -> None:
    info = await rank.start()
    heap.freeze_heap()
    if launch.rank == 0:
        await _first(rank.wait(), _announce(rank, info, launch, send_report, start_reporter))
    else:
        send_report({})
        await rank.wait()


async def _announce(
    rank: Rank,
    info: session_pb2.WorkerInfo,
    launch: RankLaunch,
    send_report: SendReport,
    start_reporter: StartReporter,
) -> None:
    announcer = Announcer(info, launch.routers, internal(launch.worker.internal_tls))
    await announcer.announce()
    send_report({"worker_id": info.worker_id, "address": info.address})
    await start_reporter.end()
    await announcer.keep_registered(lambda: rank.has_no_router)


async def _first(*works: Coroutine[Any, Any, object]) -> None:
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    main()
