"""Contract of all ledgers for stored prompts and sessions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from everlift.errors import UnknownRequest
from everlift.hashes import CHUNK_SIZE, chunk_hashes
from everlift.images import Image
from everlift.messages import FinishReason, Request
from everlift.request_id import in_session
from router.ledger.base import Ledger
from router.ledger.entry import Append, Appended, Reasserted, State, Turn
from router.ledger.prompts import chunk_names, image_names
from tests.support.ledger.ledgers import (
    Tick,
    chunk_references,
    eventually,
    lose_answers,
    make_request,
    unbury,
)

TERM, EPOCH = 7, 8
AGES_S = 3600.0


def prompt(num_chunks: int, more: int = 0, begin: int = 0) -> tuple[int, ...]:
    """Return ``num_chunks`` full chunks and ``more`` tokens; ``begin`` changes all chunk hashes."""
    return (begin, *range(1, num_chunks * CHUNK_SIZE + more))


def request(name: str = "r", num_chunks: int = 3, more: int = 5, **changes: Any) -> Request:
    begin = changes.pop("begin", 0)
    # Requests of one session are on the same shard of a ledger with several shards.
    return make_request(
        in_session(name, "s"), prompt_ids=prompt(num_chunks, more, begin), **changes
    )


async def finish(ledger: Ledger, its: Request) -> None:
    await ledger.lead("router", "127.0.0.1:1", TERM, AGES_S)
    await ledger.dispatch(its.request_id, "worker", EPOCH, TERM)
    end = Append(its.request_id, EPOCH, 0, (1,), finish_reason=FinishReason.STOP)
    assert await ledger.append([end]) == [Appended.FINISHED]


async def references(ledger: Ledger) -> list[int]:
    """Return the number of references to each chunk, sorted."""
    return sorted((await chunk_references(ledger)).values())


def other_version(its: Request) -> Request:
    salt = b"\x01other"
    hashes = tuple(chunk_hashes(its.prompt_ids, salt))
    return replace(its, fingerprint="beef", adapter_digest="v2", salt=salt, chunk_hashes=hashes)


async def test_append_replaces_the_request_but_not_its_prompt(ledger: Ledger) -> None:
    lose_answers(ledger)
    its = request(images=(Image(b"i" * 32, b"file"),))
    await ledger.open(its, "gateway", timeout_s=60.0)
    before = (await ledger.read(its.request_id)).request
    await ledger.lead("router", "127.0.0.1:1", TERM, AGES_S)
    await ledger.dispatch(its.request_id, "worker", EPOCH, TERM)
    kept = await references(ledger)
    item = Append(its.request_id, EPOCH, 0, (1, 2), request=other_version(its))
    refused = [replace(item, epoch=EPOCH + 1), replace(item, offset=1)]
    assert await ledger.append(refused) == [Appended.FENCED, Appended.GAP]
    assert (await ledger.read(its.request_id)).request == before
    later = Append(its.request_id, EPOCH, 2, (3,))
    assert await ledger.append([item, later]) == [Appended.OK] * 2
    stored = await ledger.take_over(its.request_id, "successor", "gateway")
    assert stored.request == replace(other_version(its), deadline=before.deadline)
    assert stored.choices[0].tokens == (1, 2, 3)
    assert await references(ledger) == kept
    await ledger.discard(its.request_id, "successor")
    assert await references(ledger) == []


async def test_reassert_replaces_the_request_but_not_its_prompt(ledger: Ledger) -> None:
    its = request()
    await ledger.open(its, "gateway")
    stored = await ledger.read(its.request_id)
    copy = replace(stored, request=other_version(stored.request))
    assert (await ledger.reassert(copy))[0] is Reasserted.OK
    assert (await ledger.read(its.request_id)).request == copy.request


@pytest.mark.parametrize("num_tokens", [1, 255, 256, 257, 511, 512, 513, 1024])
async def test_prompt_of_any_length_is_read_whole(ledger: Ledger, num_tokens: int) -> None:
    tokens = tuple(2**32 - 1 - number for number in range(num_tokens))
    its = make_request(prompt_ids=tokens)
    await ledger.open(its, "gateway")
    assert (await ledger.read("r")).request == its
    assert (await ledger.take_over("r", "other", "gateway")).request == its
    assert len(await chunk_references(ledger)) == num_tokens // CHUNK_SIZE


async def test_prompt_chunks_are_named_by_their_hashes(ledger: Ledger) -> None:
    its = request(num_chunks=2)
    await ledger.open(its, "gateway")
    hashes = chunk_hashes(its.prompt_ids, its.salt)
    assert await chunk_references(ledger) == {it[:16].hex(): 1 for it in hashes}
    assert chunk_names(replace(its, chunk_hashes=tuple(hashes))) == chunk_names(its)


async def test_prompts_share_their_common_chunks(ledger: Ledger) -> None:
    first, second = request("a", 3), request("b", 5)
    await ledger.open(first, "gateway")
    await ledger.open(second, "gateway")
    # The third chunk ends one prompt and has a successor in the other one.
    assert await references(ledger) == [1, 1, 1, 1, 2]
    for its in (first, second):
        assert (await ledger.read(its.request_id)).request == its


async def test_prompts_of_one_chain_branch(ledger: Ledger) -> None:
    base = request("a", 2)
    ids = base.prompt_ids[: 2 * CHUNK_SIZE]
    branches = [
        replace(
            base, request_id=in_session(name, "s"), prompt_ids=(*ids, *range(start, start + 300))
        )
        for name, start in (("b", 5_000), ("c", 9_000))
    ]
    for its in (base, *branches):
        await ledger.open(its, "gateway")
    assert await references(ledger) == [1, 1, 1, 3]
    for its in (base, *branches):
        assert (await ledger.read(its.request_id)).request == its


async def test_prompts_of_other_salts_share_nothing(ledger: Ledger) -> None:
    first, second = request("a", 2), request("b", 2, salt=b"other")
    await ledger.open(first, "gateway")
    await ledger.open(second, "gateway")
    assert await references(ledger) == [1, 1, 1, 1]


async def test_erase_keeps_chunks_of_other_prompts(ledger: Ledger) -> None:
    first, second = request("a", 5), request("b", 3)
    for its in (first, second):
        await ledger.open(its, "gateway")
        await ledger.end_request(its.request_id, State.CANCELLED, "", "")
    assert await ledger.erase(first.request_id) is None
    assert await references(ledger) == [1, 1, 1]
    assert (await ledger.read(second.request_id)).request == second
    assert await ledger.erase(second.request_id) is None
    assert await references(ledger) == []


async def test_discard_removes_chunks_of_prompt(ledger: Ledger) -> None:
    its = request()
    await ledger.open(its, "gateway")
    assert await ledger.discard(its.request_id, "gateway") is None
    assert await references(ledger) == []


async def test_prompt_is_stored_after_its_chunks_were_erased(ledger: Ledger) -> None:
    first, second = request("a", 3), request("b", 4)
    await ledger.open(first, "gateway")
    await ledger.discard(first.request_id, "gateway")
    # The ledger's caller still believes that the first three chunks are stored.
    assert (await ledger.open(second, "gateway")).created
    assert (await ledger.read(second.request_id)).request == second
    assert await references(ledger) == [1, 1, 1, 1]


CAT, DOG = (Image(bytes([number]) * 32, b"%d\0\xff" % number * 999) for number in (1, 2))


@pytest.mark.parametrize("num_tokens", [3, 256, 600])
async def test_images_are_read_whole(ledger: Ledger, num_tokens: int) -> None:
    its = make_request(prompt_ids=tuple(range(num_tokens)), images=(DOG, CAT, DOG))
    await ledger.open(its, "gateway")
    for stored in (await ledger.read("r"), await ledger.take_over("r", "other", "gateway")):
        assert stored.request == its
        assert [it.data for it in stored.request.images] == [DOG.data, CAT.data, DOG.data]


async def test_requests_share_their_images(ledger: Ledger) -> None:
    first, second = (request(name, 1, images=(CAT,)) for name in "ab")
    for its in (first, second):
        await ledger.open(its, "gateway")
    [name] = image_names(first)
    [chunk] = chunk_names(first)
    assert await chunk_references(ledger) == {name: 2, chunk: 2}
    assert await ledger.discard(first.request_id, "gateway") is None
    assert await chunk_references(ledger) == {name: 1, chunk: 1}
    assert (await ledger.read(second.request_id)).request.images[0].data == CAT.data
    assert await ledger.discard(second.request_id, "gateway") is None
    assert await references(ledger) == []


async def test_tenants_do_not_share_images(ledger: Ledger) -> None:
    for name in ("t/a", "u/a"):
        await ledger.open(make_request(name, images=(CAT,)), "gateway")
    assert await references(ledger) == [1, 1]


async def test_image_is_stored_after_it_was_erased(ledger: Ledger) -> None:
    first, second = (request(name, 0, images=(CAT, DOG)) for name in "ab")
    await ledger.open(first, "gateway")
    await ledger.discard(first.request_id, "gateway")
    # The ledger's caller still believes that the images are stored.
    assert (await ledger.open(second, "gateway")).created
    assert [it.data for it in (await ledger.read(second.request_id)).request.images] == [
        CAT.data,
        DOG.data,
    ]


async def test_reassert_restores_images(ledger: Ledger) -> None:
    its = request("a", 1, images=(CAT,))
    await ledger.open(its, "gateway")
    stored = await ledger.read(its.request_id)
    await ledger.discard(its.request_id, "gateway")
    answer, _ = await ledger.reassert(stored)
    assert answer is Reasserted.OK
    restored = (await ledger.read(its.request_id)).request
    assert (restored, restored.images[0].data) == (its, CAT.data)


async def test_open_with_lost_answer_counts_chunks_once(ledger: Ledger) -> None:
    lose_answers(ledger)
    first, second = request("a", 3), request("b", 4)
    for its in (first, second):
        assert (await ledger.open(its, "gateway")).created
    assert await references(ledger) == [1, 1, 1, 2]
    await ledger.discard(first.request_id, "gateway")
    assert await references(ledger) == [1, 1, 1, 1]
    assert (await ledger.read(second.request_id)).request == second


async def test_open_of_known_request_counts_no_chunks(ledger: Ledger) -> None:
    its = request()
    await ledger.open(its, "gateway")
    assert not (await ledger.open(its, "gateway")).created
    assert await references(ledger) == [1, 1, 1]


async def test_expired_request_leaves_no_chunks(expiring: Ledger, tick: Tick) -> None:
    first, second = request("a", 5), request("b", 3)
    for its in (first, second):
        await expiring.open(its, "gateway")
    await finish(expiring, first)

    async def is_swept() -> bool:
        await expiring.orphans(1)
        return await references(expiring) == [1, 1, 1]

    await eventually(is_swept, tick)
    with pytest.raises(UnknownRequest):
        await expiring.read(first.request_id)
    assert (await expiring.read(second.request_id)).request == second


@pytest.mark.parametrize("num_chunks", [2, 3, 4])
async def test_expired_request_id_may_be_opened_again(
    expiring: Ledger, tick: Tick, num_chunks: int
) -> None:
    first, again = request("a", 3), request("a", num_chunks)
    await expiring.open(first, "gateway")
    await finish(expiring, first)

    async def is_gone() -> bool:
        try:
            await expiring.get(first.request_id)
        except UnknownRequest:
            return True
        return False

    await eventually(is_gone, tick)
    assert (await expiring.open(again, "gateway")).created
    assert (await expiring.read(again.request_id)).request == again
    assert await references(expiring) == [1] * num_chunks


async def test_reassert_restores_chunks_of_prompt(ledger: Ledger) -> None:
    its = request(session_id="s", turn=b"turn")
    await ledger.open(its, "gateway")
    copy = await ledger.read(its.request_id)
    entry = await ledger.end_request(its.request_id, State.CANCELLED, "", "")
    await ledger.erase(its.request_id)
    await unbury(ledger, entry)
    for _ in range(2):
        assert (await ledger.reassert(copy))[0] is Reasserted.OK
        assert (await ledger.read(its.request_id)).request == copy.request
        assert await references(ledger) == [1, 1, 1]
    listed = await ledger.list_requests("", session_id="s")
    assert [it.request_id for it in listed.entries] == [its.request_id]


# sessions


async def test_listing_of_session_has_its_requests(ledger: Ledger, tick: Tick) -> None:
    for name, session in (("a", "s"), ("b", "t"), ("c", "s"), ("t/d", "s"), ("e", "")):
        await tick()
        await ledger.open(make_request(name, session_id=session), "gateway")

    async def names(tenant: str = "", **options: Any) -> list[str]:
        page = await ledger.list_requests(tenant, session_id="s", **options)
        return [entry.request_id for entry in page.entries]

    assert await names() == ["c", "a"]
    assert await names("t") == ["t/d"]
    assert await names(states=[State.RUNNING]) == []
    first = await ledger.list_requests("", session_id="s", limit=1)
    assert await names(before=first.last) == ["a"]
    await ledger.discard("c", "gateway")
    assert await names() == ["a"]


async def test_listing_of_session_omits_expired_requests(
    ledger: Ledger, expiring: Ledger, tick: Tick
) -> None:
    its = make_request("a", session_id="s")
    for each in (ledger, expiring):
        await each.open(its, "gateway")
        await each.open(make_request("b", session_id="s"), "gateway")
        await finish(each, its)

    async def names(ledger: Ledger) -> list[str]:
        page = await ledger.list_requests("", session_id="s")
        return [entry.request_id for entry in page.entries]

    async def is_gone() -> bool:
        return await names(expiring) == ["b"]

    assert len(await names(ledger)) == 2
    await eventually(is_gone, tick)


async def test_turns_are_those_of_finished_requests(ledger: Ledger, tick: Tick) -> None:
    a, b, c, d = (in_session(name, "s") for name in "abcd")
    for name, turn in ((a, b"1"), (b, b""), (c, b"\x003"), (d, b"4")):
        await tick()
        its = make_request(name, session_id="s", turn=turn)
        await ledger.open(its, "gateway")
        if name != d:
            await finish(ledger, its)
    assert await ledger.turns("", "s") == (Turn(c, b"\x003"), Turn(a, b"1"))
    # One of the two newest requests has not finished.
    assert await ledger.turns("", "s", 2) == (Turn(c, b"\x003"),)
    assert await ledger.turns("", "other") == await ledger.turns("t", "s") == ()
