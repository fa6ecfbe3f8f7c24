"""The embedded Valkey server: life cycle, data and access control."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError
from redis.retry import Retry

from everlift.messages import FinishReason
from router.ledger.config import DurabilityClass, LedgerConfig, LedgerSetupError
from router.ledger.embedded import embedded
from router.ledger.embedded.embedded import EmbeddedLedger
from router.ledger.entry import Append, Appended, State
from router.ledger.redis.redis_ledger import connect
from tests.support.ledger.ledgers import eventually, make_request, written

TERM = 1
EPOCH = 2**64 - 1


@pytest.fixture
def server() -> Iterator[EmbeddedLedger]:
    server = EmbeddedLedger()
    yield server
    server.stop()


def kill(pid: int) -> None:
    """Send SIGKILL to a server, which has exited once its lock is free."""
    os.kill(pid, signal.SIGKILL)


def runs(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


async def file_two_requests(url: str) -> None:
    """Store a finished and a running request in the server's file."""
    ledger = await connect(url)
    await ledger.lead("router", "address", TERM, 60.0)
    for request_id in ("finished", "running"):
        await ledger.open(make_request(request_id), "gateway")
        await ledger.dispatch(request_id, "worker", EPOCH, TERM)
    answers = await ledger.append(
        [
            Append("finished", EPOCH, 0, (1, 2**32 - 1), finish_reason=FinishReason.STOP),
            Append("running", EPOCH, 0, (3,)),
        ]
    )
    assert answers == [Appended.FINISHED, Appended.OK]
    await ledger.close()
    await written(url)


async def find_two_requests(url: str) -> None:
    ledger = await connect(url)
    finished, running = await ledger.read("finished"), await ledger.read("running")
    assert finished.entry.state is State.FINISHED
    assert finished.choices[0].tokens == (1, 2**32 - 1)
    assert (running.entry.state, running.choices[0].tokens) == (State.RUNNING, (3,))
    assert await ledger.orphans(10) == ["running"]
    # The dead router's term and the epoch are still valid.
    assert await ledger.append([Append("running", EPOCH, 1, (4,))]) == [Appended.OK]
    await ledger.close()


async def test_stopped_server_restores_data_on_restart(
    server: EmbeddedLedger, tmp_path: Path
) -> None:
    await file_two_requests(server.start(tmp_path))
    server.stop()
    await find_two_requests(server.start(tmp_path))


async def test_killed_server_restores_data_on_restart(
    server: EmbeddedLedger, tmp_path: Path
) -> None:
    await file_two_requests(server.start(tmp_path))
    kill(server.pid)
    server.stop()
    await find_two_requests(server.start(tmp_path))


PARENT = """
import sys, time
from pathlib import Path
from router.ledger.embedded.embedded import EmbeddedLedger
server = EmbeddedLedger()
server.start(Path(sys.argv[1]))
print(server.pid, flush=True)
time.sleep(600)
"""


