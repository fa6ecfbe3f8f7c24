"""Who may come in: keys, their table, and the places where they are kept."""

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
SHOWN = keys.whole(ID, SECRET)
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


def test_a_new_key_is_read_as_what_it_was_made_of() -> None:
    key_id, secret = keys.new_id(), keys.new_secret()
    assert keys.parts(keys.whole(key_id, secret)) == (key_id, secret)
    assert len({keys.new_secret() for _ in range(100)}) == 100


@pytest.mark.parametrize(
    "shown",
    ["", "ev", SHOWN[:-1], SHOWN + "s", SHOWN.upper(), f" {SHOWN}", SHOWN.replace("_", "-")],
)
def test_what_is_no_key_has_no_parts(shown: str) -> None:
    assert keys.parts(shown) is None


def test_a_key_keeps_nothing_of_its_secret_but_the_hash() -> None:
    key = make_key()
    assert key.opens_with(SECRET)
    assert not key.opens_with(SECRET[:-1])
    assert SECRET not in repr(key) and key.sha256 not in repr(key)


@pytest.mark.parametrize(
    ("text", "seconds"), [("1m", 60.0), ("12h", 43_200.0), ("90d", 90 * 86_400.0)]
)
def test_times_are_written_in_minutes_hours_or_days(text: str, seconds: float) -> None:
    assert keys.duration(text) == seconds


