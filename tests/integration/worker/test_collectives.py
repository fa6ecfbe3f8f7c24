"""Shared memory between ranks: its setup, and errors when a rank is lost."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from subprocess import PIPE, Popen
from threading import Condition

import pytest
import torch

from tests.support.example_counts import long
from tests.support.worker.parallel_rank import COUNT
from worker.parallel import collectives
from worker.parallel.collectives import Collectives, init_collectives
from worker.parallel.group import Group, create_store, init_group, join_store

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]
TIMEOUT = timedelta(minutes=5)


class DictStore:
    """Rendezvous store in this process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._is_changed = Condition()

    def set(self, key: str, value: str) -> None:
        with self._is_changed:
            self.values[key] = value.encode()
            self._is_changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._is_changed:
            self._is_changed.wait_for(lambda: key in self.values)
            return self.values[key]


class StoreWithAnotherFile(DictStore):
    """Store of a rank in another container, which has shared memory of its own."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def get(self, key: str) -> bytes:
        value = super().get(key)
        return str(self._path).encode() if key.endswith("/file") else value


def meet_all(store: DictStore, timeout: timedelta = TIMEOUT) -> list[Collectives | None]:
    """Return the result of init_collectives on each of two ranks."""
    with ThreadPoolExecutor(2) as threads:
        return [*threads.map(lambda rank: init_collectives(store, rank, 2, timeout), range(2))]


def close(*ends: Collectives | None) -> None:
    for end in ends:
        assert end is not None
        end.close()


# setup


def test_shared_memory_file_is_private_and_unlinked() -> None:
    modes = []

    class WatchingStore(DictStore):
        def set(self, key: str, value: str) -> None:
            super().set(key, value)
            if key.endswith("/file"):
                modes.append(os.stat(value).st_mode & 0o777)

    store = WatchingStore()
    close(*meet_all(store))
    assert modes == [0o600]
    assert not Path(store.get("everlift/collectives/file").decode()).exists()


def test_shared_memory_is_unused_across_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = map(str, count())
    monkeypatch.setattr(collectives, "_host", lambda: next(hosts))
    store = DictStore()
    assert meet_all(store) == [None, None]
    assert not any(key.endswith("/file") for key in store.values), "none is made"


def test_shared_memory_is_unused_if_one_rank_has_no_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    libraries = iter([None, collectives._library()])
    monkeypatch.setattr(collectives, "_library", lambda: next(libraries))
    assert meet_all(DictStore()) == [None, None]


def test_shared_memory_rejects_a_foreign_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "other").write_bytes(bytes(8 << 20))
    assert meet_all(StoreWithAnotherFile(tmp_path / "other")) == [None, None]
    assert meet_all(StoreWithAnotherFile(tmp_path / "missing")) == [None, None]
    assert "shared memory with the other ranks unavailable" in caplog.text


def test_shared_memory_is_unused_without_free_space(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_space(*_: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    assert meet_all(DictStore()) == [None, None]
    assert [error for error in said(caplog, "error") if "no space left" in error]


@pytest.mark.parametrize("way", ["shared memory", "gloo"])
def test_collectives_backend_is_logged(
    way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if way == "gloo":
        monkeypatch.setattr(collectives, "_library", lambda: None)
    caplog.set_level("INFO")
    own, address = create_store()
    stores = own, join_store(address)
    with ThreadPoolExecutor(2) as threads:
        groups = [*threads.map(init_group, stores, (0, 1), (2, 2), (CPU, CPU))]
    for group in groups:
        group.close()
    assert said(caplog, "collectives") == [way, way]


def said(caplog: pytest.LogCaptureFixture, field: str) -> list[str]:
    """Return the values of a field in the log records."""
    fields = [getattr(record, "everlift_fields", {}) for record in caplog.records]
    return [line[field] for line in fields if field in line]


# loss of a rank


@pytest.mark.parametrize(("size", "sums"), [long(2, 0), (3, 50)])
def test_killed_rank_raises_an_error_on_all_other_ranks(size: int, sums: int) -> None:
    with processes(size) as (group, others):
        assert sum_up(group, sums) == (size if sums else 0)
        others[0].kill()
        with pytest.raises(RuntimeError, match=r"rank [12] is gone"):
            sum_up(group, 10**6)
        group.close()
        for other in others[1:]:
            assert "is gone" in line_of(other)
            assert other.wait() == 3


def test_rank_killed_while_waiting_raises_an_error() -> None:
    with processes(2) as (group, (other,)):
        sum_up(group, 1)
        until_asleep(other)
        other.kill()
        other.wait()
        with pytest.raises(RuntimeError, match="rank 1 is gone"):
            sum_up(group, 2)


@pytest.mark.long
def test_wait_for_a_frozen_rank_uses_little_cpu() -> None:
    with processes(2) as (group, (other,)), ThreadPoolExecutor(1) as thread:
        sum_up(group, 1)
        other.send_signal(signal.SIGSTOP)
        summing = thread.submit(timed, partial(sum_up, group, 3))
        with pytest.raises(TimeoutError):
            summing.result(timeout=1.0)
        other.send_signal(signal.SIGCONT)
        total, elapsed_s, cpu_s = summing.result()
        assert total == 2.0
        assert cpu_s < 0.2 * elapsed_s


def test_barrier_timeout_raises_an_error() -> None:
    first, second = meet_all(DictStore(), timeout=timedelta(milliseconds=1))
    assert first is not None and second is not None
    with pytest.raises(RuntimeError, match="in time"):
        first.barrier()
    close(first, second)


@contextmanager
def processes(size: int) -> Iterator[tuple[Group, list[Popen[str]]]]:
    """Yield rank 0's group and the processes of the other ranks, which run the same sums."""
    own, address = create_store()
    with ExitStack() as running:
        others = [running.enter_context(process(address, rank, size)) for rank in range(1, size)]
        group = init_group(own, 0, size, CPU)
        running.callback(group.close)
        yield group, others


@contextmanager
def process(address: str, rank: int, size: int) -> Iterator[Popen[str]]:
    command = [
        sys.executable,
        "-m",
        "tests.support.worker.parallel_rank",
        address,
        str(rank),
        str(size),
    ]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'proto'}:{ROOT}"}
    with Popen(
        [*command, str(os.getpid())], cwd=ROOT, env=environment, stdout=PIPE, text=True
    ) as started:
        try:
            yield started
        finally:
            started.kill()


def line_of(process: Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def sum_up(group: Group, times: int) -> float:
    """Run sums over the ranks; return one element of the last sum."""
    total = torch.zeros(1)
    for _ in range(times):
        total = group.all_reduce(torch.ones(COUNT))
    return float(total[-1])


def until_asleep(process: Popen[str]) -> None:
    """Wait until the main thread of the process sleeps on a futex."""
    path = Path(f"/proc/{process.pid}/wchan")
    while "futex" not in path.read_text():
        time.sleep(0.01)


def timed(act: Callable[[], float]) -> tuple[float, float, float]:
    """Return the result of ``act``, its duration, and this thread's CPU time, in seconds."""
    began, cpu = time.monotonic(), time.thread_time()
    return act(), time.monotonic() - began, time.thread_time() - cpu