async def test_server_exits_with_parent_and_successor_takes_data(
    server: EmbeddedLedger, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": "proto:."}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        url = url_of(tmp_path / "ledger")
        await file_two_requests(url)
        parent.kill()
    # The new server waits for the lock of the exiting one.
    await find_two_requests(server.start(tmp_path))

    async def is_gone() -> bool:
        return not runs(pid)

    await eventually(is_gone)


def url_of(home: Path) -> str:
    password = (home / "password").read_text()
    return f"unix://everlift:{password}@{home / 'socket'}"


async def test_server_outlives_thread_that_started_it(
    server: EmbeddedLedger, tmp_path: Path
) -> None:
    urls: list[str] = []
    thread = threading.Thread(target=lambda: urls.append(server.start(tmp_path)))
    thread.start()
    thread.join()
    await file_two_requests(urls[0])
    assert runs(server.pid)


def test_server_process_group_is_isolated_from_ctrl_c(
    server: EmbeddedLedger, tmp_path: Path
) -> None:
    server.start(tmp_path)
    assert os.getpgid(server.pid) != os.getpgid(0)


def test_stopped_server_leaves_no_process_or_socket(server: EmbeddedLedger, tmp_path: Path) -> None:
    server.start(tmp_path)
    pid = server.pid
    server.stop()
    assert not runs(pid)
    assert not (tmp_path / "ledger" / "socket").exists()
    server.stop()


def test_second_server_on_same_data_is_rejected(server: EmbeddedLedger, tmp_path: Path) -> None:
    url = server.start(tmp_path)
    with pytest.raises(LedgerSetupError, match=re.escape(str(tmp_path / "ledger"))):
        EmbeddedLedger().start(tmp_path)
    with Redis.from_url(url) as client:
        assert client.ping()


def network_sockets(pid: int) -> set[str]:
    own = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        # The server may have closed a file since it was listed.
        with suppress(FileNotFoundError):
            own.add(os.readlink(path))
    tables = (Path(f"/proc/net/{table}").read_text() for table in ("tcp", "tcp6"))
    lines = (line for table in tables for line in table.splitlines()[1:])
    return own & {f"socket:[{line.split()[9]}]" for line in lines}


def test_server_rejects_other_users_and_network_access(
    server: EmbeddedLedger, tmp_path: Path
) -> None:
    server.start(tmp_path / "state")
    home = tmp_path / "state" / "ledger"
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    for name in ("password", "valkey.conf", "lock"):
        assert stat.S_IMODE((home / name).stat().st_mode) == 0o600
    for username, password in ((None, None), ("everlift", "wrong"), ("default", "")):
        with (
            Redis(
                unix_socket_path=str(home / "socket"),
                username=username,
                password=password,
                retry=Retry(NoBackoff(), 0),
            ) as client,
            pytest.raises((AuthenticationError, ResponseError)),
        ):
            client.get("key")
    assert not network_sockets(server.pid)


@pytest.mark.parametrize(
    "command",
    [
        ["FLUSHALL"],
        ["CONFIG", "SET", "appendfsync", "no"],
        ["KEYS", "*"],
        ["SHUTDOWN"],
        ["EVAL", "return 1", "0"],
    ],
)
def test_server_acl_denies_commands_ledger_never_uses(
    server: EmbeddedLedger, tmp_path: Path, command: list[str]
) -> None:
    with (
        Redis.from_url(server.start(tmp_path)) as client,
        pytest.raises(NoPermissionError),
    ):
        client.execute_command(*command)


def test_server_password_is_stable_and_unique_per_ledger(
    server: EmbeddedLedger, tmp_path: Path
) -> None:
    urls = []
    for state_dir in (tmp_path / "a", tmp_path / "a", tmp_path / "b"):
        urls.append(urlsplit(server.start(state_dir)).password)
        server.stop()
    assert urls[0] == urls[1] != urls[2]


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "run"
    directory.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    return directory


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    """State directory whose path is too long for a socket."""
    return tmp_path / ("d" * 100)


def test_socket_moves_to_runtime_dir_for_long_path(
    server: EmbeddedLedger, runtime: Path, deep: Path
) -> None:
    url = server.start(deep)
    [directory] = runtime.iterdir()
    assert urlsplit(url).path == str(directory / "socket")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    with Redis.from_url(url) as client:
        assert client.ping()
    server.stop()
    assert not list(runtime.iterdir())


def test_failed_restart_does_not_move_the_socket(
    server: EmbeddedLedger, runtime: Path, deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.start(deep)
    kill(server.pid)
    while server.is_running:
        time.sleep(0.001)
    with monkeypatch.context() as patch, pytest.raises(LedgerSetupError, match="does not start"):
        patch.setattr(embedded, "find_binary", lambda: Path("/bin/false"))
        server.start(deep)
    assert server.pid == 0
    assert server.start(deep) == url
    server.stop()
    assert not list(runtime.iterdir())


def test_server_config_quotes_special_characters_in_path(
    server: EmbeddedLedger, tmp_path: Path
) -> None:
    with Redis.from_url(server.start(tmp_path / 'a "b" #c %20 ä{0}')) as client:
        assert client.ping()


@pytest.mark.parametrize("name", ["runs[1]", "a*b", "a?b", "{a,b}"])
def test_server_path_with_glob_characters_is_literal(
    server: EmbeddedLedger, tmp_path: Path, name: str
) -> None:
    with Redis.from_url(server.start(tmp_path / name)) as client:
        assert client.ping()
    assert not network_sockets(server.pid)


def test_server_start_failure_reports_cause(server: EmbeddedLedger, tmp_path: Path) -> None:
    server.start(tmp_path)
    server.stop()
    [base] = (tmp_path / "ledger" / "appendonlydir").glob("*.base.rdb")
    base.write_bytes(b"not a database")
    with pytest.raises(LedgerSetupError, match="Bad file format"):
        server.start(tmp_path)
    assert server.pid == 0


@pytest.mark.parametrize(
    ("durability_class", "settings"),
    [
        ("memory", {"appendonly": "no"}),
        ("everysec", {"appendonly": "yes", "appendfsync": "everysec"}),
        ("always", {"appendonly": "yes", "appendfsync": "always"}),
    ],
)
async def test_server_settings_follow_durability_class(
    tmp_path: Path, durability_class: DurabilityClass, settings: dict[str, str]
) -> None:
    config = LedgerConfig(durability_class=durability_class)
    server = EmbeddedLedger(config)
    try:
        url = server.start(tmp_path)
        ledger = await connect(replace(config, url=url))
        assert ledger.durability_class == durability_class
        assert ledger.server.startswith("Valkey ")
        await ledger.close()
        with Redis.from_url(url) as client:
            assert client.config_get("append*") | settings == client.config_get("append*")
    finally:
        server.stop()


async def test_memory_server_is_empty_after_restart(tmp_path: Path) -> None:
    server = EmbeddedLedger(LedgerConfig(durability_class="memory"))
    try:
        url = server.start(tmp_path)
        for _ in range(2):
            ledger = await connect(LedgerConfig(url=url, durability_class="memory"))
            assert (await ledger.open(make_request(), "gateway")).created
            await ledger.close()
            server.stop()
            server.start(tmp_path)
    finally:
        server.stop()


def test_memory_server_rejects_existing_persistent_data(
    server: EmbeddedLedger, tmp_path: Path
) -> None:
    server.start(tmp_path)
    server.stop()
    in_memory = EmbeddedLedger(LedgerConfig(durability_class="memory"))
    with pytest.raises(LedgerSetupError, match="remove it"):
        in_memory.start(tmp_path)


def test_server_maxmemory_follows_configuration(tmp_path: Path) -> None:
    server = EmbeddedLedger(LedgerConfig(maxmemory_mib=64))
    try:
        with Redis.from_url(server.start(tmp_path)) as client:
            assert client.info("memory")["maxmemory"] == 64 << 20
    finally:
        server.stop()
