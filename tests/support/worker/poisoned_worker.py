"""Fake worker in a process of its own, which is killed in a poison request's first step.

It writes its WorkerInfo to stdout, in hexadecimal digits on a line of its own, and serves until it
is killed.
"""

from __future__ import annotations

import asyncio
import os
import signal

from worker.config import FakeModel, WorkerConfig
from worker.engine.plan import Plan, RowResult
from worker.runner.fake_runner import FakeRunner
from worker.serving import rank as rank_module
from worker.serving.rank import Rank

#: First prompt token of a poison request.
POISON = 13
MARK = "info "

_execute = FakeRunner.execute


def _strike(runner: FakeRunner, plan: Plan) -> list[RowResult]:
    """Kill the process before the step's results, in the engine's thread: nothing more is sent."""
    if any(admission.tokens[0] == POISON for admission in plan.admissions):
        os.kill(os.getpid(), signal.SIGKILL)
    return _execute(runner, plan)


async def main() -> None:
    FakeRunner.execute = _strike  # type: ignore[method-assign]
    # Even on a busy machine, the router is notified of a first step before the worker is killed in
    # it.
    rank_module.CONFIRM_S = 30.0
    rank = Rank(WorkerConfig(model="fake", num_blocks=256, fake=FakeModel(step_time=0.002)))
    info = await rank.start()
    print(MARK + info.SerializeToString().hex(), flush=True)
    await rank.wait()


if __name__ == "__main__":
    asyncio.run(main())
