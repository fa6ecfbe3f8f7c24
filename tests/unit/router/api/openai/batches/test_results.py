"""Results of a batch, which two routers may append at the same time."""

from __future__ import annotations

import asyncio
import json
import secrets
from contextlib import suppress

import hypothesis.strategies as st
import pytest
from hypothesis import given

from router.api.openai.batches import results as module
from router.api.openai.batches.lines import Answer, Line, Result, answered, unanswered
from router.api.openai.batches.record import Counts
from router.api.openai.batches.results import Results
from router.api.openai.files.record import ResultChunk
from router.auth.caller import ANYONE
from router.ledger.objects import ObjectConflict
from tests.support.router.batch_support import Bench

BATCH = f"batch_{'0' * 32}"


def result(number: int, size: int = 0, *, is_good: bool = True) -> Result:
    line = Line(number, f"id-{number}", {})
    if not is_good:
        return unanswered(BATCH, line, "code", "x" * size)
    usage = {"prompt_tokens": 1, "completion_tokens": 2}
    body = json.dumps({"text": "x" * size, "usage": usage}).encode()
    return answered(BATCH, line, Answer(200, body, "r"))


def appended(bench: Bench) -> Results:
    return Results(bench.files, ANYONE, BATCH, bench.time() + 60)


async def contents(bench: Bench) -> ResultChunk:
    """Return all results in the ledger."""
    whole, number = ResultChunk(), 0
    while (chunk := await bench.files.results(ANYONE, BATCH, number)) is not None:
        whole += chunk[0]
        number += 1
    return whole


async def test_stored_results_are_loaded_with_their_counts() -> None:
    bench = Bench()
    first = appended(bench)
    await first.load()
    for number in range(5):
        first.append(result(number, is_good=number != 3))
    assert await first.flush() and not await first.flush()
    second = appended(bench)
    await second.load()
    assert second.custom_ids == first.custom_ids == {f"id-{number}" for number in range(5)}
    assert second.counts == first.counts == Counts(4, 1, 4, 0, 8, 0)
    assert second.num_output_bytes == first.num_output_bytes > second.num_error_bytes > 0


async def test_second_writer_is_refused_after_another_has_appended() -> None:
    bench = Bench()
    old, new = appended(bench), appended(bench)
    for each in (old, new):
        await each.load()
    new.append(result(1))
    await new.flush()
    old.append(result(1))
    with pytest.raises(ObjectConflict):
        await old.flush()
    assert (await contents(bench)).output.count(b"\n") == 1


async def test_result_that_is_too_large_becomes_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    monkeypatch.setattr(module, "MAX_OBJECT_BYTES", 2000)
    monkeypatch.setattr(module, "CHUNK_BYTES", 1000)
    results, line = appended(bench), Line(2, "id-2", {})
    body = json.dumps({"text": secrets.token_hex(4000)}).encode()
    for each in (result(1), answered(BATCH, line, Answer(200, body, "r")), result(3)):
        results.append(each)
    await results.flush()
    assert (results.counts.completed, results.counts.failed) == (2, 1)
    [error] = (await contents(bench)).errors.splitlines()
    assert json.loads(error)["error"]["code"] == "message_too_large"


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 19)), max_size=60))
def test_interleaved_writers_store_each_result_once(steps: list[tuple[int, int]]) -> None:
    asyncio.run(_interleave(steps))


async def _interleave(steps: list[tuple[int, int]]) -> None:
    """Two writers run lines; the one that is refused reads the results again, as a router does."""
    bench = Bench()
    writers = [appended(bench), appended(bench)]
    for writer in writers:
        await writer.load()
    for which, number in steps:
        if which == 2:
            writers[number % 2] = appended(bench)
            await writers[number % 2].load()
            continue
        writer = writers[which]
        if f"id-{number}" not in writer.custom_ids:
            writer.append(result(number, 100 * number, is_good=bool(number % 5 + which)))
        if number % 3 == 0:
            with suppress(ObjectConflict):
                await writer.flush()
                continue
            writers[which] = appended(bench)
            await writers[which].load()
    whole = await contents(bench)
    ids = [json.loads(line)["custom_id"] for line in (whole.output + whole.errors).splitlines()]
    assert len(ids) == len(set(ids))
    final = appended(bench)
    await final.load()
    assert final.custom_ids == set(ids)
