"""Access: keys, their document, and its stores."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from everlift.errors import Forbidden, LedgerUnavailable, OutOfRange, SettingsError, Unauthenticated
from everlift.messages import Submission
from everlift.v1 import inference_pb2 as pb
from router.auth import key as keys
from router.auth.access import Access, Table, store_of
from router.auth.caller import Caller, Scope
from router.auth.document import Document, changes, from_plain, from_records
from router.auth.file_store import FileStore
from router.auth.key import Key
from router.auth.limits import NO_LIMITS, Limits
from router.auth.store import LedgerStore
from router.config import RouterConfig
from router.ledger.memory.memory import MemoryLedger

ID, SECRET = "0123456789ab", "s" * 43
SHOWN = keys.join_key(ID, SECRET)
CREATED = "2030-01-31T12:00:00Z"
NOW = 1_900_000_000.0


def make_key(tenant: str = "acme", *scopes: Scope, expires: str | None = None) -> Key:
    return Key(tenant, scopes or (Scope.INFER,), keys.hash_of(SECRET), CREATED, expires, "laptop")


DOCUMENT = Document(
    {ID: make_key()},
    {"*": {"max_tokens": 50, "max_concurrent": 9}, "acme": {"max_tokens": None}},
)


def table(key: Key | None = None) -> Table:
    return Table(DOCUMENT.with_key(ID, key or make_key()))


def refusal(headers: Mapping[str, str], now: float = NOW, key: Key | None = None) -> str:
    with pytest.raises(Unauthenticated) as refused:
        table(key).admit(headers, now)
    return str(refused.value)


# keys


def test_key_parts_round_trip() -> None:
    key_id, secret = keys.new_id(), keys.new_secret()
    assert keys.split_key(keys.join_key(key_id, secret)) == (key_id, secret)
    assert len({keys.new_secret() for _ in range(100)}) == 100


@pytest.mark.parametrize(
    "shown",
    ["", "ev", SHOWN[:-1], SHOWN + "s", SHOWN.upper(), f" {SHOWN}", SHOWN.replace("_", "-")],
)
def test_malformed_key_has_no_parts(shown: str) -> None:
    assert keys.split_key(shown) is None


def test_key_stores_only_the_hash_of_its_secret() -> None:
    key = make_key()
    assert key.matches(SECRET)
    assert not key.matches(SECRET[:-1])
    assert SECRET not in repr(key) and key.sha256 not in repr(key)


@pytest.mark.parametrize(
    ("text", "seconds"), [("1m", 60.0), ("12h", 43_200.0), ("90d", 90 * 86_400.0)]
)
def test_duration_accepts_minutes_hours_and_days(text: str, seconds: float) -> None:
    assert keys.duration(text) == seconds


@pytest.mark.parametrize("text", ["", "1", "1s", "0d", "-1d", "1.5h", "1 d", "9999999d"])
def test_duration_rejects_malformed_text(text: str) -> None:
    with pytest.raises(ValueError, match="such as 30m"):
        keys.duration(text)


def test_key_expiry_has_second_precision() -> None:
    key = make_key(expires=keys.iso_timestamp(NOW + 0.9))
    assert [key.has_expired(NOW + more) for more in (-1.0, 0.0, 1.0)] == [False, True, True]


# authentication


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {SHOWN}"},
        {"authorization": f"bearer  {SHOWN} "},
        {"x-api-key": SHOWN},
        {"api-key": SHOWN},
        {"authorization": f"Bearer {SHOWN}", "x-api-key": "another one's"},
        {"authorization": "", "x-api-key": SHOWN},
    ],
)
def test_key_is_accepted_in_several_headers(headers: dict[str, str]) -> None:
    limits = Limits(max_concurrent=9)
    assert table().admit(headers, NOW) == Caller("acme", frozenset({Scope.INFER}), limits)


@pytest.mark.parametrize(
    "shown",
    [
        "nonsense",
        SHOWN[:-1] + "t",
        keys.join_key("ffffffffffff", SECRET),
        pytest.param(keys.join_key("ffffffffffff", keys.new_secret()), id="nobody's"),
        f"{SHOWN},Bearer {SHOWN}",
        "",
    ],
)
def test_unknown_key_is_rejected_without_quoting_it(shown: str) -> None:
    said = refusal({"authorization": f"Bearer {shown}"})
    assert said == "unknown API key"
    assert refusal({"authorization": f"Basic {shown}"}) == (
        "the authorization header must be: Bearer KEY"
    )


def test_missing_key_is_rejected_with_instructions() -> None:
    assert refusal({}) == "an API key is required: send it as authorization: Bearer KEY"


def test_expired_key_is_rejected() -> None:
    key = make_key(expires=keys.iso_timestamp(NOW))
    headers = {"x-api-key": SHOWN}
    assert table(key).admit(headers, NOW - 1).tenant == "acme"
    assert refusal(headers, NOW, key) == f"the API key {ID} has expired"
    # Only a caller that has the secret learns that the key existed.
    assert "unknown API key" in refusal(
        {"x-api-key": keys.join_key(ID, keys.new_secret())}, NOW, key
    )


def test_key_is_limited_to_its_scopes() -> None:
    caller = table(make_key("ops", Scope.METRICS)).admit({"x-api-key": SHOWN}, NOW)
    caller.check(Scope.METRICS)
    for scope in (Scope.INFER, Scope.ADMIN):
        with pytest.raises(Forbidden):
            caller.check(scope)


# limits


def test_tenant_limits_override_the_defaults() -> None:
    assert DOCUMENT.limits_of("acme") == Limits(max_concurrent=9)
    assert table().limits_of("acme") == Limits(max_concurrent=9)
    assert table().limits_of("another") == Limits(max_tokens=50, max_concurrent=9)
    assert Document().limits_of("another") == NO_LIMITS


def submission(**fields: object) -> Submission:
    message = pb.GenerateRequest(text="hi", **fields)  # type: ignore[arg-type]
    return Submission.from_proto(message, "acme/r", seed=1)


@pytest.mark.parametrize(
    ("fields", "fitted"),
    [({}, 10), ({"n": 3}, 3), ({"max_tokens": 10}, 10), ({"n": 5, "max_tokens": 2}, 2)],
)
def test_max_tokens_defaults_to_the_tenant_limit(fields: dict[str, int], fitted: int) -> None:
    assert Limits(max_tokens=10).fitted(submission(**fields)).max_tokens == fitted


@pytest.mark.parametrize("fields", [{"max_tokens": 11}, {"n": 6, "max_tokens": 2}, {"n": 11}])
def test_max_tokens_above_the_tenant_limit_is_rejected(fields: dict[str, int]) -> None:
    with pytest.raises(OutOfRange, match="from 1 to 10"):
        Limits(max_tokens=10).fitted(submission(**fields))


def test_priority_above_the_tenant_limit_is_rejected() -> None:
    limits = Limits(max_priority=-1)
    assert limits.fitted(submission(priority=-1)).priority == -1
    with pytest.raises(OutOfRange, match="max_priority"):
        limits.fitted(submission())


def test_submission_without_limits_is_unchanged() -> None:
    one = submission(n=128, priority=10)
    assert NO_LIMITS.fitted(one) is one


# stored form


def test_document_round_trips_as_yaml_and_records() -> None:
    document = DOCUMENT.with_key("ffffffffffff", make_key("ops", *Scope, expires=CREATED))
    assert from_plain(yaml.safe_load(yaml.safe_dump(document.to_plain()))) == document
    assert from_records(document.to_records()) == document
    assert from_plain(None) == from_records({}) == Document()


def test_document_accepts_unquoted_timestamps() -> None:
    fields = f"{{tenant: a, scopes: [infer], sha256: {'a' * 64}, created: {CREATED}}}"
    text = f"keys: {{'{ID}': {fields}}}"
    assert from_plain(yaml.safe_load(text)).keys[ID].created.startswith("2030-01-31T12:00:00")


@pytest.mark.parametrize(
    ("plain", "cause"),
    [
        ([], "the document"),
        ({"key": {}}, "key: unknown section; expected keys or tenants"),
        ({"keys": {"short": {}}}, "an id must be 12"),
        ({"keys": {ID: {"tenant": "acme"}}}, f"keys.{ID}.*must be set"),
        ({"keys": {ID: {"tenant": "Not One"}}}, f"keys.{ID}"),
        ({"tenants": {"Not One": {}}}, "tenant's name"),
        ({"tenants": {"acme": {"max_token": 1}}}, "tenants.acme.max_token: unknown key; did you"),
        ({"tenants": {"acme": {"max_tokens": 0}}}, "tenants.acme.max_tokens must be from 1"),
        ({"tenants": {"acme": {"max_tokens": "many"}}}, "must be an integer"),
        ({"tenants": {"acme": {"max_priority": 11}}}, "from -10 to 10"),
    ],
)
def test_malformed_document_is_rejected_with_its_path(plain: object, cause: str) -> None:
    with pytest.raises(SettingsError, match=cause):
        from_plain(plain)


@pytest.mark.parametrize(
    "change",
    [
        {"scopes": []},
        {"scopes": ["root"]},
        {"sha256": "short"},
        {"created": "yesterday"},
        {"created": "2030-01-31T12:00:00"},
        {"name": "a\nb"},
        {"secret": SECRET},
    ],
)
def test_document_rejects_an_invalid_key(change: dict[str, object]) -> None:
    plain = DOCUMENT.to_plain()
    plain["keys"][ID] |= change
    with pytest.raises(SettingsError, match=f"^keys.{ID}") as refused:
        from_plain(plain)
    assert plain["keys"][ID]["sha256"] == "short" or "0" * 8 not in str(refused.value)


def test_document_changes_contain_only_differences() -> None:
    after = DOCUMENT.with_key(ID, None).with_tenant("acme", {"max_tokens": 7})
    assert changes(DOCUMENT, after) == {
        f"keys/{ID}": None,
        "tenants/acme": json.dumps({"max_tokens": 7}),
    }
    assert changes(DOCUMENT, DOCUMENT) == {}


# stores


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "access" / "keys.yaml"


async def test_key_file_is_created_for_its_owner_only(path: Path) -> None:
    store = FileStore(path)
    assert await store.change(lambda _: DOCUMENT) == DOCUMENT
    assert await store.read_if_changed() == DOCUMENT
    assert await store.read_if_changed() is None
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.parent.iterdir()] == [path.name]


async def test_concurrent_key_file_edits_are_serialized(path: Path) -> None:
    ids = [f"{number:012x}" for number in range(20)]
    edits = [
        FileStore(path).change(
            lambda document, key_id=key_id: document.with_key(key_id, make_key())
        )
        for key_id in ids
    ]
    await asyncio.gather(*edits)
    document = await FileStore(path).read_if_changed()
    assert document is not None
    assert sorted(document.keys) == ids


async def test_failed_key_file_edit_changes_nothing(path: Path) -> None:
    store = FileStore(path)
    await store.change(lambda _: DOCUMENT)
    with pytest.raises(SettingsError):
        await store.change(lambda document: document.with_tenant("acme", {"max_tokens": 0}))
    assert await store.read_if_changed() == DOCUMENT


@pytest.mark.parametrize("text", ["{", "a: 2030-13-45", "[" * 10_000, "\xff"])
async def test_unreadable_key_file_is_named_in_one_line(path: Path, text: str) -> None:
    await FileStore(path).change(lambda _: DOCUMENT)
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(SettingsError, match=str(path)) as caught:
        await FileStore(path).read_if_changed()
    assert "\n" not in str(caught.value)


async def test_world_writable_key_file_is_rejected(path: Path) -> None:
    await FileStore(path).change(lambda _: DOCUMENT)
    path.chmod(0o602)
    with pytest.raises(SettingsError, match="chmod o-w"):
        await FileStore(path).read_if_changed()


async def test_world_readable_key_file_is_logged_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = FileStore(path)
    await store.change(lambda _: DOCUMENT)
    path.chmod(0o644)
    for _ in range(2):
        os.utime(path)
        assert await store.read_if_changed() == DOCUMENT
    assert [record.getMessage() for record in caplog.records] == [
        "key file is readable by everyone"
    ]


async def test_ledger_store_returns_only_changed_documents() -> None:
    ledger = MemoryLedger(time.monotonic)
    store, other = LedgerStore(ledger), LedgerStore(ledger)
    assert await store.read_if_changed() == Document()
    assert await store.read_if_changed() is None
    await other.change(lambda _: DOCUMENT)
    assert await store.read_if_changed() == DOCUMENT
    await other.change(lambda document: document)
    assert await store.read_if_changed() is None


def test_store_is_chosen_by_the_settings() -> None:
    ledger = MemoryLedger(time.monotonic)
    assert store_of(RouterConfig(), ledger) is None
    assert isinstance(store_of(RouterConfig(access="ledger"), ledger), LedgerStore)
    config = RouterConfig(access="file", access_file="keys.yaml")
    assert Path(config.access_file).is_absolute()
    assert isinstance(store_of(config, ledger), FileStore)


@pytest.mark.parametrize("settings", [{"access": "file"}, {"access_file": "keys.yaml"}])
def test_access_and_access_file_settings_must_agree(settings: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="access_file"):
        RouterConfig(**settings)  # type: ignore[arg-type]


# reload


async def opened(path: Path, document: Document = DOCUMENT) -> Access:
    await FileStore(path).change(lambda _: document)
    return await Access.open(FileStore(path))


def tenant(access: Access) -> str | None:
    try:
        return access.admit({"x-api-key": SHOWN}).tenant
    except Unauthenticated:
        return None


async def test_access_reload_applies_file_changes(path: Path) -> None:
    access = await opened(path)
    assert tenant(access) == "acme"
    await FileStore(path).change(lambda document: document.with_key(ID, make_key("other")))
    await access.reload()
    assert tenant(access) == "other"
    await FileStore(path).change(lambda document: document.with_key(ID, None))
    await access.reload()
    assert tenant(access) is None


async def test_access_reload_follows_a_kubernetes_secret_swap(tmp_path: Path) -> None:
    """Kubernetes mounts keys.yaml -> ..data/keys.yaml, and replaces the link ..data by a rename."""
    for name, owner in (("old", "acme"), ("new", "other")):
        (tmp_path / name).mkdir()
        text = yaml.safe_dump(Document({ID: make_key(owner)}).to_plain())
        (tmp_path / name / "keys.yaml").write_text(text)
    (tmp_path / "..data").symlink_to("old")
    (tmp_path / "keys.yaml").symlink_to("..data/keys.yaml")
    access = await Access.open(FileStore(tmp_path / "keys.yaml"))
    assert tenant(access) == "acme"
    (tmp_path / "..data_tmp").symlink_to("new")
    (tmp_path / "..data_tmp").rename(tmp_path / "..data")
    await access.reload()
    assert tenant(access) == "other"


@pytest.mark.parametrize("text", ["keys: [", "keys: {x: {}}", "\xff", "gone"])
async def test_broken_access_file_keeps_keys_and_is_logged_once(
    path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    access = await opened(path)
    if text == "gone":
        path.unlink()
    else:
        path.write_bytes(text.encode("latin-1"))
    for _ in range(3):
        await access.reload()
        assert tenant(access) == "acme"
    assert [record.getMessage() for record in caplog.records] == ["access file not reloaded"]
    path.unlink(missing_ok=True)
    await FileStore(path).change(lambda _: Document({ID: make_key("other")}))
    await access.reload()
    assert tenant(access) == "other"


async def test_access_open_requires_its_file(path: Path) -> None:
    with pytest.raises(SettingsError, match="everlift key create"):
        await Access.open(FileStore(path))


async def test_access_is_unchanged_during_a_ledger_outage() -> None:
    class Away(MemoryLedger):
        is_away = False

        async def access(self, known: int = -1):  # type: ignore[no-untyped-def]
            if self.is_away:
                raise LedgerUnavailable
            return await super().access(known)

    ledger = Away(time.monotonic)
    await LedgerStore(ledger).change(lambda _: DOCUMENT)
    access = await Access.open(LedgerStore(ledger))
    ledger.is_away = True
    await access.reload()
    assert tenant(access) == "acme"
