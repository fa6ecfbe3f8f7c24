"""Which settings, servers and layouts a ledger takes."""

from __future__ import annotations

import pytest

from router.ledger.config import LedgerConfig, LedgerSetupError
from router.ledger.server import SCHEMA, check_layout, check_server


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
def test_a_server_from_the_floor_on_is_taken(versions: dict[str, str], name: str) -> None:
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
def test_an_older_or_unknown_server_is_refused(versions: dict[str, str]) -> None:
    with pytest.raises(LedgerSetupError, match=r"needs Valkey 7\.2 or Redis 7\.0 or newer"):
        check_server(info(**versions))


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_a_server_that_would_evict_is_refused(policy: str) -> None:
    with pytest.raises(LedgerSetupError, match=policy):
        check_server(info(policy, redis_version="7.0.15"))


def test_a_layout_is_taken_as_it_was_made_and_no_other() -> None:
    config = LedgerConfig(shards=4)
    check_layout(config, SCHEMA, 4)
    with pytest.raises(LedgerSetupError, match=f"schema {SCHEMA + 1}"):
        check_layout(config, SCHEMA + 1, 4)
    with pytest.raises(LedgerSetupError, match="has 1 shards, not 4"):
        check_layout(config, SCHEMA, 1)


@pytest.mark.parametrize(
    "url", ["embedded", "unix:///run/x", "redis://u:p@h:1/0", "rediss://u:p@h:1"]
)
def test_a_url_of_every_kind_is_taken_and_not_shown(url: str) -> None:
    config = LedgerConfig(url=url)
    assert config.url == url
    assert url not in repr(config)


@pytest.mark.parametrize(
    ("settings", "key"),
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
    ],
)
def test_a_setting_that_cannot_be_is_named(settings: dict[str, object], key: str) -> None:
    with pytest.raises(ValueError, match=f"^{key} must") as error:
        LedgerConfig(**settings)  # type: ignore[arg-type]
    assert "secret" not in str(error.value)
