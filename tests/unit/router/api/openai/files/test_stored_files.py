"""Files in the ledger."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from everlift.errors import InvalidRequest, OutOfRange, RequestConflict, UnknownObject
from router.api.openai.files.record import FileRecord, LineSplitter
from router.api.openai.object_ids import id_of_call, is_id, new_id
from router.auth.caller import ANYONE, Caller
from tests.support.router.batch_support import Bench, _parts, line


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=5))
def test_splitter_yields_the_lines_of_every_division(data: bytes, cuts: list[int]) -> None:
    splitter, lines, before = LineSplitter(1 << 20), list[bytes](), 0
    for cut in [*sorted(cut for cut in cuts if cut <= len(data)), len(data)]:
        lines += splitter.feed(data[before:cut])
        before = cut
    assert [*lines, splitter.rest] == data.split(b"\n")


def test_splitter_refuses_a_long_line() -> None:
    splitter = LineSplitter(10)
    assert splitter.feed(b"0123456789\n01234") == [b"0123456789"]
    with pytest.raises(OutOfRange):
        splitter.feed(b"567890")


async def test_file_is_deleted_with_its_content() -> None:
    bench = Bench()
    file_id = await bench.upload([line("a")])
    assert len(await bench.ledger.list_objects("file_chunks", "")) == 1
    await bench.files.delete(ANYONE, file_id)
    assert await bench.ledger.list_objects("file_chunks", "") == ()
    for name in (file_id, "file-x", "", "../a"):
        with pytest.raises(UnknownObject):
            await bench.files.get(ANYONE, name)


async def test_files_of_a_tenant_are_limited() -> None:
    bench = Bench()
    # Each file counts with 64 KiB at least, and the limit is 8 MiB.
    for _ in range(127):
        await bench.upload([line("a")])
    await bench.files.check_room(ANYONE)
    with pytest.raises(OutOfRange):
        await bench.files.check_room(ANYONE, 1 << 20)
    await bench.upload([line("a")])
    with pytest.raises(OutOfRange):
        await bench.files.check_room(ANYONE)
    await bench.files.check_room(Caller("other"), 8 << 20)


async def test_interrupted_upload_can_be_repeated() -> None:
    bench = Bench()
    file_id = bench.files.new_id()
    record = FileRecord("in.jsonl", "batch", 0, bench.files.expiry(None))
    await bench.files._put_chunk(ANYONE, file_id, 0, b"half", record)
    stored = await bench.files.create(ANYONE, file_id, record, _parts(b"whole"))
    again = await bench.files.create(ANYONE, file_id, record, _parts(b"whole"))
    assert stored == again
    assert (
        b"".join([part async for part in bench.files.content(ANYONE, file_id, stored)]) == b"whole"
    )
    with pytest.raises(RequestConflict):
        await bench.files.create(ANYONE, file_id, record, _parts(b"other"))


def test_ids_are_in_the_order_of_creation() -> None:
    ids = [new_id("file-", moment) for moment in (1.0, 1.001, 2e9)]
    assert ids == sorted(ids) and all(is_id("file-", each) for each in ids)
    assert not is_id("batch_", ids[0]) and not is_id("file-", f"{ids[0]}0")


async def test_key_of_a_call_belongs_to_tenant_and_kind() -> None:
    bench, key = Bench(), {"idempotency-key": '"k"'}
    ann, bob = Caller("ann"), Caller("bob")

    async def id_of(caller: Caller, prefix: str, headers: dict[str, str] = key) -> str:
        return await id_of_call(bench.ledger, caller, headers, new_id(prefix, 1.0), 60.0)

    first = await id_of(ann, "file-")
    assert await id_of(ann, "file-") == first
    assert await id_of(ann, "file-", {}) != first
    assert (await id_of(ann, "batch_")).startswith("batch_")
    assert await id_of(bob, "file-") != first
    with pytest.raises(InvalidRequest):
        await id_of(ann, "file-", {"idempotency-key": "a b"})
