"""Detection of faults by the fake runner: each fault of a plan must change the token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from everlift.sampling import SamplingParams, TokenLogprobs
from tests.support.worker.worker_support import GREEDY, prompt
from worker.config import FakeModel
from worker.engine.plan import NO_ROWS, Admission, BlockCopy, Plan, Row, RowResult, Rows
from worker.runner.fake_runner import FakeRunner, expected_logprobs, expected_tokens

MODEL = FakeModel()
SAMPLED = SamplingParams(temperature=0.5, seed=1)


def runner(
    sampling: SamplingParams = GREEDY,
    choice: int = 0,
    num_prompt: int = 40,
    model: FakeModel = MODEL,
    stop_token_ids: frozenset[int] = frozenset(),
) -> FakeRunner:
    """Return a runner with 4 blocks and 2 host blocks, whose prompt in slot 0 is 1, 2, 3, ..."""
    this = FakeRunner(4, model, num_host_blocks=2)
    tokens = tuple(prompt(num_prompt))
    admission = Admission(0, tokens, num_prompt, sampling, stop_token_ids, choice)
    this.execute(Plan(1, NO_ROWS, (admission,)))
    return this


def row(
    tokens: list[int], start: int = 0, table: tuple[int, ...] = (3, 1), **fields: object
) -> Row:
    this = Row(slot=0, tokens=tuple(tokens), start=start, block_table=table, samples=True)
    return replace(this, **fields)  # type: ignore[arg-type]


def compute(this: FakeRunner, *rows: Row, **fields: tuple[BlockCopy, ...]) -> list[RowResult]:
    return this.execute(Plan(1, Rows.of(rows), **fields))  # type: ignore[arg-type]


def draw(this: FakeRunner, *rows: Row) -> list[int]:
    return [token for result in compute(this, *rows) for token in result.tokens]


def test_fake_runner_draws_same_for_whole_and_chunked_prompt() -> None:
    whole, chunks = runner(), runner()
    draw(chunks, row(prompt(33), samples=False))
    assert (
        draw(whole, row(prompt(40)))
        == draw(chunks, row(prompt(40)[33:], start=33))
        == expected_tokens(prompt(40), 1)
    )


def test_fake_runner_row_reads_only_earlier_rows() -> None:
    first = row(prompt(32), table=(2,), samples=False)
    second = row(prompt(33)[32:], start=32, table=(2, 0))
    assert draw(runner(), first, second) == expected_tokens(prompt(33), 1)
    assert draw(runner(), second, first) != expected_tokens(prompt(33), 1)


FAULTS: dict[str, Callable[[FakeRunner], Row]] = {
    "a wrong block": lambda _: row([9], start=40, table=(2, 1)),
    "blocks in the wrong order": lambda _: row([9], start=40, table=(1, 3)),
    "a start too late": lambda _: row([9], start=41),
    "a start too early": lambda _: row([9], start=39),
    "another token": lambda _: row([8], start=40),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_fake_runner_fault_changes_token(fault: Callable[[FakeRunner], Row]) -> None:
    this = runner()
    draw(this, row(prompt(40)))
    assert draw(this, fault(this)) != expected_tokens([*prompt(40), 9], 1)
    draw(this, row(prompt(40)))
    assert draw(this, row([9], start=40)) == expected_tokens([*prompt(40), 9], 1)


def test_fake_runner_overwritten_block_changes_token() -> None:
    this = runner()
    draw(this, row(prompt(40)))
    draw(this, row([1], table=(1,)))
    assert draw(this, row([9], start=40)) != expected_tokens([*prompt(40), 9], 1)


def drawn(num_prompt: int, **fields: object) -> list[int]:
    return draw(runner(num_prompt=num_prompt, **fields), row(prompt(9)))  # type: ignore[arg-type]


def test_sampled_token_depends_on_seed_choice_position_prefix() -> None:
    this = drawn(9, sampling=SAMPLED)
    assert this == expected_tokens(prompt(9), 1, sampling=SAMPLED)
    others = [
        drawn(9, sampling=replace(SAMPLED, seed=2)),
        drawn(9, sampling=SAMPLED, choice=1),
        drawn(8, sampling=SAMPLED),
        drawn(9),
        draw(runner(SAMPLED, num_prompt=8), row(prompt(8))),
    ]
    assert this not in others


def test_greedy_tokens_depend_on_the_prefix_alone() -> None:
    assert drawn(9) == drawn(8, choice=1, sampling=replace(GREEDY, seed=7))


def test_end_token_has_its_configured_frequency() -> None:
    without = FakeModel(vocab_size=4, eos_token_id=2)
    assert 2 not in expected_tokens([1], 300, without)
    often = FakeModel(vocab_size=1024, eos_token_id=2, eos_one_in=10)
    assert 10 <= expected_tokens([1], 300, often).count(2) <= 60


def test_expected_tokens_end_with_a_stop_token() -> None:
    model = FakeModel(eos_token_id=2, eos_one_in=10)
    tokens = expected_tokens([1], 1000, model, stop_token_ids=[2])
    assert len(tokens) < 200
    assert tokens.index(2) == len(tokens) - 1


def test_fake_runner_restores_saved_blocks() -> None:
    this, right = runner(), expected_tokens([*prompt(40), 9], 1)
    draw(this, row(prompt(40)))
    compute(this, row([1] * 40), saves=(BlockCopy(3, 1), BlockCopy(1, 0)))
    assert draw(this, row([9], start=40)) != right
    loads = (BlockCopy(0, 1), BlockCopy(2, 0))
    (result,) = compute(this, row([9], start=40, table=(0, 2)), loads=loads)
    assert list(result.tokens) == right


def test_fake_runner_saves_before_loads() -> None:
    this = runner()
    draw(this, row(prompt(40)))
    (result,) = compute(
        this,
        row(prompt(40)[32:], start=32, table=(2, 0)),
        saves=(BlockCopy(3, 1),),
        loads=(BlockCopy(2, 1),),
    )
    assert list(result.tokens) == expected_tokens(prompt(40), 1)


@pytest.mark.parametrize("num_right", range(4))
def test_fake_runner_accepts_drafts_up_to_first_mismatch(num_right: int) -> None:
    right = expected_tokens(prompt(40), 4, sampling=SAMPLED)
    drafts = [*right[:num_right], *[1000, 1001, 1002][num_right:]]
    this = runner(SAMPLED)
    (result,) = compute(this, row([*prompt(40), *drafts], num_drafts=3))
    assert list(result.tokens) == right[: num_right + 1]


def test_fake_model_plain_text_depends_on_all_tokens() -> None:
    model = FakeModel(surprise_one_in=4, eos_token_id=7)
    tokens = expected_tokens(prompt(40), 400, model)
    assert 200 < tokens.count(8) < 380
    assert expected_tokens([2, *prompt(40)[1:]], 400, model)[:30] != tokens[:30]


def test_min_tokens_suppress_stop_tokens() -> None:
    model = FakeModel(eos_token_id=2, eos_one_in=3)
    sampling = SamplingParams(temperature=0.0, min_tokens=50)
    tokens = expected_tokens(prompt(40), 1000, model, sampling, stop_token_ids=[2, 3])
    assert 50 < len(tokens) < 80
    assert {2, 3}.isdisjoint(tokens[:50]) and tokens[-1] in (2, 3)
    this = runner(sampling, model=model, stop_token_ids=frozenset({2, 3}))
    assert draw(this, row(prompt(40))) == tokens[:1]


def test_fake_runner_logprobs_match_expected() -> None:
    sampling = replace(SAMPLED, logprobs=3, prompt_logprobs=1)
    whole = [*prompt(40), *expected_tokens(prompt(40), 3, sampling=sampling)]
    this = runner(sampling)
    (chunk,) = compute(this, row(prompt(30), samples=False, scores_prompt=True))
    last = row([*whole[30:42]], start=30, num_drafts=2, scores_prompt=True)
    (result,) = compute(this, last)
    scores = [*chunk.prompt_logprobs, *result.prompt_logprobs]
    assert scores == expected_logprobs(prompt(40), 1, most=1)
    assert list(result.logprobs) == expected_logprobs(whole, 40, most=3)


@pytest.mark.parametrize("vocab_size", [2, 5, 1024])
def test_expected_logprobs_are_consistent(vocab_size: int) -> None:
    model = FakeModel(vocab_size=vocab_size)
    tokens = [1, *expected_tokens([1], 200, model)]
    for most in (0, 1, 20):
        for token, this in zip(tokens[1:], expected_logprobs(tokens, 1, most, model), strict=True):
            check(this, token, min(most, vocab_size - 1))


def check(this: TokenLogprobs, token: int, num_top: int) -> None:
    ids = [other for other, _ in this.top]
    values = [value for _, value in this.top]
    assert len({*ids}) == num_top and values == sorted(values, reverse=True)
    assert TokenLogprobs.from_proto(this.to_proto()) == this, "exact in float32"
    if this.rank <= num_top:
        assert this.top[this.rank - 1] == (token, this.logprob)
    else:
        assert token not in ids and all(value > this.logprob for value in values)


def after_four(num_prompt: int, grammar: object = None, penalty: float = 0.0) -> int:
    """Return the token after 1, 2, 3, 4, the first ``num_prompt`` of which are the prompt."""
    sampling = SamplingParams(temperature=0.0, presence_penalty=penalty)
    tokens = (1, 2, 3, 4)
    admission = Admission(0, tokens, num_prompt, sampling, frozenset(), 0, grammar)
    row = Row(slot=0, tokens=tokens, start=0, block_table=(0,), samples=True)
    [result] = FakeRunner(1, MODEL).execute(Plan(1, Rows.of([row]), (admission,)))
    [token] = result.tokens
    return token


def test_penalty_and_its_boundary_change_token() -> None:
    assert after_four(2) == after_four(4)
    tokens = [after_four(4), *(after_four(n, penalty=p) for n in (2, 4) for p in (0.5, 0.6))]
    assert len(set(tokens)) == len(tokens)


def test_fake_runner_grammar_restricts_next_token() -> None:
    class Next:
        def allowed(self, output: Sequence[int]) -> Sequence[int]:
            return [output[-1] + 90]

    assert after_four(3, Next()) == 94
