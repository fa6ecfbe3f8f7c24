"""Clients under arbitrary faults of routers receive each token once, or a named error.

The clock is virtual, so a client may wait for any time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

from hypothesis import given, settings
from hypothesis import strategies as st

from everlift import AsyncClient, Chunk, EverliftError, errors
from everlift.messages import Submission
from everlift.testing import (
    Break,
    BreakOff,
    FakeTransport,
    Fault,
    Hold,
    Output,
    Overlap,
    Refuse,
    Repeat,
    Skip,
)
from tests.simulated_cluster.clock import Clock
from tests.support.example_counts import examples

TOKENS, CHOICES, PROMPTS = 4, 2, 3
#: Faults that may end a request; it survives all others.
FINAL = (Refuse, Skip, Hold)

places = st.tuples(st.integers(0, TOKENS), st.integers(0, CHOICES - 1), st.integers(0, PROMPTS - 1))
kinds = st.sampled_from([Break, BreakOff, Hold, Repeat, Overlap, Skip])
refusals = st.builds(
    lambda kind, index: Refuse(kind("by the script"), index=index),
    st.sampled_from([kind for kind in errors.BY_SLUG.values() if kind is not EverliftError]),
    st.none() | st.integers(0, PROMPTS - 1),
)
faults: st.SearchStrategy[Fault] = refusals | st.builds(
    lambda kind, place: kind(*place), kinds, places
)
scripts = st.lists(st.none() | faults, max_size=12)

Tokens: TypeAlias = dict[int, list[int]]


def answer(submission: Submission) -> list[Output]:
    """Return tokens that identify request, choice and offset."""
    first = 1000 * int(str(submission.prompt))
    return [
        Output(
            tuple((first + 100 * choice + at, f"<{at}>") for at in range(TOKENS - choice)),
            tail="end",
        )
        for choice in range(submission.n)
    ]


def right(prompt: int) -> Tokens:
    return {
        choice: [1000 * prompt + 100 * choice + at for at in range(TOKENS - choice)]
        for choice in range(CHOICES)
    }


@contextmanager
def clock() -> Iterator[Clock]:
    made = Clock()
    try:
        yield made
        assert made.uncaught == []
    finally:
        made.close()


def take(got: Tokens, chunk: Chunk) -> None:
    """Append a chunk's tokens; each offset must follow the previous one."""
    assert chunk.offset == len(got[chunk.choice])
    got[chunk.choice].extend(chunk.token_ids)


def judge(got: Tokens, prompt: int, error: EverliftError | None) -> None:
    wanted = right(prompt)
    for choice, tokens in got.items():
        assert tokens == wanted[choice][: len(tokens)]
    if error is None:
        assert got == wanted
    else:
        assert type(error) is not EverliftError


@settings(max_examples=examples(200))
@given(scripts)
def test_stream_under_faults_has_each_token_once_or_error(script: list[Fault | None]) -> None:
    got: Tokens = defaultdict(list)

    async def read() -> EverliftError | None:
        transport = FakeTransport(answer, script)
        async with AsyncClient("fake", transport=transport) as client:
            try:
                async for chunk in client.generate("1", n=CHOICES, timeout_s=60):
                    take(got, chunk)
            except EverliftError as error:
                return error
        return None

    with clock() as time:
        error = time.run(time.process("client").create_task(read()), limit=300)
    judge(got, 1, error)
    if not any(isinstance(it, FINAL) for it in script):
        assert error is None


@settings(max_examples=examples(200))
@given(scripts, st.integers(1, 4))
def test_generate_many_under_faults_has_each_token_once_or_error(
    script: list[Fault | None], concurrency: int
) -> None:
    got: dict[int, Tokens] = {index: defaultdict(list) for index in range(PROMPTS)}

    async def read() -> dict[int, EverliftError | None]:
        prompts = [str(index) for index in range(PROMPTS)]
        async with AsyncClient("fake", transport=FakeTransport(answer, script)) as client:
            stream = client.generate_many(prompts, concurrency=concurrency, n=CHOICES, timeout_s=60)
            async for index, chunk in stream:
                take(got[index], chunk)
        return {index: outcome.error for index, outcome in stream.outcomes.items()}

    with clock() as time:
        ended = time.run(time.process("client").create_task(read()), limit=300)
    assert ended.keys() == got.keys()
    for index, error in ended.items():
        judge(got[index], index, error)
    if not any(isinstance(it, FINAL) for it in script):
        assert set(ended.values()) == {None}
