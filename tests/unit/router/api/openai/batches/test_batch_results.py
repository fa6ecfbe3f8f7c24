"""Results of a batch: chunks, two writers, and results that are too large."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable

import pytest

from router.api.openai.batches.lines import Answer, Line, Result, answered, unanswered
from router.api.openai.batches.record import Counts
from router.api.openai.batches.results import Results
from router.api.openai.files.record import CHUNK_BYTES, FileRecord
from router.auth.caller import ANYONE
from router.ledger.objects import MAX_OBJECT_BYTES, ObjectConflict
from tests.support.router.batch_routers import FakeRouter, Objects

BATCH = "batch_1"


@pytest.fixture
def router() -> FakeRouter:
    return FakeRouter(Objects())


def results_of(router: FakeRouter) -> Results:
    return Results(router.files, ANYONE, BATCH, router.objects.now + 100)


def result(number: int, text: str = "", *, fails: bool = False) -> Result:
    line = Line(number, f"l{number}", {})
    if fails:
        return unanswered(BATCH, line, "code", text)
    body = {"text": text, "usage": {"prompt_tokens": 1, "completion_tokens": 2}}
    return answered(BATCH, line, Answer(200, json.dumps(body).encode(), "r"))


async def stored(router: FakeRouter, results: Results) -> tuple[bytes, bytes]:
    """Return the contents of both files."""

    async def content(part: str, num_bytes: int) -> bytes:
        record = FileRecord("f", "batch_output", 0, 1, num_bytes, batch_id=BATCH, part=part)  # type: ignore[arg-type]
        parts = router.files.content(ANYONE, "file", record)
        return b"".join([each async for each in parts])

    return (
        await content("output", results.num_output_bytes),
        await content("errors", results.num_error_bytes),
    )


def ids(content: bytes) -> list[str]:
    return [json.loads(line)["custom_id"] for line in content.splitlines()]


async def appended(results: Results, these: Iterable[Result]) -> Results:
    for each in these:
        results.append(each)
    assert await results.flush()
    return results


async def test_results_continue_after_several_chunks(router: FakeRouter) -> None:
    text = "x" * (CHUNK_BYTES * 2 // 5)
    results = results_of(router)
    for number in range(7):
        await appended(results, [result(number, text), result(number + 100, fails=True)])
        # Another router that loads the results knows all of them.
        loaded = results_of(router)
        await loaded.load()
        assert loaded.custom_ids == results.custom_ids
        assert loaded.counts == results.counts
        assert loaded.num_output_bytes == results.num_output_bytes
        results = loaded
    assert results._number == 3
    output, errors = await stored(router, results)
    assert ids(output) == [f"l{number}" for number in range(7)]
    assert ids(errors) == [f"l{number}" for number in range(100, 107)]
    assert results.counts == Counts(7, 7, 7, 0, 14)


async def test_flush_with_many_results_fills_chunks(router: FakeRouter) -> None:
    size = CHUNK_BYTES // 3
    results = await appended(results_of(router), (result(n, "x" * size) for n in range(8)))
    assert not await results.flush()
    assert results._number == 3
    output, errors = await stored(router, results)
    assert ids(output) == [f"l{number}" for number in range(8)] and not errors


@pytest.mark.parametrize("is_rolled_over", [False, True])
async def test_second_writer_conflicts(router: FakeRouter, is_rolled_over: bool) -> None:
    size = CHUNK_BYTES * 2 // 3
    first = await appended(results_of(router), [result(0, "x" * size)])
    other = results_of(router)
    await other.load()
    # The first writer begins another chunk, or not; the other one appends to the first chunk.
    await appended(first, [result(1, "x" * (size if is_rolled_over else 1))])
    other.append(result(1))
    with pytest.raises(ObjectConflict):
        await other.flush()
    again = results_of(router)
    await again.load()
    assert ids((await stored(router, again))[0]) == ["l0", "l1"]


async def test_writer_conflicts_at_a_new_chunk(router: FakeRouter) -> None:
    size = CHUNK_BYTES * 2 // 3
    first = await appended(results_of(router), [result(0, "x" * size)])
    other = results_of(router)
    await other.load()
    await appended(other, [result(1)])
    first.append(result(1, "x" * size))
    with pytest.raises(ObjectConflict):
        await first.flush()


async def test_result_that_is_too_large_becomes_an_error(router: FakeRouter) -> None:
    noise = random.Random(1).randbytes(MAX_OBJECT_BYTES).hex()
    results = await appended(results_of(router), [result(0), result(1, noise), result(2)])
    output, errors = await stored(router, results)
    assert ids(output) == ["l0", "l2"]
    [line] = errors.splitlines()
    error = json.loads(line)
    assert (error["custom_id"], error["error"]["code"]) == ("l1", "message_too_large")
    assert (results.counts.completed, results.counts.failed) == (2, 1)


async def test_large_result_has_a_chunk_of_its_own(router: FakeRouter) -> None:
    text = "y" * (2 * CHUNK_BYTES)
    results = await appended(results_of(router), [result(0), result(1, text), result(2)])
    assert ids((await stored(router, results))[0]) == ["l0", "l1", "l2"]
    assert results._number == 2
