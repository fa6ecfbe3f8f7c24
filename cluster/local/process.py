"""Process of a cluster without Ray: a router or a rank.

Command: ``python -m cluster.local.process router`` or ``rank``.

    stdin     two lines: the parent's process id, and the start parameters (launch.py)
    stdout    reports, each a line of JSON: the addresses once it serves, or the cause of a failure
    stderr    log

SIGTERM stops the process in order. SIGUSR1 notifies it that its machine is about to be reclaimed: a
router stops as well, a rank returns all requests and keeps running. The process never outlives its
parent.
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
from cluster.local.starting import Announcer, Starting
from everlift import heap, logs
from everlift.errors import EverliftError, SettingsError
from everlift.transport import internal
from everlift.v1 import session_pb2
from router.ledger.config import LedgerSetupError
from worker.child_process import die_with_parent

if TYPE_CHECKING:
    from worker.serving.rank import Rank

log = logs.get_logger(__name__)

Tell = Callable[[Report], None]


def main() -> None:
    tell = _take_stdout()
    die_with_parent(int(sys.stdin.readline()))
    launch = decode(sys.argv[1], sys.stdin.readline().encode())
    logs.configure(launch.name, launch.log_level)
    try:
        uvloop.run(_run(launch, tell))
    except (EverliftError, LedgerSetupError, SettingsError, OSError, ValueError) as error:
        log.error("failed", cause=str(error))
        tell({"error": str(error)})
        sys.exit(1)
    except Exception as error:
        log.exception("failed")
        tell({"error": f"{type(error).__name__}: {error}"})
        sys.exit(1)


def _take_stdout() -> Tell:
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(report: Report) -> None:
        print(json.dumps(report), file=reports, flush=True)

    return tell


async def _run(launch: Launch, tell: Tell) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    if isinstance(launch, RouterLaunch):
        await _run_router(launch, tell, stop)
    else:
        await _run_rank(launch, tell, stop)


async def _run_router(launch: RouterLaunch, tell: Tell, stop: asyncio.Event) -> None:
    # Imported here so that a router does not import torch, and a rank does not import Redis.
    with heap.growing():
        from router.ledger.redis.redis_ledger import connect
        from router.router import Router

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, stop.set)
    ledger = await connect(launch.ledger)
    router = await Router.start(launch.router, ledger, memory_limit=launch.ledger.memory_limit)
    router.reconfigure(launch.router, {}, launch.num_workers)
    heap.settle()
    tell(
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


async def _run_rank(launch: RankLaunch, tell: Tell, stop: asyncio.Event) -> None:
    if launch.gpu:
        # CUDA reads this variable when it is first used, which is later than here.
        os.environ[VISIBLE] = launch.gpu
        log.info("GPU assigned", gpu=launch.gpu)
    routers = launch.routers if launch.rank == 0 else ()
    async with Starting(routers, internal(launch.worker.internal_tls)) as starting:
        from worker.serving.rank import Rank

        rank = Rank(launch.worker, launch.rank, launch.rendezvous)
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, rank.reclaim)
        try:
            await _first(stop.wait(), _live(rank, launch, tell, starting))
            await rank.drain()
        finally:
            await rank.stop()
            if rank.is_stuck:
                # Exits the process before CUDA's own exit handler would wait for the stuck step.
                atexit.register(os._exit, 1)


async def _live(rank: Rank, launch: RankLaunch, tell: Tell, starting: Starting) -> None:
    if launch.rank == 0 and launch.worker.tensor_parallel > 1:
        tell({"rendezvous": await rank.open()})
    info = await rank.start()
    heap.settle()
    if launch.rank == 0:
        await _first(rank.wait(), _announce(rank, info, launch, tell, starting))
    else:
        tell({})
        await rank.wait()


async def _announce(
    rank: Rank,
    info: session_pb2.WorkerInfo,
    launch: RankLaunch,
    tell: Tell,
    starting: Starting,
) -> None:
    announcer = Announcer(info, launch.routers, internal(launch.worker.internal_tls))
    await announcer.announce()
    tell({"worker_id": info.worker_id, "address": info.address})
    await starting.end()
    await announcer.keep(lambda: rank.is_alone)


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
