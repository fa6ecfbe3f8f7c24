"""Cost of the console for a router and a browser, by size of the cluster.

    python benchmarks/console.py [--seconds 10] [--out build/bench/console.json]

The cluster is simulated: each worker has 256 slots, all taken. Before every frame, one in twenty
slots of 8 workers gets another request. The queue of a leader has 10 requests per worker, of 4
classes and 50 tenants; before every frame, as many requests leave it and join it. One page shows
the slots of these 8 workers. Medians of CPU time and bytes, by number of workers:

    load_ms      report of the leader about its queue and the workers

    look_ms      update of the sections from the cluster, once per frame for all pages
    encode_ms    encoding of the sections as JSON
    frame_ms     a page's own part of a frame: the requests in the slots that it shows
    first_bytes, frame_bytes    size of the page's first frame, and of later ones

With 1,000 workers, a headless Chromium at 1440 x 900 yields the frames drawn per second (``fps``),
the share of them that took more than 50 ms (``late``), and the page's share of a core. The ratio
``share_of_a_core`` is the router's CPU time for one page with 1,000 workers.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from starlette.routing import Route, Router

from benchmarks import report
from everlift.request_id import qualify
from everlift.transport import GRPC
from everlift.v1 import session_pb2
from router.api.http.endpoint import Endpoint
from router.api.http.server import HttpServer
from router.api.http.writer import encode
from router.auth.caller import ANYONE, OPEN
from router.config import RouterConfig
from router.console.actions import Actions
from router.console.console import FRAME_S, Console
from router.console.counts import Peers
from router.console.slot_grid import MAX_LANES, Lanes
from router.console.snapshot import Snapshot
from router.console.viewer import Viewer
from router.ledger.base import LoadReport, ScalingReport
from tests.support.router.admission_support import Cluster
from tests.support.router.browser import browser
from tests.support.router.console_support import FakeCluster, link

NUM_WORKERS = (10, 100, 1000)
SLOTS = 256
WAITING = 10
CLASSES = 4
TENANTS = 50
_FRAMES = 40
#: Script that returns the times between drawn frames, in milliseconds.
_WATCH = """ms => new Promise(resolve => {
  const gaps = []; let last = performance.now(); const end = last + ms;
  const tick = now => { gaps.push(now - last); last = now;
    if (now < end) requestAnimationFrame(tick); else resolve(gaps); };
  requestAnimationFrame(tick);
})"""


class LeaderQueue:
    """Queue of a leader that always contains ``waiting`` requests."""

    def __init__(self, waiting: int) -> None:
        config = RouterConfig(max_queued=waiting, fair_share=True)
        self._leader = Cluster(config, weight_of=lambda tenant: 1.0)
        self._leader.connect()
        self._rng = random.Random(2)
        self._came = 0
        self._waiting: deque[str] = deque()
        self._come(waiting)

    def _come(self, number: int) -> None:
        for _ in range(number):
            self._came += 1
            name = qualify(f"tenant-{self._rng.randrange(TENANTS)}", f"request-{self._came}")
            priority = self._rng.randrange(CLASSES)
            self._leader.enqueue(name, priority=priority, arrived=float(self._came))
            self._waiting.append(name)

    def advance(self, number: int) -> None:
        gone = [self._waiting.popleft() for _ in range(min(number, len(self._waiting)))]
        self._leader.receive(session_pb2.GatewayMessage(withdraw=gone))
        self._come(len(gone))

    def load(self) -> session_pb2.ClusterLoad:
        moment = float(self._came)
        return self._leader.leader_state.load(1, moment, moment)

    def queue_estimate(self) -> session_pb2.QueueEstimate:
        return self._leader.queue.queue_estimate()


class BusyCluster:
    def __init__(self, num_workers: int) -> None:
        self._rng = random.Random(1)
        self._names = 0
        self._queue = LeaderQueue(WAITING * num_workers)
        self.cluster = FakeCluster(
            [link(f"{number:016x}", SLOTS, 4096) for number in range(num_workers)],
            queued=WAITING * num_workers,
        )
        for each in self.cluster.links:
            each.seat(*(self._name() for _ in range(SLOTS)))

    def _name(self) -> str:
        self._names += 1
        return f"{self._names:032x}"

    def advance(self, num_busy: int) -> None:
        """Advance the cluster by one frame; ``num_busy`` workers replace some of their requests."""
        for place, each in enumerate(self.cluster.links):
            state = each.state
            state.output_tokens += SLOTS
            state.num_running = self._rng.randint(SLOTS // 2, SLOTS)
            state.blocks_used = self._rng.randint(2048, 4096)
            if place < num_busy:
                for sequence in self._rng.sample(each.running, SLOTS // 20):
                    sequence.request_id = self._name()
                    sequence.prefilling = not sequence.prefilling
        self._queue.advance(num_busy * SLOTS // 20)
        self.cluster.queue_estimates["fake"] = self._queue.queue_estimate()
        self.cluster.observe("ttft", *(self._rng.randint(1, 9) for _ in range(3)))

    def load(self) -> LoadReport:
        return LoadReport(self._queue.load(), 0.1)


def measure_router(num_workers: int) -> dict[str, float]:
    busy = BusyCluster(num_workers)
    snapshot = busy.cluster.snapshot()
    lanes = [each.info.worker_id for each in busy.cluster.links[:MAX_LANES]]
    viewer = Viewer(snapshot, ANYONE, Lanes(lanes))
    took: dict[str, list[float]] = {
        name: [] for name in ("load_ms", "look_ms", "encode_ms", "frame_ms")
    }
    sizes: list[int] = []
    for number in range(_FRAMES):
        busy.advance(MAX_LANES)
        now = number * FRAME_S
        snapshot.load = timed(took["load_ms"], busy.load)
        sections = timed(took["look_ms"], lambda now=now: snapshot.update(now))
        texts = timed(
            took["encode_ms"], lambda it=sections: {name: encode(v) for name, v in it.items()}
        )
        frame = timed(
            took["frame_ms"], lambda it=texts, now=now: viewer.frame(cast("Any", it), now)
        )
        sizes.append(len(cast(str, frame).encode()))
    medians = {name: statistics.median(them[1:]) for name, them in took.items()}
    return medians | {"first_bytes": sizes[0], "frame_bytes": statistics.median(sizes[1:])}


def timed(took: list[float], work: Callable[[], Any]) -> Any:
    began = time.thread_time()
    result = work()
    took.append(1e3 * (time.thread_time() - began))
    return result


class _Ledger:
    def __init__(self, busy: BusyCluster) -> None:
        self._busy = busy

    async def load(self) -> LoadReport:
        return self._busy.load()

    async def scaling(self) -> list[ScalingReport]:
        """Return no report, because the cluster has no autoscaler."""
        return []

    async def gateways(self) -> dict[str, str]:
        return {}


async def measure_browser(num_workers: int, seconds: float) -> dict[str, float]:
    busy = BusyCluster(num_workers)
    snapshot: Snapshot = busy.cluster.snapshot()
    nobody = cast("Any", None)
    actions = Actions(nobody, nobody, nobody, has_access=False)
    ledger = cast("Any", _Ledger(busy))
    console = Console(snapshot, actions, OPEN, ledger, Peers("me", ledger, GRPC))
    server = HttpServer()
    await server.bind("127.0.0.1", 0, None)
    routes = [
        Route(path, Endpoint(OPEN, method, handler, tuple(scopes), 1 << 20))
        for method, path, handler, *scopes in console.paths()
    ]
    await server.start(Router(routes))
    tasks = [asyncio.create_task(console.run()), asyncio.create_task(_advance_forever(busy))]
    try:
        return await _watch(f"http://{server.address}/console/", seconds)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.stop(0)


async def _advance_forever(busy: BusyCluster) -> None:
    while True:
        busy.advance(MAX_LANES)
        await asyncio.sleep(FRAME_S)


async def _watch(url: str, seconds: float) -> dict[str, float]:
    async with browser() as chromium:
        page = await chromium.new_page(viewport={"width": 1440, "height": 900})
        await page.goto(url)
        await page.wait_for_function("document.querySelectorAll('#grid .cell').length > 0")
        await page.evaluate(
            "document.querySelectorAll('#grid .cell').forEach((it, place) => "
            f"place < {MAX_LANES} && it.click())"
        )
        await page.wait_for_timeout(3000)
        session = await page.context.new_cdp_session(page)
        await session.send("Performance.enable")
        before = await _task_s(session)
        gaps = await page.evaluate(_WATCH, 1e3 * seconds)
        busy_s = await _task_s(session) - before
    return {
        "fps": len(gaps) / seconds,
        "late": sum(gap > 50 for gap in gaps) / len(gaps),
        "longest_ms": max(gaps),
        "share_of_a_core": busy_s / seconds,
    }


async def _task_s(session: Any) -> float:
    found = await session.send("Performance.getMetrics")
    return next(it["value"] for it in found["metrics"] if it["name"] == "TaskDuration")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--out", type=Path, default=Path("build/bench/console.json"))
    args = parser.parse_args(arguments)
    routers = {number: measure_router(number) for number in NUM_WORKERS}
    page = asyncio.run(measure_browser(NUM_WORKERS[-1], args.seconds))
    most = routers[NUM_WORKERS[-1]]
    spent_ms = sum(most[name] for name in ("look_ms", "encode_ms", "frame_ms"))
    report.write(
        args.out,
        packages=("starlette", "uvicorn", "playwright"),
        settings={"slots": SLOTS, "lanes": MAX_LANES, "frame_s": FRAME_S},
        raw={"router": routers, "page": page},
        ratios={
            "share_of_a_core": spent_ms / 1e3 / FRAME_S,
            "page_share_of_a_core": page["share_of_a_core"],
            "page_late": page["late"],
            "frame_bytes": most["frame_bytes"],
        },
    )


if __name__ == "__main__":
    main()
