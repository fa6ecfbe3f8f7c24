"""Settings, urls, servers and layouts that a ledger accepts, and its use of INFO."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from everlift import settings
from everlift.errors import LedgerUnavailable, SettingsError
from router.ledger.config import PROMISES, DurabilityClass, LedgerConfig, LedgerSetupError
from router.ledger.redis import scripts
from router.ledger.redis.address import Address, Kind, parse
from router.ledger.redis.server import (
    SCHEMA,
    check_durability,
    check_layout,
    check_server,
    generation,
    knows_waitaof,
    memory_used,
)
from tests.support.ledger.ledger_servers import readme_rule


def info(policy: str = "noeviction", **versions: str) -> dict[str, object]:
    return {"maxmemory_policy": policy, **versions}


@pytest.mark.parametrize(
    ("versions", "name"),
    [
        ({"redis_version": "7.0.0"}, "Redis 7.0.0"),
        ({"redis_version": "8.2.1"}, "Redis 8.2.1"),
        ({"redis_version": "10.0.0"}, "Redis 10.0.0"),
        ({"redis_version": "7.2.4", "valkey_version": "7.2.5"}, "Valkey 7.2.5"),
        ({"redis_version": "7.2.4", "valkey_version": "9.1.2"}, "Valkey 9.1.2"),
    ],
)
def test_server_of_supported_version_is_accepted(versions: dict[str, str], name: str) -> None:
    assert check_server(info(**versions)) == name


@pytest.mark.parametrize(
    "versions",
    [
        {"redis_version": "6.2.14"},
        {"redis_version": "7.2.4", "valkey_version": "7.1.0"},
        {"redis_version": "unknown"},
        {},
    ],
)
def test_server_too_old_or_unknown_is_rejected(versions: dict[str, str]) -> None:
    with pytest.raises(LedgerSetupError, match=r"needs Valkey 7\.2 or Redis 7\.0 or newer"):
        check_server(info(**versions))


def test_server_loading_its_data_is_unavailable() -> None:
    reads = info(redis_version="7.0.15") | {"loading": 1, "aof_enabled": 0}
    with pytest.raises(LedgerUnavailable, match="is loading its data"):
        check_server(reads)
    assert check_server({**reads, "loading": 0}) == "Redis 7.0.15"


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_server_with_eviction_policy_is_rejected(policy: str) -> None:
    with pytest.raises(LedgerSetupError, match=policy):
        check_server(info(policy, redis_version="7.0.15"))


def test_cluster_node_is_accepted_only_as_cluster() -> None:
    node = info(redis_version="7.0.15") | {"cluster_enabled": 1}
    assert check_server(node, is_cluster=True) == "Redis 7.0.15"
    with pytest.raises(LedgerSetupError, match=r"redis\+cluster://"):
        check_server(node)


@pytest.mark.parametrize(
    ("demanded", "aof", "fsync", "taken"),
    [
        ("memory", 0, "no", True),
        ("memory", 1, "always", True),
        ("everysec", 0, "everysec", False),
        ("everysec", 1, "no", False),
        ("everysec", 1, "everysec", True),
        ("everysec", 1, "always", True),
        ("everysec", 1, None, True),
        ("always", 1, "everysec", False),
        ("always", 1, "always", True),
        ("always", 1, None, True),
        ("always", 0, None, False),
        ("replicated", 1, "everysec", False),
        ("replicated", 1, "always", True),
    ],
)
def test_server_must_meet_the_demanded_durability_class(
    demanded: DurabilityClass, aof: int, fsync: str | None, taken: bool
) -> None:
    if taken:
        check_durability(demanded, {"aof_enabled": aof}, fsync)
    else:
        with pytest.raises(LedgerSetupError, match=f"durability_class {demanded}"):
            check_durability(demanded, {"aof_enabled": aof}, fsync)


@pytest.mark.parametrize(
    ("versions", "knows"),
    [
        ({"redis_version": "7.0.15"}, False),
        ({"redis_version": "7.2.0"}, True),
        ({"redis_version": "7.2.4", "valkey_version": "7.2.5"}, True),
    ],
)
def test_waitaof_support_depends_on_server_version(versions: dict[str, str], knows: bool) -> None:
    assert knows_waitaof(info(**versions)) is knows


def life(run_id: str, master_replid: str) -> dict[str, object]:
    return {"run_id": run_id, "master_replid": master_replid}


def test_generation_changes_with_any_server() -> None:
    one, other = life("a", "x"), life("b", "y")
    first = generation([one, other])
    assert first == generation([other, one])
    others = [[one], [one, life("c", "y")], [life("a", "z"), other], [one, one, other]]
    assert len({first, *map(generation, others)}) == 5


def test_memory_used_is_that_of_the_fullest_server() -> None:
    free = {"used_memory": 80, "maxmemory": 0}
    half = {"used_memory": 60, "mem_not_counted_for_evict": 10, "maxmemory": 100}
    full = {"used_memory": 90, "maxmemory": 100}
    assert [memory_used(infos) for infos in ([], [free], [free, half], [full, half])] == [
        0.0,
        0.0,
        0.5,
        0.9,
    ]


def test_readme_acl_rule_allows_every_script_command() -> None:
    sources = "".join(it.source for it in vars(scripts).values() if isinstance(it, scripts.Script))
    commands = set(re.findall(r"redis\.p?call\(\s*'([A-Z]+)'", sources))
    allowed = set(re.findall(r"\+([a-z]+)", readme_rule()))
    assert len(commands) > 20
    assert {command.lower() for command in commands} <= allowed


def test_layout_with_other_schema_or_shards_is_rejected() -> None:
    config = LedgerConfig(shards=4)
    check_layout(config, SCHEMA, 4)
    with pytest.raises(LedgerSetupError, match=f"schema {SCHEMA + 1}"):
        check_layout(config, SCHEMA + 1, 4)
    with pytest.raises(LedgerSetupError, match="has 1 shards, not 4"):
        check_layout(config, SCHEMA, 1)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("unix:///run/a%20b", Address(Kind.SERVER, path="/run/a b")),
        ("redis://h", Address(Kind.SERVER, (("h", 6379),))),
        ("redis://h:1/3", Address(Kind.SERVER, (("h", 1),), db=3)),
        (
            "rediss://u:p%40%2F@h:1",
            Address(Kind.SERVER, (("h", 1),), tls=True, username="u", password="p@/"),
        ),
        (
            "redis+sentinel://:p@a:1,b/main",
            Address(Kind.SENTINEL, (("a", 1), ("b", 26379)), password="p", service="main"),
        ),
        (
            "rediss+sentinel://a/main/2",
            Address(Kind.SENTINEL, (("a", 26379),), tls=True, service="main", db=2),
        ),
        ("redis+cluster://a:1,[::1]:2", Address(Kind.CLUSTER, (("a", 1), ("::1", 2)))),
    ],
)
def test_url_is_parsed_into_server_addresses(url: str, address: Address) -> None:
    assert parse(url) == address


@pytest.mark.parametrize(
    "url",
    [
        "",
        "embedded",
        "http://u:hunter2@h",
        "unix://u:hunter2@",
        "redis://u:hunter2@",
        "redis://u:hunter2@h:port",
        "redis://u:hunter2@h:0",
        "redis://u:hunter2@h:99999",
        "redis://u:hunter2@[::1",
        "redis://u:hunter2@h\u2100",
        "redis://u:hunter2@a,b",
        "redis://u:hunter2@h/name",
        "redis://u:hunter2@h?ssl_cert_reqs=none",
        "redis://u:hunter2#@h",
        "redis+sentinel://u:hunter2@h",
        "redis+sentinel://u:hunter2@h/main/0/more",
        "redis+cluster://u:hunter2@h/1",
    ],
)
def test_invalid_url_is_rejected_without_showing_password(url: str) -> None:
    with pytest.raises(ValueError, match=r"^url must") as error:
        parse(url)
    cause: BaseException | None = error.value
    while cause is not None:
        assert "hunter2" not in str(cause)
        cause = cause.__context__


def test_address_repr_hides_credentials() -> None:
    assert "hunter2" not in repr(parse("redis://user:hunter2@h"))


def test_embedded_server_rejects_replicated_durability() -> None:
    with pytest.raises(SettingsError, match=r"^durability_class must"):
        settings.load(LedgerConfig, {"durability_class": "replicated"})


def test_tls_file_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert LedgerConfig(tls_ca="ca.pem").tls_ca == str(tmp_path / "ca.pem")


@pytest.mark.parametrize(
    "url", ["embedded", "unix:///run/x", "redis://u:p@h:1/0", "rediss+cluster://u:p@h:1"]
)
def test_config_accepts_every_url_kind_and_hides_it_in_repr(url: str) -> None:
    config = LedgerConfig(url=url)
    assert config.url == url
    assert url not in repr(config)


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"url": "http://user:secret@host"}, "url"),
        ({"url": ""}, "url"),
        ({"key_prefix": ""}, "key_prefix"),
        ({"key_prefix": "a{b}"}, "key_prefix"),
        ({"shards": 0}, "shards"),
        ({"shards": 5000}, "shards"),
        ({"retention": 0.0}, "retention"),
        ({"timeout": -1.0}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
        ({"max_connections": 0}, "max_connections"),
        ({"maxmemory_mib": 0}, "maxmemory_mib"),
        ({"memory_limit": 0.0}, "memory_limit"),
        ({"memory_limit": 1.5}, "memory_limit"),
        ({"tls_cert": "cert.pem"}, "tls_cert"),
    ],
)
def test_config_error_names_the_invalid_setting(given: dict[str, object], key: str) -> None:
    with pytest.raises(SettingsError, match=f"^{key} must") as error:
        settings.load(LedgerConfig, given)
    assert "secret" not in str(error.value)


def test_durability_classes_all_have_a_promise() -> None:
    assert PROMISES.keys() == set(get_args(DurabilityClass))
