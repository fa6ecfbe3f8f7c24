"""Check for router ports that are in use, and for the processes that use them."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from cluster.errors import ClusterFailed
from router.config import Listener, RouterConfig

_LISTENING = "0A"


def check(routers: Iterable[RouterConfig]) -> None:
    """Raise ClusterFailed if a port on which a router is to listen is in use.

    The error names the setting of each such port and the process that uses it, unless that process
    is invisible to this user.
    """
    listeners = [each for router in routers for each in router.listeners if each.host and each.port]
    conflicts = [_describe_conflict(each) for each in listeners if _is_in_use(each)]
    if conflicts:
        settings = sorted({f"router.{each.setting}" for each in listeners if _is_in_use(each)})
        raise ClusterFailed(
            f"{'; '.join(conflicts)}. Stop that process, or set {', '.join(settings)} to another "
            "port (0: any free one)"
        )


def _is_in_use(listener: Listener) -> bool:
    try:
        found = socket.getaddrinfo(listener.host, listener.port, type=socket.SOCK_STREAM)
    except OSError:
        # The router itself reports an invalid host.
        return False
    family, kind, _, _, address = found[0]
    with socket.socket(family, kind) as probe:
        # Routers set this option, too. With it, connections of an earlier process that are still
        # closing do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def _describe_conflict(listener: Listener) -> str:
    pid = next(_holders(listener.port), None)
    holder = f"process {pid} ({_command(pid)})" if pid is not None else "another user's process"
    place = f"{listener.host}:{listener.port}"
    return f"router.{listener.setting}: {place} is in use by {holder}"


def _holders(port: int) -> Iterator[int]:
    """Yield the ids of the processes that listen on ``port``, as far as this user may see them."""
    sockets = {f"socket:[{inode}]" for inode in _inodes(port)}
    if not sockets:
        return
    for process in Path("/proc").glob("[0-9]*"):
        # The process may have ended, or belong to another user.
        with suppress(OSError):
            if any(os.readlink(each) in sockets for each in (process / "fd").iterdir()):
                yield int(process.name)


def _inodes(port: int) -> Iterator[str]:
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path("/proc/net", name).read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == _LISTENING and int(local.rpartition(":")[2], 16) == port:
                    yield inode


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "already ended"
    return " ".join(words).strip()[:80]
