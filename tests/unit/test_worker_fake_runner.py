"""The fake runner is a detector: each of these faults of a plan must change the token."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from everlift.sampling import SamplingParams
from tests.worker_support import GREEDY, prompt
from worker.config import FakeModel
from worker.fake_runner import FakeRunner, expected_tokens
from worker.plan import Plan, Row

MODEL = FakeModel()
SAMPLED = SamplingParams(temperature=0.5, seed=1)


def row(
    tokens: list[int], start: int = 0, table: tuple[int, ...] = (3, 1), **fields: object
) -> Row:
    this = Row(
        slot=0,
        tokens=tuple(tokens),
        start=start,
        block_table=table,
        samples=True,
        sampling=GREEDY,
        choice=0,
        seed_position=0,
    )
    return replace(this, **fields)  # type: ignore[arg-type]


def draw(runner: FakeRunner, *rows: Row) -> list[int]:
    return runner.execute(Plan(1, rows))


def test_a_prompt_at_once_and_in_chunks_draw_the_same() -> None:
    whole, chunks = FakeRunner(4, MODEL), FakeRunner(4, MODEL)
    draw(chunks, row(prompt(33), samples=False))
    assert (
        draw(whole, row(prompt(40)))
        == draw(chunks, row(prompt(40)[33:], start=33))
        == expected_tokens(prompt(40), 1)
    )


def test_a_row_reads_what_another_row_of_the_step_writes() -> None:
    runner = FakeRunner(4, MODEL)
    first = row(prompt(32), table=(2,), samples=False)
    assert draw(runner, row(prompt(33)[32:], start=32, table=(2, 0)), first) == expected_tokens(
        prompt(33), 1
    )


FAULTS: dict[str, Callable[[FakeRunner], Row]] = {
    "a wrong block": lambda runner: row([9], start=40, table=(2, 1)),
    "blocks in the wrong order": lambda runner: row([9], start=40, table=(1, 3)),
    "a start too late": lambda runner: row([9], start=41),
    "a start too early": lambda runner: row([9], start=39),
    "another token": lambda runner: row([8], start=40),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_changes_the_token(fault: Callable[[FakeRunner], Row]) -> None:
    runner = FakeRunner(4, MODEL)
    draw(runner, row(prompt(40)))
    assert draw(runner, fault(runner)) != expected_tokens([*prompt(40), 9], 1)
    draw(runner, row(prompt(40)))
    assert draw(runner, row([9], start=40)) == expected_tokens([*prompt(40), 9], 1)


def test_a_block_that_somebody_else_wrote_to_changes_the_token() -> None:
    runner = FakeRunner(4, MODEL)
    draw(runner, row(prompt(40)))
    draw(runner, row([1], table=(1,)))
    assert draw(runner, row([9], start=40)) != expected_tokens([*prompt(40), 9], 1)


@pytest.mark.parametrize(
    "other",
    [
        row(prompt(9), sampling=replace(SAMPLED, seed=2)),
        row(prompt(9), sampling=SAMPLED, choice=1),
        row(prompt(9), sampling=SAMPLED, seed_position=1),
        row(prompt(8), sampling=SAMPLED),
        row(prompt(9), sampling=GREEDY),
    ],
)
def test_a_sampled_token_depends_on_seed_choice_position_and_prefix(other: Row) -> None:
    this = draw(FakeRunner(4, MODEL), row(prompt(9), sampling=SAMPLED))
    assert this == expected_tokens(prompt(9), 1, sampling=SAMPLED)
    assert draw(FakeRunner(4, MODEL), other) != this


def test_greedy_tokens_depend_on_the_prefix_alone() -> None:
    this = draw(FakeRunner(4, MODEL), row(prompt(9)))
    other = row(prompt(9), choice=1, seed_position=5, sampling=replace(GREEDY, seed=7))
    assert draw(FakeRunner(4, MODEL), other) == this


def test_an_end_token_comes_about_as_often_as_it_should_and_else_never() -> None:
    without = FakeModel(vocab_size=4, eos_token_id=2)
    assert 2 not in expected_tokens([1], 300, without)
    often = FakeModel(vocab_size=1024, eos_token_id=2, eos_one_in=10)
    assert 10 <= expected_tokens([1], 300, often).count(2) <= 60


def test_expected_tokens_end_with_a_stop_token() -> None:
    model = FakeModel(eos_token_id=2, eos_one_in=10)
    tokens = expected_tokens([1], 1000, model, stop_token_ids=[2])
    assert len(tokens) < 200
    assert tokens.index(2) == len(tokens) - 1
