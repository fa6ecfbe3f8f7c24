"""Process that forks ranks.

Command: ``python -m cluster.local.fork_server_process PARENT CONTROL MODULE...``. PARENT is the
parent's process id; the kernel kills this process when the parent ends. CONTROL is the file
descriptor of the control socket, which is inherited and of type SOCK_SEQPACKET.

The process imports the modules once. Then it sends "ready" on the control socket, or the reason why
it cannot fork. Each message that it receives is the role (see launch.py) of a process to fork. Four
descriptors come with it: standard input, output and error, and a pipe for the exit status. The
answer is the id and the pidfd of the forked process, or the reason why the fork failed. This
process ends when the socket is closed, and all processes that it forked end too.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress

from cluster.local import process
from everlift import heap
from worker.child_process import die_with_parent

#: Limits of a received message: its number of descriptors, and the number of bytes of the role.
_NUM_DESCRIPTORS, _ROLE_BYTES = 4, 64


def main() -> None:
    parent, descriptor, *modules = sys.argv[1:]
    die_with_parent(int(parent))
    with heap.pause_gc():
        for module in modules:
            importlib.import_module(module)
    # Memory pages stay shared with the forked processes. Otherwise a garbage collection would write
    # to all of them.
    gc.freeze()
    with socket.socket(fileno=int(descriptor)) as control:
        if reason := _reason_not_to_fork():
            control.send(reason.encode())
            sys.exit(reason)
        role = ForkServer(control).run()
    if role:
        sys.argv[1:] = [role]
        process.main()


def _reason_not_to_fork() -> str:
    """Return the reason why this process must not fork; empty if it may.

    It may fork only with a single thread. A fork copies the calling thread alone, but also the
    locks that other threads hold, which are then never released.
    """
    threads = os.listdir("/proc/self/task")
    return (
        f"{len(threads)} threads run before the first fork, but only 1 is allowed"
        if len(threads) > 1
        else ""
    )


class ForkServer:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._fork_server = os.getpid()
        #: pipe for the exit status of each process that has not ended, by process id
        self._statuses: dict[int, int] = {}

    def run(self) -> str:
        """Fork a process for each message until the control socket is closed; then return "".

        This also returns in each forked process, with the role of that process.
        """
        self._woken, waking = os.pipe()
        os.set_blocking(waking, False)
        signal.set_wakeup_fd(waking)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._own = [self._woken, waking]
        self._control.send(b"ready")
        while True:
            control = self._control.fileno()
            readable, _, _ = select.select([control, self._woken], [], [])
            if self._woken in readable:
                os.read(self._woken, _ROLE_BYTES)
                self._reap()
            if control in readable:
                role, descriptors, _, _ = socket.recv_fds(
                    self._control, _ROLE_BYTES, _NUM_DESCRIPTORS
                )
                if not role:
                    return ""
                if self._fork(list(descriptors)) == 0:
                    return role.decode()

    def _fork(self, descriptors: list[int]) -> int:
        try:
            pid = os.fork()
        except OSError as error:
            # The processes that were forked before continue.
            _close(descriptors)
            self._control.send(str(error).encode())
            return -1
        if pid == 0:
            self._init_child(descriptors)
            return 0
        *others, status = descriptors
        self._statuses[pid] = status
        _close(others)
        handle = os.pidfd_open(pid)
        socket.send_fds(self._control, [b"%d" % pid], [handle])
        os.close(handle)
        return pid

    def _init_child(self, descriptors: list[int]) -> None:
        die_with_parent(self._fork_server)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for place, descriptor in enumerate(descriptors[:3]):
            os.dup2(descriptor, place)
        _close((*descriptors, *self._own, *self._statuses.values()))

    def _reap(self) -> None:
        while self._statuses:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            end = self._statuses.pop(pid)
            # The process that requested the fork may have ended.
            with suppress(BrokenPipeError):
                os.write(end, b"%d" % os.waitstatus_to_exitcode(status))
            os.close(end)


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


if __name__ == "__main__":
    main()
