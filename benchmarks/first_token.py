"""Time from the start of a process to the first token of its first request, by part.

    python benchmarks/first_token.py [--repeats 3] [--out build/bench/first_token.json]

Random checkpoints, whose files are in the page cache, are measured in four modes, which take turns:

    offline       a new Python process that makes an LLM and streams one prompt
    uncompiled    the same with an empty cache of compiled C++, which is compiled first
    up            `everlift up --no-ray`, and a client that waits until it serves
    in turn       the start of a rank, one part after the other, in a process of its own

The parts of ``up`` are events in the logs of its processes, in seconds after its start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import checkpoints, report
from cluster.threads import WAITING
from everlift import AsyncClient

Seconds = dict[str, float]

_HERE = Path(__file__).parent
_PROMPT = "Once upon a time"
_EVERLIFT = "from cluster.cli import main; main()"
_NO_HTTP = ("router.http_host=", "router.metrics_host=")
#: Names of parts, by log file and event of ``everlift up``.
_MILESTONES = {
    ("up.log", "ledger server started"): "ledger ready",
    ("router-0.log", "router ready"): "router ready",
    ("up.log", "fork server ready"): "fork server ready",
    ("worker-0.log", "model loaded"): "model loaded",
    ("router-0.log", "worker up"): "worker up",
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--models", nargs="+", default=["tiny", "small", "smollm2", "medium"])
    arguments.add_argument("--out", type=Path, default=Path("build/bench/first_token.json"))
    options = arguments.parse_args()
    with TemporaryDirectory(prefix="everlift-first-token-") as scratch:
        medians = {
            name: asyncio.run(_measured(name, Path(scratch), options.repeats))
            for name in options.models
        }
    report.write(
        options.out,
        packages=("torch", "tokenizers"),
        settings={"repeats": options.repeats},
        raw={"medians_s": medians},
        ratios={
            f"{name}_{way}_vs_in_turn": round(ways[way]["in all"] / ways["in turn"]["in all"], 3)
            for name, ways in medians.items()
            for way in ("offline", "uncompiled", "up")
        },
    )


async def _measured(name: str, scratch: Path, repeats: int) -> dict[str, Seconds]:
    """Return the medians of each mode, in seconds by part.

    The modes take turns. A first round, which reads the files into the page cache, is left out.
    """
    model = checkpoints.ensure(name)
    runs: dict[str, list[Seconds]] = {way: [] for way in _MODES}
    for repeat in range(1 + repeats):
        for way, run in _MODES.items():
            seconds = await run(model, scratch)
            print(name, way, json.dumps(seconds), flush=True)
            if repeat:
                runs[way].append(seconds)
    return {way: _medians(each) for way, each in runs.items()}


def _medians(runs: Sequence[Seconds]) -> Seconds:
    return {part: round(statistics.median(run[part] for run in runs), 3) for part in runs[0]}


async def _offline(model: Path, scratch: Path) -> Seconds:
    return await _child("first_token_offline.py", str(model), repr(time.time()))


async def _uncompiled(model: Path, scratch: Path) -> Seconds:
    with TemporaryDirectory(dir=scratch) as cache:
        arguments = str(model), repr(time.time())
        return await _child("first_token_offline.py", *arguments, XDG_CACHE_HOME=cache)


async def _in_turn(model: Path, scratch: Path) -> Seconds:
    threads = len(os.sched_getaffinity(0))
    seconds = await _child("first_token_parts.py", str(model), str(threads))
    to_first = sum(each for part, each in seconds.items() if part != "second step")
    return seconds | {"in all": round(to_first, 3)}


async def _child(program: str, *arguments: str, **more: str) -> Seconds:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(_HERE / program),
        *arguments,
        stdout=PIPE,
        env=_environment(**WAITING, **more),
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, f"{program} ended with status {process.returncode}"
    seconds: Seconds = json.loads(output)
    return seconds


def _environment(**more: str) -> dict[str, str]:
    """Return this environment with ``more``, but with bytecode written, as in an installation."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | more


async def _up(model: Path, scratch: Path) -> Seconds:
    with TemporaryDirectory(dir=scratch) as state_dir:
        settings = (f"state_dir={state_dir}", "router.port=0", *_NO_HTTP)
        began = time.time()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _EVERLIFT, "up", "--no-ray", "--model", str(model)),
            *(word for setting in settings for word in ("--set", setting)),
            stdout=PIPE,
            env=_environment(PYTHONUNBUFFERED="1"),
        )
        try:
            address = await _address(process)
            ready_s = time.time() - began
            async with AsyncClient(address) as client:
                await _first_token(client)
                first_s = time.time() - began
        finally:
            process.send_signal(signal.SIGTERM)
            await process.wait()
        seconds = _milestones(Path(state_dir, "logs"), began)
        return seconds | {"ready": round(ready_s, 3), "in all": round(first_s, 3)}


async def _address(process: asyncio.subprocess.Process) -> str:
    """Wait until ``everlift up`` serves, and return its gRPC address."""
    assert process.stdout is not None
    async for line in process.stdout:
        if line.split()[:1] == [b"gRPC"]:
            return line.split()[1].decode()
    raise AssertionError("everlift up has ended before it served")


async def _first_token(client: AsyncClient) -> None:
    async with client.generate(_PROMPT, max_tokens=2, temperature=0) as stream:
        async for _ in stream:
            return


def _milestones(log_dir: Path, began: float) -> Seconds:
    """Return the seconds of each event after ``began``, by time."""
    seconds: Seconds = {}
    for path in log_dir.glob("*.log"):
        for line in path.read_text().splitlines():
            event = json.loads(line) if line.startswith("{") else {}
            if name := _MILESTONES.get((path.name, event.get("event"))):
                passed = datetime.fromisoformat(event["ts"]).timestamp() - began
                seconds[name] = round(passed, 3)
    return dict(sorted(seconds.items(), key=lambda item: item[1]))


_MODES: dict[str, Callable[[Path, Path], Awaitable[Seconds]]] = {
    "offline": _offline,
    "uncompiled": _uncompiled,
    "up": _up,
    "in turn": _in_turn,
}


if __name__ == "__main__":
    main()
