"""Measurement of one engine in a process of its own: a batch, then single requests.

    python -m benchmarks.engine_NAME JOB RESULT

reads a Job and writes a Result, both JSON. This module runs in the peers' environments, too: it
needs nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Request:
    """Request for exactly ``max_tokens`` tokens by greedy decoding; no token ends it early."""

    prompt: list[int]
    max_tokens: int


class System(Protocol):
    def generate(self, requests: Sequence[Request]) -> list[list[int]]:
        """Submit all requests at once; return the output tokens of each."""
        ...

    def close(self) -> None:
        """Stop threads and processes that would keep this process from ending."""
        ...


@dataclass(frozen=True)
class Job:
    """Requests of a run, and ``settings`` of the system.

    ``warm_up`` runs first and is not measured, then the ``batch``, then the pairs of ``alone``. In
    a pair both prompts have the same length, and the second request has more output tokens.
    """

    model: str
    threads: int
    settings: dict[str, Any]
    warm_up: list[Request]
    batch: list[Request]
    alone: list[tuple[Request, Request]]

    @classmethod
    def of(cls, job: dict[str, Any]) -> Job:
        return cls(
            **job
            | {name: [Request(**each) for each in job[name]] for name in ("warm_up", "batch")}
            | {"alone": [(Request(**one), Request(**two)) for one, two in job["alone"]]}
        )


@dataclass(frozen=True)
class Result:
    #: from the batch's submission to its last token
    seconds: float
    #: output tokens of the batch
    tokens: list[list[int]]
    #: for each pair, milliseconds per token of a sequence that decodes alone
    alone_ms: list[float]
    #: sum of the peak resident memory of the system's processes
    peak_bytes: int
    #: seconds to load, compile and warm up
    start_s: float
    #: share of all cores' time that other processes used during the batch
    others: float


def main(load: Callable[[Job], System]) -> None:
    """Measure the system that ``load`` returns, with the files of the command line."""
    _, source, target = sys.argv
    job = Job.of(json.loads(Path(source).read_text()))
    Path(target).write_text(json.dumps(asdict(measure(job, load))))


def measure(job: Job, load: Callable[[Job], System]) -> Result:
    began = time.perf_counter()
    system = load(job)
    system.generate(job.warm_up)
    start_s = time.perf_counter() - began
    before = _cpu_ticks()
    began = time.perf_counter()
    tokens = system.generate(job.batch)
    seconds = time.perf_counter() - began
    others = _others(before, _cpu_ticks())
    result = Result(
        seconds=seconds,
        tokens=tokens,
        alone_ms=[_alone_ms(system, *pair) for pair in job.alone],
        peak_bytes=sum(_peak_bytes(pid) for pid in _process_tree(os.getpid())),
        start_s=start_s,
        others=others,
    )
    system.close()
    return result


def _alone_ms(system: System, short: Request, long: Request) -> float:
    """Return the ms per output token, without the time of the prompt.

    That is the difference of both requests, whose prompts take equally long.
    """
    seconds = []
    for request in (short, long):
        began = time.perf_counter()
        system.generate([request])
        seconds.append(time.perf_counter() - began)
    return (seconds[1] - seconds[0]) / (long.max_tokens - short.max_tokens) * 1e3


@dataclass(frozen=True)
class _Ticks:
    machine: int
    busy: int
    own: int


def _cpu_ticks() -> _Ticks:
    numbers = [int(n) for n in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
    idle = numbers[3] + numbers[4]
    own = sum(_used_ticks(pid) for pid in _process_tree(os.getpid()))
    return _Ticks(sum(numbers), sum(numbers) - idle, own)


def _others(before: _Ticks, after: _Ticks) -> float:
    foreign = (after.busy - before.busy) - (after.own - before.own)
    return max(0.0, foreign / max(1, after.machine - before.machine))


def _process_tree(pid: int) -> Iterator[int]:
    """Yield the process and all its descendants."""
    yield pid
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in (thread / "children").read_text().split():
            yield from _process_tree(int(child))


def _used_ticks(pid: int) -> int:
    """Return the CPU ticks of the process and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15])


def _peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    # A process that has ended, and that its parent has not waited for, has no such line.
    peaks = (int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))
    return next(peaks, 0)
