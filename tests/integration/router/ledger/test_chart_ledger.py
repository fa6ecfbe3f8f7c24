"""The chart's own ledger server: start script and configuration, run with a real server."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError
from redis.retry import Retry

from router.ledger.config import LedgerConfig
from router.ledger.embedded.embedded import find_binary
from router.ledger.redis.redis_ledger import connect
from tests.support.chart import Rendered, running_helm
from tests.support.free_port import free_port

PASSWORDS = {"EVERLIFT_PASSWORD": "f00d", "RAY_PASSWORD": "beef"}


@pytest.fixture(scope="module")
def release() -> Rendered:
    with running_helm() as helm:
        return helm.render({"ledger": {"embedded": {"maxMemoryMiB": 64}}})


@pytest.fixture
def port(release: Rendered, tmp_path: Path) -> Iterator[int]:
    """Port of the chart's ledger server."""
    (tmp_path / "data").mkdir()
    for name, text in release.the("ConfigMap")["data"].items():
        (tmp_path / name).write_text(text.replace("dir /data", f"dir {tmp_path}/data"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "valkey-server").symlink_to(find_binary())
    port, users = free_port(), tmp_path / "users.acl"
    here = {"port": port, "bind": "127.0.0.1", "aclfile": users}
    process = subprocess.Popen(
        ["sh", tmp_path / "start.sh", tmp_path / "valkey.conf"]
        + [word for name, value in here.items() for word in (f"--{name}", str(value))],
        env=PASSWORDS | {"USERS": str(users), "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"},
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_for(process, client(port, "everlift"))
        assert oct(users.stat().st_mode & 0o777) == "0o600"
        assert not any(password in users.read_text() for password in PASSWORDS.values())
        yield port
    finally:
        process.terminate()
        process.wait()


def test_chart_router_acl_matches_ledger_readme(release: Rendered) -> None:
    readme = (Path(__file__).parents[4] / "router" / "ledger" / "README.md").read_text()
    [least] = re.findall(r"user everlift on >PASSWORD ~everlift:\* (.*?)\n\n", readme, re.DOTALL)
    script = release.the("ConfigMap")["data"]["start.sh"]
    [line] = re.findall(r'echo "user everlift on (.*?)\n[^\n]*# Commands that', script, re.DOTALL)
    # The chart adds CONFIG GET, which checks appendfsync, and PING for the probe.
    assert commands(line) == commands(least) | {"+config|get", "+ping"}


def commands(rights: str) -> set[str]:
    return set(re.findall(r"\+[\w|]+", rights))


def client(port: int, user: str) -> Any:
    password = PASSWORDS[f"{user.upper()}_PASSWORD"]
    return Redis(port=port, username=user, password=password, retry=Retry(NoBackoff(), 0))


def wait_for(server: subprocess.Popen[bytes], redis: Any) -> None:
    with redis:
        while server.poll() is None:
            try:
                redis.ping()
                return
            except RedisError:
                time.sleep(0.02)
    raise AssertionError("the server ended")


async def test_chart_router_acl_is_limited_to_release_prefix(release: Rendered, port: int) -> None:
    settings = release.settings["ledger"]
    url = f"redis://everlift:{PASSWORDS['EVERLIFT_PASSWORD']}@127.0.0.1:{port}"
    ledger = await connect(LedgerConfig(url=url, **settings))
    try:
        assert await ledger.workers() == []
        assert await ledger.cluster_id()
    finally:
        await ledger.close()
    with client(port, "everlift") as redis:
        assert redis.config_get("maxmemory") == {"maxmemory": str(64 << 20)}
        assert redis.config_get("appendonly") == {"appendonly": "yes"}
        assert redis.exists(f"{settings['key_prefix']}:layout")
        with pytest.raises(NoPermissionError):
            redis.set("other-release", 1)
        with pytest.raises(NoPermissionError):
            redis.flushall()


def test_chart_ray_user_has_separate_key_space(port: int) -> None:
    with client(port, "ray") as redis:
        redis.delete("DUMMY")
        redis.hset("RAYsome-namespace@KV", "field", "value")
        assert redis.hget("RAYsome-namespace@KV", "field") == b"value"
        assert [key for key in redis.scan_iter()] == [b"RAYsome-namespace@KV"]
        with pytest.raises(NoPermissionError):
            redis.get("ev-everlift-00000000:layout")
    with client(port, "everlift") as redis, pytest.raises(NoPermissionError):
        redis.hgetall("RAYsome-namespace@KV")


@pytest.mark.long
def test_chart_ledger_rejects_unauthenticated_clients(port: int) -> None:
    with Redis(port=port) as redis, pytest.raises(AuthenticationError):
        redis.ping()
