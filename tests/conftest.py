"""Check after each test that no process, listening port or shared memory segment is left.

Only this process's descendants are checked for processes and ports. Shared memory belongs to the
machine, where others run tests too: segments that other processes have open or mapped are ignored.
"""

from __future__ import annotations

import ctypes
import gc
import glob
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import hypothesis
import pytest

from tests.support.example_counts import examples

_PR_SET_CHILD_SUBREAPER = 36
_TIMEOUT_S = 60.0
_SHARED_MEMORY = "/dev/shm"

# Orphans of killed processes become children of this process, where the check finds them.
ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
# A shell makes background processes ignore SIGINT, and all processes of the tests would inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Without a GPU, kernels run in Triton's interpreter, which must be chosen before their import.
if not shutil.which("nvidia-smi") and not [*Path("/dev").glob("nvidia[0-9]*")]:
    os.environ["TRITON_INTERPRET"] = "1"
# The duration of an example depends on the load of the machine, so there is no deadline.
hypothesis.settings.register_profile(
    "any machine",
    deadline=None,
    max_examples=examples(100),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("any machine")


def pytest_collection_finish() -> None:
    """Exclude modules and collected tests from the garbage collections during the tests.

    Measured on unit tests of router and client: 4 % less CPU time.
    """
    gc.collect()
    gc.freeze()


@dataclass(frozen=True)
class Things:
    processes: frozenset[str]
    ports: frozenset[str]
    shared_memory: frozenset[str]

    def __sub__(self, other: Things) -> Things:
        return Things(
            self.processes - other.processes,
            self.ports - other.ports,
            self.shared_memory - other.shared_memory,
        )

    def __bool__(self) -> bool:
        return bool(self.processes or self.ports or self.shared_memory)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    with leaving_nothing():
        yield


@contextmanager
def leaving_nothing() -> Iterator[None]:
    """Fail if something is left at the end that did not exist at the start."""
    before = _things()
    yield
    deadline = time.monotonic() + _TIMEOUT_S
    while (left := _left(before)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left, f"left behind: {left}"


def listening_ports(pid: int) -> set[str]:
    """Return the addresses on which a process and its descendants listen, as /proc writes them."""
    return {address for _, address in _listening(_family(pid))}


def _left(before: Things) -> Things:
    left = _things() - before
    if not left.shared_memory:
        return left
    return replace(left, shared_memory=left.shared_memory - _held_by_others())


def _things() -> Things:
    family = _family(os.getpid())
    return Things(
        processes=frozenset(_describe(pid) for pid in family if pid != os.getpid()),
        ports=frozenset(f"{pid} listens on {address}" for pid, address in _listening(family)),
        shared_memory=frozenset(os.listdir(_SHARED_MEMORY)),
    )


def _held_by_others() -> frozenset[str]:
    """Return the segments that other processes than this one and its descendants hold."""
    ours = set(_family(os.getpid()))
    others = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())
    return frozenset(name for pid in others if pid not in ours for name in _held(pid))


def _held(pid: int) -> Iterator[str]:
    """Yield the shared-memory names of a process; another user's process may be unreadable."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if f" {_SHARED_MEMORY}/" in line:
                yield line.partition(f"{_SHARED_MEMORY}/")[2]
    for descriptor in glob.iglob(f"/proc/{pid}/fd/*"):
        with suppress(OSError):
            directory, _, name = os.readlink(descriptor).rpartition("/")
            if directory == _SHARED_MEMORY:
                yield name


def _family(first: int) -> list[int]:
    """Return a process and its running descendants."""
    family = [first]
    for pid in family:
        family.extend(child for child in _children(pid) if _is_running(child))
    return family


def _children(pid: int) -> Iterator[int]:
    for children in glob.iglob(f"/proc/{pid}/task/*/children"):
        with suppress(OSError):
            yield from map(int, Path(children).read_text().split())


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _describe(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        command = "ended"
    return f"{pid} {command[:120]}"


#: Addresses of the sockets seen so far, by their names in /proc; None for those that do not listen.
_addresses: dict[str, str | None] = {}


def _listening(family: list[int]) -> Iterator[tuple[int, str]]:
    sockets = [(pid, target) for pid in family for target in _sockets(pid)]
    # The kernel takes 9 ms to list all sockets, so a socket is looked up only once.
    if any(target not in _addresses for _, target in sockets):
        listening = dict(_listening_inodes())
        _addresses.update({target: listening.get(target) for _, target in sockets})
    for pid, target in sockets:
        if (address := _addresses[target]) is not None:
            yield pid, address


def _sockets(pid: int) -> Iterator[str]:
    """Yield the sockets that may listen, as /proc names them; for this process, those that do."""
    ours = pid == os.getpid()
    for descriptor in glob.iglob(f"/proc/{pid}/fd/*"):
        with suppress(OSError):
            target = os.readlink(descriptor)
            if target.startswith("socket:") and (not ours or _listens(int(Path(descriptor).name))):
                yield target


def _listens(descriptor: int) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as ours:
        return bool(ours.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _listening_inodes() -> Iterator[tuple[str, str]]:
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines():
            # Only lines of listening sockets are split; thousands may be recently closed.
            if ":0000 0A " in line:
                fields = line.split()
                yield f"socket:[{fields[9]}]", fields[1]
