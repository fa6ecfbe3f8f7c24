"""Exit of a process with a step that never ends, which it reports.

At exit, CUDA would wait for the step. An exit handler that blocks forever stands in for it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

from cluster.local.launch import RankLaunch, encode
from tests.support.router.session_support import Router, announced
from tests.support.worker.worker_support import prompt, start
from worker.config import FakeModel, WorkerConfig

ROOT = Path(__file__).parents[3]
A_RANK = """
import atexit, sys, threading
sys.argv[1:] = ["rank"]
atexit.register(threading.Event().wait)
from cluster.local import process
process.main()
"""
#: The step soon exceeds its limit, although the first steps have ten times the timeout or more.
CONFIG = WorkerConfig(
    model="fake",
    num_blocks=8,
    cluster_id="here",
    step_timeout=0.02,
    drain_timeout=0.1,
    fake=FakeModel(step_time=3600.0),
)


async def test_process_with_a_stuck_step_reports_it_and_exits() -> None:
    async with announced() as router_address, asyncio.timeout(30.0):
        launch = RankLaunch("rank", "error", CONFIG, routers=(router_address,))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", A_RANK),
            env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
            stdin=PIPE,
            stdout=PIPE,
        )
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{os.getpid()}\n".encode() + encode(launch) + b"\n")
        try:
            router = Router(json.loads(await process.stdout.readline())["address"])
            await router.hello(start(1, prompt(4)))
            report = json.loads(await process.stdout.readline())
            assert "of 4 tokens, takes longer than" in report["error"]
            assert await process.wait() == 1
            await router.close()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
