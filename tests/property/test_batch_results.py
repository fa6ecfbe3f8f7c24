"""Results of a batch under any interleaving of two routers that both run it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everlift.errors import LedgerUnavailable
from router.api.openai.batches import results as module
from router.api.openai.batches.lines import Line, unanswered
from router.api.openai.batches.results import Results
from router.api.openai.files.record import FileRecord
from router.auth.caller import ANYONE
from router.ledger.objects import ObjectConflict
from tests.support.example_counts import examples
from tests.support.router.batch_routers import FakeRouter, Objects

BATCH, CHUNK_BYTES, NUM_LINES = "batch_1", 1000, 30

#: A router, and the lengths of the results that it appends before a flush; without lengths, it
#: reloads the results.
STEPS = st.lists(
    st.tuples(st.integers(0, 1), st.lists(st.integers(0, 1500), max_size=4)), max_size=40
)
#: Numbers of writes whose answers are lost.
LOST = st.sets(st.integers(1, 40), max_size=4)


@pytest.fixture(autouse=True, scope="module")
def _small_chunks() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_BYTES", CHUNK_BYTES)
        yield


class Writer:
    def __init__(self, router: FakeRouter) -> None:
        self._router = router
        self.results: Results | None = None
        #: lines that it has stored, as far as it knows
        self.stored: set[str] = set()

    async def load(self) -> None:
        self.results = Results(self._router.files, ANYONE, BATCH, self._router.objects.now + 99)
        await self.results.load()

    async def write(self, lengths: Sequence[int]) -> None:
        if self.results is None or not lengths:
            await self.load()
        assert self.results is not None
        names = (f"l{number}" for number in range(NUM_LINES))
        left = [name for name in names if name not in self.results.custom_ids]
        appended = left[: len(lengths)]
        for name, length in zip(appended, lengths, strict=False):
            line = Line(int(name[1:]), name, {})
            self.results.append(unanswered(BATCH, line, "c", "x" * length))
        try:
            await self.results.flush()
            self.stored.update(appended)
        except (ObjectConflict, LedgerUnavailable):
            self.results = None


@settings(max_examples=examples(250), deadline=None)
@given(STEPS, LOST)
def test_batch_results_have_each_line_once(
    steps: list[tuple[int, list[int]]], lost: set[int]
) -> None:
    asyncio.run(_check(steps, lost))


async def _check(steps: list[tuple[int, list[int]]], lost: set[int]) -> None:
    router = FakeRouter(Objects())

    def lose(number: int, at: str) -> None:
        if at == "after" and number in lost:
            raise LedgerUnavailable("the answer was lost")

    router.link.on_write = lose
    writers = [Writer(router), Writer(router)]
    for index, lengths in steps:
        await writers[index].write(lengths)
    reader = Writer(router)
    await reader.load()
    results = reader.results
    assert results is not None
    num_bytes = results.num_error_bytes
    record = FileRecord("f", "batch_output", 0, 1, num_bytes, batch_id=BATCH, part="errors")
    parts = [part async for part in router.files.content(ANYONE, "file", record)]
    content = b"".join(parts)
    ids = [json.loads(line)["custom_id"] for line in content.splitlines()]
    assert len(content) == num_bytes and results.counts.failed == len(ids)
    assert len(set(ids)) == len(ids) and set(ids) == results.custom_ids
    assert set(ids) >= writers[0].stored | writers[1].stored
    # A chunk is longer than the limit only if it has a single line.
    assert all(len(part) <= CHUNK_BYTES or part.count(b"\n") == 1 for part in parts)
