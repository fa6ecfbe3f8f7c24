"""``everlift key`` and ``everlift tenant`` on a file."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import yaml

from router.auth.caller import Scope
from router.auth.document import Document, from_plain
from router.auth.key import split_key
from tests.support.commands import run

Command = Callable[..., Awaitable[str]]
KEY = r"ev_[0-9a-f]{12}_[A-Za-z0-9_-]{43}\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


@pytest.fixture
def command(path: Path) -> Command:
    async def run_on_file(*arguments: str, status: int = 0) -> str:
        place = ["--set", "router.access=file", "--set", f"router.access_file={path}"]
        return await run(*arguments, *place, status=status)

    return run_on_file


def kept(path: Path) -> Document:
    return from_plain(yaml.safe_load(path.read_text()))


async def test_key_create_prints_the_secret_once_and_stores_a_hash(
    command: Command, path: Path
) -> None:
    said = await command("key", "create", "--tenant", "acme", "--name", "laptop")
    assert re.fullmatch(KEY, said)
    key_id, secret = split_key(said.strip()) or ("", "")
    key = kept(path).keys[key_id]
    assert (key.tenant, key.scopes, key.expires, key.name) == (
        "acme",
        (Scope.INFER,),
        None,
        "laptop",
    )
    assert key.matches(secret)
    assert secret not in path.read_text()
    for shown in (await command("key", "list"), await command("key", "list", "--json")):
        assert key_id in shown and "laptop" in shown
        assert secret not in shown and key.sha256 not in shown


async def test_key_list_shows_brackets_in_names_literally(command: Command) -> None:
    for name in ("laptop [/home]", "[bold]"):
        await command("key", "create", "--tenant", "acme", "--name", name)
    shown = " ".join((await command("key", "list")).split())
    assert "laptop [/home]" in shown and "[bold]" in shown


async def test_key_create_sets_scopes_and_expiry(command: Command, path: Path) -> None:
    scopes = ["--scope", "admin", "--scope", "metrics"]
    await command("key", "create", "--tenant", "ops", *scopes, "--expires", "12h")
    [key] = kept(path).keys.values()
    assert key.scopes == (Scope.ADMIN, Scope.METRICS)
    assert key.expires is not None and key.expires > key.created


async def test_key_rotate_adds_a_successor_and_expires_the_old_key(
    command: Command, path: Path
) -> None:
    first = split_key((await command("key", "create", "--tenant", "acme", "--name", "a")).strip())
    assert first is not None
    second = split_key((await command("key", "rotate", first[0])).strip())
    assert second is not None
    old, new = (kept(path).keys[key_id] for key_id, _ in (first, second))
    assert old.matches(first[1]) and new.matches(second[1])
    assert old.expires is not None and new.expires is None
    assert (new.tenant, new.scopes, new.name) == (old.tenant, old.scopes, old.name)
    # A longer overlap does not extend the life of a key that expires sooner.
    await command("key", "rotate", first[0], "--overlap", "90d")
    assert kept(path).keys[first[0]].expires == old.expires


async def test_key_revoke_removes_the_key(command: Command, path: Path) -> None:
    made = split_key((await command("key", "create", "--tenant", "acme")).strip())
    assert made is not None
    assert made[0] in await command("key", "revoke", made[0])
    assert kept(path).keys == {}


async def test_tenant_set_changes_limits_individually(command: Command, path: Path) -> None:
    await command("tenant", "set", "*", "--max-tokens", "5", "--max-priority", "-3")
    await command("tenant", "set", "acme", "--max-concurrent", "7", "--max-priority", "none")
    shown = json.loads(await command("tenant", "list", "--json"))
    unset = {**dict.fromkeys(shown["*"]), "weight": 1}
    assert shown == {
        "*": unset | {"max_tokens": 5, "max_priority": -3},
        "acme": unset | {"max_tokens": 5, "max_concurrent": 7},
    }
    await command("tenant", "set", "acme", "--max-concurrent", "default", "--max-tokens", "9")
    assert kept(path).tenants["acme"] == {"max_priority": None, "max_tokens": 9}
    await command("tenant", "set", "acme", "--max-priority", "default", "--max-tokens", "default")
    assert kept(path).tenants == {"*": {"max_tokens": 5, "max_priority": -3}}


async def test_tenant_weight_is_set_and_reset(command: Command, path: Path) -> None:
    await command("tenant", "set", "acme", "--weight", "3")
    shown = json.loads(await command("tenant", "list", "--json"))
    assert (shown["acme"]["weight"], shown["*"]["weight"]) == (3, 1)
    await command("tenant", "set", "acme", "--weight", "default")
    assert not kept(path).tenants


async def test_tenant_list_shows_default_limits_for_tenants_with_keys(command: Command) -> None:
    await command("key", "create", "--tenant", "acme")
    await command("tenant", "set", "*", "--requests-per-minute", "60")
    shown = json.loads(await command("tenant", "list", "--json"))
    assert shown["acme"] == shown["*"]
    assert shown["acme"]["requests_per_minute"] == 60
    assert "acme" in await command("tenant", "list")


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        ("key create --tenant Not_One", "tenant"),
        ("key create --tenant acme --expires soon", "--expires: must be minutes"),
        ("key rotate 0123456789ab", "there is no key 0123456789ab"),
        ("key rotate 0123456789ab --overlap 1w", "--overlap: must be minutes"),
        ("key revoke 0123456789ab", "there is no key"),
        ("tenant set Not_One --max-tokens 5", "tenant's name"),
        ("tenant set acme --max-tokens 0", "max_tokens must be from 1"),
        ("tenant set acme --weight 0", "weight must be from 1 to 1000"),
        ("tenant set acme --weight none", "weight: must be an integer"),
        ("tenant set acme --max-tokens many", "--max-tokens: must be a number, none or default"),
    ],
)
async def test_access_commands_report_invalid_arguments_in_one_line(
    command: Command, path: Path, arguments: str, cause: str
) -> None:
    said = await command(*arguments.split(), status=1)
    assert cause in said
    assert len(said.splitlines()) == 1
    assert not path.exists()


async def test_access_commands_fail_with_access_off() -> None:
    for command in (["key", "create", "--tenant", "acme"], ["key", "list"], ["tenant", "list"]):
        assert "router.access is off" in await run(*command, status=1)


async def test_key_list_without_a_ledger_suggests_everlift_up(tmp_path: Path) -> None:
    place = ["--set", "router.access=ledger", "--set", f"state_dir={tmp_path}"]
    assert "everlift up" in await run("key", "list", *place, status=1)
