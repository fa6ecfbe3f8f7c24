"""Throw-away Redis servers: single, with TLS and users, with a replica, sentinels, or a cluster."""

from __future__ import annotations

import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from router import ledger
from tests.support.free_port import free_port
from tests.support.ledger.ledgers import TIMEOUT_S, found, redis_binary

_README = (Path(ledger.__file__).parent / "README.md").read_text("utf-8")

HOST = "127.0.0.1"
USER, PASSWORD = "everlift", "p@ss/wörd"
SERVICE = "ledger"
SLOTS = 16384


class Server:
    """Server process on a port of its own, whose data survives a restart."""

    def __init__(self, directory: Path, *settings: str, binary: str = "") -> None:
        """Create the directory and its configuration, with the lines ``settings``."""
        directory.mkdir()
        self.port = free_port()
        self.directory = directory
        self.address = f"{HOST}:{self.port}"
        self._command = [binary or redis_binary(), str(directory / "redis.conf")]
        self._process: subprocess.Popen[bytes] | None = None
        self.write(f"port {self.port}", f"bind {HOST}", f"dir {directory}", 'save ""', *settings)

    def write(self, *lines: str) -> None:
        """Write the whole configuration file."""
        (self.directory / "redis.conf").write_text("\n".join(lines) + "\n", "utf-8")

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, *options: str) -> None:
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._command, *options],
                stdout=log,
                stderr=log,
                # Keep SIGXFSZ ignored: exceeding a file size limit is then a write error, not the
                # server's end.
                restore_signals=False,
            )

    @property
    def has_ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def client(self, **settings: Any) -> Redis:
        return Redis(
            host=HOST,
            port=self.port,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=TIMEOUT_S,
            **settings,
        )

    def ask(self, *command: str | int) -> Any:
        with self.client() as client:
            return client.execute_command(*command)

    def info(self, section: str) -> Any:
        with self.client() as client:
            return client.info(section)


DURABLE = ("appendonly yes", "maxmemory-policy noeviction")


@contextmanager
def server(*settings: str, binary: str = "") -> Iterator[Server]:
    with (
        _directory() as directory,
        _running([Server(directory / "one", *settings, binary=binary)]) as [one],
    ):
        yield one


@contextmanager
def pair(*settings: str, binary: str = "") -> Iterator[list[Server]]:
    """Run a primary and its replica; yield both."""
    settings = (*DURABLE, "repl-diskless-sync-delay 0", *settings)
    with _directory() as directory:
        primary = Server(directory / "primary", *settings, binary=binary)
        following = f"replicaof {HOST} {primary.port}"
        replica = Server(directory / "replica", following, *settings, binary=binary)
        with _running([primary, replica]) as servers:
            until(lambda: replica.info("replication")["master_link_status"] == "up")
            # The replica reports its offset for the first time up to a second after the link is up.
            primary.ask("PUBLISH", "something", "to be far in")
            until(lambda: primary.info("replication")["slave0"]["offset"] > 0)
            yield servers


@contextmanager
def sentinels(primary: Server, sentinel_rule: str) -> Iterator[list[Server]]:
    """Run three sentinels, which fail over once ``primary`` is down for half a second.

    The configuration of the last one also has the line ``sentinel_rule``, which defines a user.
    """
    settings = (
        f"sentinel monitor {SERVICE} {HOST} {primary.port} 2",
        f"sentinel down-after-milliseconds {SERVICE} 500",
        f"sentinel failover-timeout {SERVICE} 3000",
    )
    with _directory() as directory:
        three = [_sentinel(directory / f"{number}", settings) for number in range(2)]
        three.append(_sentinel(directory / "2", (*settings, sentinel_rule)))
        with _running(three, "--sentinel"):
            for one in three:
                until(lambda one=one: _knows(one))
            yield three


def _sentinel(directory: Path, settings: Sequence[str]) -> Server:
    one = Server(directory, *settings)
    # A sentinel rejects the directive "save".
    conf = directory / "redis.conf"
    conf.write_text(conf.read_text("utf-8").replace('save ""\n', ""), "utf-8")
    return one


def _knows(one: Server) -> bool:
    with one.client() as client:
        state = client.sentinel_master(SERVICE)
    return state["num-other-sentinels"] == 2 and state["num-slaves"] == 1


@contextmanager
def cluster(count: int = 3, *settings: str) -> Iterator[list[Server]]:
    """Run a cluster of ``count`` primaries without replicas, which share the slots."""
    with _directory() as directory:
        nodes = [
            Server(
                directory / f"{number}",
                *DURABLE,
                "cluster-enabled yes",
                f"cluster-port {free_port()}",
                "cluster-node-timeout 1000",
                *settings,
            )
            for number in range(count)
        ]
        with _running(nodes):
            _join(nodes)
            yield nodes


