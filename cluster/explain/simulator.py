"""Simulations beside a router, each in a process of its own that ends with its answer."""

from __future__ import annotations

import asyncio
import os
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from cluster.explain.launch import Launch, decode_answer, encode
from cluster.starter import python_module, tell
from router.gateway.what_if import Estimates, Question
from router.ledger.config import LedgerConfig
from worker.child_process import full_environment

#: Its libraries are not to take more than one core.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class ProcessSimulator:
    """A Simulator. ``ledger`` is where the requests are."""

    ledger: LedgerConfig

    async def estimates(self, question: Question) -> Estimates:
        launch = encode(Launch(self.ledger, question))
        async with _started() as process:
            assert process.stdin is not None and process.stdout is not None
            await tell(process.stdin, b"%d\n%s\n" % (os.getpid(), launch))
            answer = await process.stdout.read()
            await process.wait()
        return decode_answer(answer)


@asynccontextmanager
async def _started() -> AsyncIterator[Process]:
    """It is gone behind this, whatever happens."""
    process = await asyncio.create_subprocess_exec(
        *python_module("cluster.explain.simulator_process"),
        stdin=PIPE,
        stdout=PIPE,
        env=full_environment(_ONE_THREAD),
        # Ctrl-C is for the router.
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
