"""Files in a ledger: contents, limits, tenants, and uploads that fail."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from everlift.errors import (
    LedgerFull,
    LedgerUnavailable,
    OutOfRange,
    RequestConflict,
    UnknownObject,
)
from router.api.openai.files.record import CHUNK_BYTES, FileRecord
from router.auth.caller import ANYONE, Caller
from tests.support.router.batch_routers import KEPT_S, FakeRouter, Objects, parts_of

ACME, OTHER = Caller("acme"), Caller("other")
CONTENT = random.Random(1).randbytes(CHUNK_BYTES * 2 + 7)


@pytest.fixture
def objects() -> Objects:
    return Objects()


@pytest.fixture
def router(objects: Objects) -> FakeRouter:
    return FakeRouter(objects)


def record_of(router: FakeRouter, content: bytes) -> FileRecord:
    now = round(router.objects.now)
    return FileRecord("f", "batch", now, now + 100, len(content))


async def test_file_has_the_content_of_its_upload(router: FakeRouter) -> None:
    for content in (b"", b"a", b"a" * CHUNK_BYTES, CONTENT):
        file_id = await router.upload(content)
        assert await router.content(file_id) == content
        assert (await router.files.get(ANYONE, file_id)).num_bytes == len(content)


async def test_deleted_file_leaves_nothing(router: FakeRouter, objects: Objects) -> None:
    file_id = await router.upload(CONTENT)
    kept = await router.upload(b"kept")
    assert len(objects.names("file_chunks")) == 4
    await router.files.delete(ANYONE, file_id)
    assert objects.names("files") == (f"files/{kept}",)
    assert len(objects.names("file_chunks")) == 1
    with pytest.raises(UnknownObject):
        await router.files.delete(ANYONE, file_id)


@pytest.mark.parametrize("number", [1, 2, 3])
async def test_failed_upload_leaves_nothing(
    router: FakeRouter, objects: Objects, number: int
) -> None:
    def fail(at_number: int, at: str) -> None:
        if (at_number, at) == (number, "before"):
            raise LedgerFull("full")

    router.link.on_write = fail
    with pytest.raises(LedgerFull):
        await router.upload(CONTENT)
    assert objects.names("files") == objects.names("file_chunks") == ()


async def test_repeated_upload_returns_the_same_file(router: FakeRouter, objects: Objects) -> None:
    file_id, record = router.files.new_id(), record_of(router, CONTENT)
    first = await router.files.create(ANYONE, file_id, record, parts_of(CONTENT))
    again = await router.files.create(
        ANYONE, file_id, replace(record, created_at=1), parts_of(CONTENT)
    )
    assert again == first and len(objects.names("file_chunks")) == 3
    with pytest.raises(RequestConflict):
        await router.files.create(ANYONE, file_id, record, parts_of(b"other"))
    assert await router.content(file_id) == CONTENT


async def test_repeated_upload_stores_the_file_after_a_failure(router: FakeRouter) -> None:
    file_id, record = router.files.new_id(), record_of(router, CONTENT)
    for number in (1, 3, 4):
        count = router.link.num_writes

        def fail(at_number: int, at: str, last: int = count + number) -> None:
            if (at_number, at) == (last, "before"):
                raise LedgerUnavailable("down")

        router.link.on_write = fail
        with pytest.raises(LedgerUnavailable):
            await router.files.create(ANYONE, file_id, record, parts_of(CONTENT))
    await router.files.create(ANYONE, file_id, record, parts_of(CONTENT))
    assert await router.content(file_id) == CONTENT


@pytest.mark.parametrize("is_same", [False, True])
async def test_same_upload_at_two_routers_is_stored_once(objects: Objects, is_same: bool) -> None:
    routers = [FakeRouter(objects), FakeRouter(objects)]
    contents = [CONTENT, CONTENT if is_same else CONTENT[::-1]]
    file_id = routers[0].files.new_id()
    uploads = [
        router.files.create(ANYONE, file_id, record_of(router, content), parts_of(content))
        for router, content in zip(routers, contents, strict=True)
    ]
    found = await asyncio.gather(*uploads, return_exceptions=True)
    errors = [each for each in found if isinstance(each, Exception)]
    assert [type(error) for error in errors] == ([] if is_same else [RequestConflict])
    [stored] = {each for each in found if isinstance(each, FileRecord)}
    won = next(i for i, each in enumerate(found) if each == stored)
    assert await routers[0].content(file_id) == contents[won]
    assert len(objects.names("file_chunks")) == 3


async def test_download_notices_that_the_file_was_deleted(router: FakeRouter) -> None:
    file_id = await router.upload(CONTENT)
    record = await router.files.get(ANYONE, file_id)
    parts = router.files.content(ANYONE, file_id, record)
    assert await anext(parts) == CONTENT[:CHUNK_BYTES]
    await router.files.delete(ANYONE, file_id)
    with pytest.raises(UnknownObject):
        await anext(parts)
    file_id = await router.upload(b"a\nb")
    lines = router.files.lines(ANYONE, file_id, 9)
    await router.files.delete(ANYONE, file_id)
    with pytest.raises(UnknownObject):
        await anext(lines)


async def test_file_expires(router: FakeRouter, objects: Objects) -> None:
    file_id = await router.upload(b"a")
    objects.now += KEPT_S + 1
    with pytest.raises(UnknownObject):
        await router.files.get(ANYONE, file_id)
    assert objects.names("file_chunks") == ()


async def test_files_of_tenants_are_separate(router: FakeRouter) -> None:
    ids = {caller.tenant: await router.upload(b"a", caller) for caller in (ACME, OTHER)}
    [(file_id, _)] = await router.files.list_all(ACME)
    assert file_id == ids["acme"]
    for file_id in (ids["other"], "file-", "", "file-../x", ids["acme"] + ":000000"):
        with pytest.raises(UnknownObject):
            await router.files.get(ACME, file_id)
        with pytest.raises(UnknownObject):
            await router.files.delete(ACME, file_id)


async def test_files_of_a_tenant_have_limited_size(router: FakeRouter) -> None:
    content = bytes(3 << 20)
    first = await router.upload(content, ACME)
    await router.upload(content, ACME)
    with pytest.raises(OutOfRange, match="8 MiB"):
        await router.upload(content, ACME)
    await router.upload(content, OTHER)
    await router.files.delete(ACME, first)
    await router.upload(content, ACME)


async def test_number_of_small_files_is_limited(router: FakeRouter) -> None:
    for _ in range(128):
        await router.upload(b"")
    with pytest.raises(OutOfRange):
        await router.upload(b"")


async def test_concurrent_uploads_do_not_exceed_the_limit(router: FakeRouter) -> None:
    uploads = [router.upload(bytes(3 << 20)) for _ in range(5)]
    found = await asyncio.gather(*uploads, return_exceptions=True)
    assert sum(isinstance(each, OutOfRange) for each in found) == 3


async def test_list_all_returns_the_newest_first(router: FakeRouter) -> None:
    ids = []
    for _ in range(70):
        router.objects.now += 0.01
        ids.append(await router.upload(b"a"))
    assert [file_id for file_id, _ in await router.files.list_all(ANYONE)] == ids[::-1]