def _join(nodes: Sequence[Server]) -> None:
    bounds = [SLOTS * number // len(nodes) for number in range(len(nodes) + 1)]
    for number, node in enumerate(nodes):
        node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        node.ask("CLUSTER", "ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1)
        if number:
            bus = nodes[0].ask("CONFIG GET", "cluster-port")["cluster-port"]
            node.ask("CLUSTER", "MEET", HOST, nodes[0].port, bus)
    for node in nodes:
        until(lambda node=node: _is_joined(node, len(nodes)))


def _is_joined(node: Server, count: int) -> bool:
    with node.client() as client:
        info = client.execute_command("CLUSTER INFO")
    return bool(info["cluster_state"] == "ok" and info["cluster_known_nodes"] == str(count))


@contextmanager
def certificate(name: str = f"IP:{HOST}") -> Iterator[tuple[Path, Path]]:
    """Create a self-signed certificate and its key; yield their paths."""
    found("openssl")
    with _directory() as directory:
        cert, key = directory / "cert.pem", directory / "key.pem"
        command = "openssl req -x509 -nodes -newkey ec -pkeyopt ec_paramgen_curve:P-256 -days 2"
        command += f" -subj /CN=ledger -addext subjectAltName={name}"
        subprocess.run(
            [*command.split(), "-keyout", key, "-out", cert], check=True, capture_output=True
        )
        yield cert, key


@contextmanager
def tls_server(cert: Path, key: Path, acl: str, *settings: str) -> Iterator[Server]:
    """Run a server that requires a client certificate and a user with the rights ``acl``."""
    with _directory() as directory:
        one = Server(directory / "one")
        users = ("user default off", f"user {USER} on >{PASSWORD} {acl}")
        one.write(*tls_lines(one, cert, key), "tls-auth-clients yes", *DURABLE, *users, *settings)
        with _running([one], is_ready=_listens):
            yield one


def tls_lines(one: Server, cert: Path, key: Path) -> tuple[str, ...]:
    """Return the configuration of a server that listens only on a TLS port."""
    return (
        "port 0",
        f"tls-port {one.port}",
        f"bind {HOST}",
        f"dir {one.directory}",
        f"tls-cert-file {cert}",
        f"tls-key-file {key}",
        f"tls-ca-cert-file {cert}",
        "tls-auth-clients no",
    )


@contextmanager
def tls_sentinel(cert: Path, key: Path) -> Iterator[Server]:
    """Run a primary and its sentinel with TLS; yield the sentinel."""
    with _directory() as directory:
        primary, one = Server(directory / "primary"), Server(directory / "sentinel")
        primary.write(*tls_lines(primary, cert, key), *DURABLE)
        monitor = f"sentinel monitor {SERVICE} {HOST} {primary.port} 1"
        one.write(*tls_lines(one, cert, key), "tls-replication yes", monitor)
        with _running([primary], is_ready=_listens):
            one.start("--sentinel")
            try:
                until(lambda: "+monitor" in one.log)
                yield one
            finally:
                one.kill()


@contextmanager
def tls_cluster_node(cert: Path, key: Path) -> Iterator[Server]:
    """Run the only node of a cluster with TLS, which has all slots."""
    with _directory() as directory:
        one = Server(directory / "node")
        lines = ("cluster-enabled yes", f"cluster-port {free_port()}", "tls-cluster yes")
        one.write(*tls_lines(one, cert, key), *DURABLE, *lines)
        with _running([one], is_ready=_listens):
            with one.client(ssl=True, ssl_ca_certs=str(cert)) as client:
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, SLOTS - 1)
                until(lambda: client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")
            yield one


@contextmanager
def tls_ledger() -> Iterator[tuple[str, dict[str, str]]]:
    """Run a TLS server; yield its URL and the ledger's TLS settings.

    Its user has the rights that the README states, plus SCAN.
    """
    with certificate() as (cert, key), tls_server(cert, key, f"{readme_rule()} +scan") as one:
        yield tls_url(one), {"tls_ca": str(cert), "tls_cert": str(cert), "tls_key": str(key)}


def tls_url(one: Server, password: str = PASSWORD) -> str:
    return f"rediss://{USER}:{quote(password, safe='')}@{one.address}"


def cluster_url(nodes: Sequence[Server], login: str = "") -> str:
    return f"redis+cluster://{login}" + ",".join(node.address for node in nodes)


def sentinel_url(three: Sequence[Server], login: str = "") -> str:
    return f"redis+sentinel://{login}" + ",".join(one.address for one in three) + f"/{SERVICE}"


def readme_rule() -> str:
    """Return the ACL rule of the README for keys of any prefix, without user and password."""
    [rule] = re.findall(r"user everlift on >PASSWORD ~everlift:\* (.*?)\n\n", _README, re.DOTALL)
    return "~* " + " ".join(rule.split())


def _listens(one: Server) -> bool:
    return "Ready to accept connections" in one.log


def _answers(one: Server) -> bool:
    return one.ask("PING") is not None


@contextmanager
def _running(
    servers: list[Server], *options: str, is_ready: Callable[[Server], bool] = _answers
) -> Iterator[list[Server]]:
    try:
        for one in servers:
            one.start(*options)
        for one in servers:
            until(lambda one=one: _is_up(one, options, is_ready), lambda one=one: one.log)
        yield servers
    finally:
        for one in servers:
            one.kill()


def _is_up(one: Server, options: Sequence[str], is_ready: Callable[[Server], bool]) -> bool:
    """Return whether the server is ready; start it again if it has ended.

    It may have ended because a concurrent test was checking whether its port was free.
    """
    if one.has_ended:
        one.start(*options)
    return is_ready(one)


@contextmanager
def _directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def until(holds: Callable[[], bool], why_not: Callable[[], str] = str) -> None:
    """Wait until ``holds`` returns true; a RedisError counts as false.

    On a timeout the failure message includes ``why_not``.
    """
    give_up = time.monotonic() + 2 * TIMEOUT_S
    while True:
        try:
            if holds():
                return
        except RedisError:
            pass
        assert time.monotonic() < give_up, f"it never came true\n{why_not()}"
        time.sleep(0.02)
