"""How a process of a cluster without Ray comes to be, and what its parent has of it."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from cluster.local.launch import Launch, encode
from worker.process.child_process import full_environment


class Started(Protocol):
    """As asyncio has it. ``stdout`` brings its reports; ``returncode`` is below 0 for a signal."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    @property
    def stdout(self) -> asyncio.StreamReader | None: ...

    async def wait(self) -> int: ...

    def send_signal(self, signal: int) -> None:
        """Raises ProcessLookupError when it is gone."""
        ...


class Starter(Protocol):
    async def start(self, launch: Launch, log_path: Path) -> Started:
        """A process that has been told its launch, its log at the end of ``log_path``. The event
        loop's thread must live as long as it: the kernel ends it with that."""
        ...


class PlainStarter:
    """A fresh interpreter each time. ``environment`` is added to this process's own."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    async def start(self, launch: Launch, log_path: Path) -> Started:
        with log_path.open("ab") as log_file:
            process = await asyncio.create_subprocess_exec(
                *python_module("cluster.local.process"),
                launch.role,
                stdin=PIPE,
                stdout=PIPE,
                stderr=log_file,
                env=full_environment(self._environment),
                # Ctrl-C is for the parent, which ends its children in good order.
                start_new_session=True,
            )
        assert process.stdin is not None
        await tell(process.stdin, told(os.getpid(), launch))
        return process


async def tell(stdin: asyncio.StreamWriter, words: bytes) -> None:
    """Writes ``words``, and closes ``stdin``. A process that has ended already is told nothing: its
    status says what there is to say."""
    # uvloop's writes to a pipe that it has closed raise RuntimeError, asyncio's nothing.
    if stdin.is_closing():
        return
    with suppress(ConnectionError):
        stdin.write(words)
        await stdin.drain()
        stdin.close()


def told(parent: int, launch: Launch) -> bytes:
    """What a process reads first; ``parent`` is the one that has started it."""
    return b"%d\n%s\n" % (parent, encode(launch))


def python_module(name: str) -> list[str]:
    """The command that runs it. What lies in the working directory is not in its place ("-P")."""
    return [sys.executable, "-P", "-m", name]
