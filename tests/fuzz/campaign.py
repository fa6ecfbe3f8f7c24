"""Fuzzing campaign: cases of all targets, in batches whose processes may crash or hang.

    python -m tests.fuzz TARGET SEED FIRST COUNT PLACE    COUNT cases of the seed, from FIRST
    python -m tests.fuzz TARGET FILE                      the case in FILE

The number of each case is written to PLACE, a memory-mapped file, before the case runs, so that it
is known even after a crash. A case depends only on target, seed and number.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import resource
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz import targets
from tests.fuzz.target import CASE_S, Target, opened

#: Limit of a case in wall-clock time. The process shares the machine, and starts in its first case.
_TIMEOUT_S = 60 * CASE_S
_LOOK_S = 0.05
#: Limits of the memory growth over all cases of a process, and of the address space of one case.
_MAX_GROWTH = 512 << 20
_ADDRESS_SPACE = 4 << 30
_PLACE = struct.Struct("<q")
#: Cases of one process, after which its processor is free for any other batch.
_BATCH = 50_000
#: Cases before memory is measured: parsers keep compiled data.
_WARM = 500


@dataclass(frozen=True)
class Failure:
    """Failed case: ``file`` contains it, ``said`` is the output of its process."""

    target: str
    number: int
    file: Path
    said: str

    def __str__(self) -> str:
        again = f"python -m tests.fuzz {self.target} {self.file}"
        return f"{self.target}, case {self.number} ({again}):\n{self.said[-3000:]}"


@dataclass
class _Batch:
    target: Target
    first: int
    count: int
    process: subprocess.Popen[bytes] | None = None
    place: Path = Path()
    moved_at: float = 0.0
    at: int = -1


class Campaign:
    """Campaign with the cases of ``seed``; failed ones are stored in ``directory``."""

    def __init__(self, seed: int, directory: Path, num_processes: int) -> None:
        self._seed = seed
        self._directory = directory
        self._num_processes = num_processes
        self.failures: list[Failure] = []
        self.seconds: dict[str, float] = {}

    def run(self, shares: dict[str, int]) -> None:
        """Run the given number of cases of each target; a target ends with its first failure."""
        self._directory.mkdir(parents=True, exist_ok=True)
        waiting = deque(
            _Batch(targets.by_name(name), first, min(_BATCH, count - first))
            for name, count in shares.items()
            for first in range(0, count, _BATCH)
        )
        running: list[_Batch] = []
        try:
            while waiting or running:
                while waiting and len(running) < self._num_processes:
                    batch = waiting.popleft()
                    if not self._has_failed(batch.target):
                        self._start(batch)
                        running.append(batch)
                time.sleep(_LOOK_S)
                running = [batch for batch in running if not self._is_over(batch)]
        finally:
            for batch in running:
                _end(batch)

    def _has_failed(self, target: Target) -> bool:
        return any(failure.target == target.name for failure in self.failures)

    def _start(self, batch: _Batch) -> None:
        batch.place = self._directory / f"{batch.target.name}-{batch.first}.at"
        batch.place.write_bytes(_PLACE.pack(-1))
        numbers = (self._seed, batch.first, batch.count)
        with self._said(batch).open("wb") as said:
            batch.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.fuzz", batch.target.name),
                    *(*map(str, numbers), str(batch.place)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )
        batch.moved_at = time.monotonic()

    def _said(self, batch: _Batch) -> Path:
        return batch.place.with_suffix(".log")

    def _is_over(self, batch: _Batch) -> bool:
        assert batch.process is not None
        moment, (at,) = time.monotonic(), _PLACE.unpack(batch.place.read_bytes())
        if at != batch.at:
            batch.at, batch.moved_at = at, moment
        if (code := batch.process.poll()) is None:
            if moment - batch.moved_at <= _TIMEOUT_S:
                return False
            _end(batch)
            code = -1
        name, said = batch.target.name, self._said(batch)
        if code == 0:
            self.seconds[name] = self.seconds.get(name, 0.0) + float(said.read_text().split()[-1])
        else:
            self._keep(batch, said.read_text(errors="replace"))
        batch.place.unlink()
        said.unlink()
        return True

    def _keep(self, batch: _Batch, said: str) -> None:
        file = self._directory / f"{batch.target.name}-{self._seed}-{batch.at}.case"
        file.write_bytes(targets.numbered(batch.target, self._seed, batch.at))
        self.failures.append(Failure(batch.target.name, batch.at, file, said or "it hangs"))


def _end(batch: _Batch) -> None:
    assert batch.process is not None
    batch.process.kill()
    batch.process.wait()


def main(arguments: Sequence[str]) -> None:
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    target = targets.by_name(arguments[0])
    if len(arguments) == 2:
        with opened(target) as run:
            run(Path(arguments[1]).read_bytes())
        return
    seed, first, count = map(int, arguments[1:4])
    _bound_memory()
    with open(arguments[4], "r+b") as file, mmap.mmap(file.fileno(), _PLACE.size) as place:
        began = time.process_time()
        _run(target, seed, first, count, place)
        print(time.process_time() - began)


def _run(target: Target, seed: int, first: int, count: int, place: mmap.mmap) -> None:
    with opened(target) as run:
        resident = 0
        for number in range(first, first + count):
            place[:] = _PLACE.pack(number)
            run(targets.numbered(target, seed, number))
            if number - first == _WARM:
                resident = _resident()
    growth = _resident() - resident if count > _WARM else 0
    assert growth < _MAX_GROWTH, f"{growth} bytes more than in the beginning"


def _bound_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _ADDRESS_SPACE, used + _ADDRESS_SPACE))


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def processors() -> int:
    return len(os.sched_getaffinity(0))
