"""Notice to a process that its machine is about to be reclaimed."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

ROOT = Path(__file__).parents[3]


async def test_signal_notice_is_delivered_once_outside_the_main_thread() -> None:
    """The event loop runs in a separate thread, as in the process of a Ray actor."""
    script = """
import asyncio, os, signal, threading
from everlift.notice import on_signal

async def main():
    notices = []
    on_signal(lambda: notices.append("received"))
    os.kill(os.getpid(), signal.SIGUSR1)
    while not notices:
        await asyncio.sleep(0.01)
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.sleep(0.1)
    print(*notices)

thread = threading.Thread(target=asyncio.run, args=(main(),))
thread.start()
thread.join()
"""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script), env=environment, stdout=PIPE
    )
    out, _ = await process.communicate()
    assert (out, process.returncode) == (b"received\n", 0)
