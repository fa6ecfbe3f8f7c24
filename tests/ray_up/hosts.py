"""Hosts on this machine: Linux namespaces with an ssh server in each.

    this machine  10.77.0.1 ── bridge ─┬─ 10.77.0.10  sshd
                                       └─ 10.77.0.11  sshd ...

Each host has its own processes, address, /root, /run, /tmp/ray and /dev/shm. They require Linux,
root, iproute2, openssh-server and rsync.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

_NET = "10.77.0"
_HERE = f"{_NET}.1"
_SSHD = "/usr/sbin/sshd"
_READY_S = 20.0
_SSHD_CONFIG = """\
ListenAddress {address}
HostKey {keys}/host
AuthorizedKeysFile {keys}/user.pub
PasswordAuthentication no
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PidFile none
Subsystem sftp internal-sftp
"""
#: Start script of a host. Python may be below /root, which is replaced by the host's own directory.
_LIVE = """\
set -e
mount --make-rprivate /
hostname {name}
mkdir -p {keep} /tmp/ray /run/sshd
if [ -n "{python}" ]; then mount --bind {python} {keep}; fi
for own in /root /run /tmp/ray /dev/shm; do mount -t tmpfs none $own; done
mkdir -p /run/sshd
if [ -n "{python}" ]; then mkdir -p {python}; mount --bind {keep} {python}; fi
exec {sshd} -D -e -f {config}
"""


def missing() -> list[str]:
    """Return the programs and rights that this machine lacks for the hosts."""
    lacks = [name for name in ("ip", "unshare", "rsync", "ssh-keygen") if not shutil.which(name)]
    if not Path(_SSHD).exists():
        lacks.append("sshd")
    if os.geteuid():
        lacks.append("root")
    return lacks


class Host:
    """Host made of namespaces, which is initially off."""

    def __init__(self, number: int, work: Path) -> None:
        self.name = f"everlift{number}"
        self.address = f"{_NET}.{number}"
        self._work = work
        self._log = work / f"{self.name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def power_on(self) -> None:
        _ip("netns", "add", self.name)
        _ip(
            "link", "add", self._outside, "type", "veth", "peer", "name", "eth0", "netns", self.name
        )
        _ip("link", "set", self._outside, "master", Hosts.BRIDGE, "up")
        _ip("-n", self.name, "addr", "add", f"{self.address}/24", "dev", "eth0")
        for link in ("eth0", "lo"):
            _ip("-n", self.name, "link", "set", link, "up")
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *self._unshare(), "bash", "-c", self._script()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def power_off(self) -> None:
        """Switch the host off at once, with all its processes."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
            _ip("netns", "del", self.name)

    def unplug(self) -> None:
        """Disconnect the host's network cable."""
        _ip("link", "set", self._outside, "down")

    def plug_in(self) -> None:
        _ip("link", "set", self._outside, "up")

    def run(self, command: str, timeout_s: float = 60.0) -> str:
        """Run a command over ssh; return its standard output. Raises CalledProcessError."""
        ssh = [
            "ssh",
            "-i",
            str(self._work / "user"),
            *_SSH_OPTIONS,
            f"root@{self.address}",
            command,
        ]
        return subprocess.run(
            ssh, capture_output=True, text=True, check=True, timeout=timeout_s
        ).stdout

    @property
    def _outside(self) -> str:
        return f"ev-{self.name.removeprefix('everlift')}"

    def _unshare(self) -> list[str]:
        # Killing the first process of a PID namespace kills all its processes.
        return ["unshare", "--pid", "--mount", "--uts", "--fork", "--kill-child", "--mount-proc"]

    def _script(self) -> str:
        config = self._work / f"{self.name}.sshd"
        config.write_text(_SSHD_CONFIG.format(address=self.address, keys=self._work))
        python = Path(sys.base_prefix)
        keep = self._work / f"{self.name}.python"
        return _LIVE.format(
            name=self.name,
            python=python if python.is_relative_to("/root") else "",
            keep=keep,
            sshd=_SSHD,
            config=config,
        )


_SSH_OPTIONS = [
    "-o",
    "StrictHostKeyChecking=no",
    "-o",
    "UserKnownHostsFile=/dev/null",
    "-o",
    "LogLevel=ERROR",
    "-o",
    "ConnectTimeout=3",
]


class Hosts:
    """Context manager of hosts that can be reached inside it: ``with Hosts(3, work) as hosts``.

    ``key`` is the private key of the user who may log in.
    """

    BRIDGE = "ev-bridge"

    def __init__(self, count: int, work: Path) -> None:
        self.key = work / "user"
        self.all = [Host(10 + i, work) for i in range(count)]
        self._work = work

    def __enter__(self) -> Self:
        self._work.mkdir(parents=True, exist_ok=True)
        for name in ("host", "user"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._work / name)],
                check=True,
            )
        try:
            _ip("link", "add", self.BRIDGE, "type", "bridge")
            _ip("addr", "add", f"{_HERE}/24", "dev", self.BRIDGE)
            _ip("link", "set", self.BRIDGE, "up")
            for host in self.all:
                host.power_on()
            for host in self.all:
                _await_ssh(host)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def _end(self) -> None:
        for host in self.all:
            host.power_off()
        subprocess.run(["ip", "link", "del", self.BRIDGE], check=False, stderr=subprocess.DEVNULL)


def _await_ssh(host: Host) -> None:
    give_up = time.monotonic() + _READY_S
    while True:
        try:
            host.run("true", 5.0)
            return
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            if time.monotonic() > give_up:
                raise
        time.sleep(0.2)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