@pytest.mark.parametrize("text", ["", "1", "1s", "0d", "-1d", "1.5h", "1 d", "9999999d"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as 30m"):
        keys.duration(text)


def test_a_moment_is_written_and_read_to_the_second() -> None:
    key = make_key(expires=keys.moment(NOW + 0.9))
    assert [key.has_expired(NOW + more) for more in (-1.0, 0.0, 1.0)] == [False, True, True]


# who comes


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
def test_a_key_may_come_in_several_headers(headers: dict[str, str]) -> None:
    limits = Limits(max_concurrent=9)
    assert table().admit(headers, NOW) == Caller("acme", frozenset({Scope.INFER}), limits)


@pytest.mark.parametrize(
    "shown",
    [
        "nonsense",
        SHOWN[:-1] + "t",
        keys.whole("ffffffffffff", SECRET),
        pytest.param(keys.whole("ffffffffffff", keys.new_secret()), id="nobody's"),
        f"{SHOWN},Bearer {SHOWN}",
        "",
    ],
)
def test_any_other_key_is_refused_without_a_word_of_it(shown: str) -> None:
    said = refusal({"authorization": f"Bearer {shown}"})
    assert said == "unknown API key"
    assert refusal({"authorization": f"Basic {shown}"}) == (
        "the authorization header must be: Bearer KEY"
    )


def test_who_shows_nothing_is_told_how() -> None:
    assert refusal({}) == "an API key is required: send it as authorization: Bearer KEY"


def test_a_key_that_has_expired_opens_nothing() -> None:
    key = make_key(expires=keys.moment(NOW))
    headers = {"x-api-key": SHOWN}
    assert table(key).admit(headers, NOW - 1).tenant == "acme"
    assert refusal(headers, NOW, key) == f"the API key {ID} has expired"
    # Only who has the secret learns that there was such a key.
    assert "unknown API key" in refusal({"x-api-key": keys.whole(ID, keys.new_secret())}, NOW, key)


def test_a_key_is_good_for_its_scopes_alone() -> None:
    caller = table(make_key("ops", Scope.METRICS)).admit({"x-api-key": SHOWN}, NOW)
    caller.check(Scope.METRICS)
    for scope in (Scope.INFER, Scope.ADMIN):
        with pytest.raises(Forbidden):
            caller.check(scope)


# limits


def test_a_tenants_limits_lie_over_everybodys() -> None:
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
def test_tokens_that_nobody_limited_are(fields: dict[str, int], fitted: int) -> None:
    assert Limits(max_tokens=10).fitted(submission(**fields)).max_tokens == fitted


@pytest.mark.parametrize("fields", [{"max_tokens": 11}, {"n": 6, "max_tokens": 2}, {"n": 11}])
def test_more_tokens_than_a_tenant_may_ask_for_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(OutOfRange, match="from 1 to 10"):
        Limits(max_tokens=10).fitted(submission(**fields))


def test_a_class_above_a_tenants_is_refused() -> None:
    limits = Limits(max_priority=-1)
    assert limits.fitted(submission(priority=-1)).priority == -1
    with pytest.raises(OutOfRange, match="max_priority"):
        limits.fitted(submission())


def test_without_limits_nothing_is_changed() -> None:
    one = submission(n=128, priority=10)
    assert NO_LIMITS.fitted(one) is one


# what is kept


def test_a_document_is_kept_as_yaml_and_as_records() -> None:
    document = DOCUMENT.with_key("ffffffffffff", make_key("ops", *Scope, expires=CREATED))
    assert from_plain(yaml.safe_load(yaml.safe_dump(document.to_plain()))) == document
    assert from_records(document.to_records()) == document
    assert from_plain(None) == from_records({}) == Document()


def test_a_moment_without_quotes_is_one() -> None:
    fields = f"{{tenant: a, scopes: [infer], sha256: {'a' * 64}, created: {CREATED}}}"
    text = f"keys: {{'{ID}': {fields}}}"
    assert from_plain(yaml.safe_load(text)).keys[ID].created.startswith("2030-01-31T12:00:00")


@pytest.mark.parametrize(
    ("plain", "cause"),
    [
        ([], "the document"),
        ({"key": {}}, "key: there are keys and tenants alone"),
        ({"keys": {"short": {}}}, "an id is 12"),
        ({"keys": {ID: {"tenant": "acme"}}}, f"keys.{ID}.*must be set"),
        ({"keys": {ID: {"tenant": "Not One"}}}, f"keys.{ID}"),
        ({"tenants": {"Not One": {}}}, "tenant's name"),
        ({"tenants": {"acme": {"max_token": 1}}}, "tenants.acme.max_token: unknown key; did you"),
        ({"tenants": {"acme": {"max_tokens": 0}}}, "tenants.acme.max_tokens must be from 1"),
        ({"tenants": {"acme": {"max_tokens": "many"}}}, "must be an integer"),
        ({"tenants": {"acme": {"max_priority": 11}}}, "from -10 to 10"),
    ],
)
def test_what_is_no_document_is_refused_with_its_place(plain: object, cause: str) -> None:
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
def test_a_key_that_cannot_be_is_refused(change: dict[str, object]) -> None:
    plain = DOCUMENT.to_plain()
    plain["keys"][ID] |= change
    with pytest.raises(SettingsError, match=f"^keys.{ID}") as refused:
        from_plain(plain)
    assert plain["keys"][ID]["sha256"] == "short" or "0" * 8 not in str(refused.value)


def test_only_what_differs_is_changed() -> None:
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


async def test_a_file_is_made_for_its_owner_alone(path: Path) -> None:
    store = FileStore(path)
    assert await store.change(lambda _: DOCUMENT) == DOCUMENT
    assert await store.news() == DOCUMENT
    assert await store.news() is None
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.parent.iterdir()] == [path.name]


async def test_edits_at_once_are_made_one_after_the_other(path: Path) -> None:
    ids = [f"{number:012x}" for number in range(20)]
    edits = [
        FileStore(path).change(
            lambda document, key_id=key_id: document.with_key(key_id, make_key())
        )
        for key_id in ids
    ]
    await asyncio.gather(*edits)
    document = await FileStore(path).news()
    assert document is not None
    assert sorted(document.keys) == ids


async def test_an_edit_that_fails_changes_nothing(path: Path) -> None:
    store = FileStore(path)
    await store.change(lambda _: DOCUMENT)
    with pytest.raises(SettingsError):
        await store.change(lambda document: document.with_tenant("acme", {"max_tokens": 0}))
    assert await store.news() == DOCUMENT


@pytest.mark.parametrize("text", ["{", "a: 2030-13-45", "[" * 10_000, "\xff"])
async def test_a_file_that_cannot_be_read_is_named_in_one_line(path: Path, text: str) -> None:
    await FileStore(path).change(lambda _: DOCUMENT)
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(SettingsError, match=str(path)) as caught:
        await FileStore(path).news()
    assert "\n" not in str(caught.value)


async def test_a_file_that_everybody_may_write_to_is_refused(path: Path) -> None:
    await FileStore(path).change(lambda _: DOCUMENT)
    path.chmod(0o602)
    with pytest.raises(SettingsError, match="chmod o-w"):
        await FileStore(path).news()


async def test_a_file_that_everybody_may_read_is_told_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = FileStore(path)
    await store.change(lambda _: DOCUMENT)
    path.chmod(0o644)
    for _ in range(2):
        os.utime(path)
        assert await store.news() == DOCUMENT
    assert [record.getMessage() for record in caplog.records] == [
        "key file is readable by everyone"
    ]


async def test_a_ledger_tells_what_is_new() -> None:
    ledger = MemoryLedger(time.monotonic)
    store, other = LedgerStore(ledger), LedgerStore(ledger)
    assert await store.news() == Document()
    assert await store.news() is None
    await other.change(lambda _: DOCUMENT)
    assert await store.news() == DOCUMENT
    await other.change(lambda document: document)
    assert await store.news() is None


def test_a_store_is_where_the_settings_say() -> None:
    ledger = MemoryLedger(time.monotonic)
    assert store_of(RouterConfig(), ledger) is None
    assert isinstance(store_of(RouterConfig(access="ledger"), ledger), LedgerStore)
    config = RouterConfig(access="file", access_file="keys.yaml")
    assert Path(config.access_file).is_absolute()
    assert isinstance(store_of(config, ledger), FileStore)


@pytest.mark.parametrize("settings", [{"access": "file"}, {"access_file": "keys.yaml"}])
def test_a_file_is_named_where_there_is_to_be_one(settings: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="access_file"):
        RouterConfig(**settings)  # type: ignore[arg-type]


# the door


async def opened(path: Path, document: Document = DOCUMENT) -> Access:
    await FileStore(path).change(lambda _: document)
    return await Access.open(FileStore(path))


def tenant(access: Access) -> str | None:
    try:
        return access.admit({"x-api-key": SHOWN}).tenant
    except Unauthenticated:
        return None


async def test_what_changes_in_a_file_holds_after_the_next_look(path: Path) -> None:
    access = await opened(path)
    assert tenant(access) == "acme"
    await FileStore(path).change(lambda document: document.with_key(ID, make_key("other")))
    await access.reload()
    assert tenant(access) == "other"
    await FileStore(path).change(lambda document: document.with_key(ID, None))
    await access.reload()
    assert tenant(access) is None


async def test_a_secret_that_kubernetes_replaces_is_followed(tmp_path: Path) -> None:
    """It mounts keys.yaml -> ..data/keys.yaml, and swaps ..data -> a new directory by a rename."""
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
async def test_a_file_that_is_broken_keeps_what_was_and_is_told_once(
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


async def test_without_its_file_nobody_begins(path: Path) -> None:
    with pytest.raises(SettingsError, match="everlift key create"):
        await Access.open(FileStore(path))


async def test_while_the_ledger_is_away_all_stays_as_it_was() -> None:
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
