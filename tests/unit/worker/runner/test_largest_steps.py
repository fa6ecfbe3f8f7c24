"""The steps by which a GPU's memory is measured."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker.engine.limits import blocks_for
from worker.runner.kv_blocks import largest_steps, num_blocks


def test_largest_steps_are_prompts_then_decodes() -> None:
    prompts, decodes = largest_steps(3, 100, 4096, num_drafts=0)
    assert prompts.rows.counts.tolist() == [34, 33, 33]
    assert decodes.rows.starts.tolist() == [34, 33, 33]
    assert [admission.slot for admission in prompts.admissions] == [0, 1, 2]
    assert all(admission.sampling.has_penalties for admission in prompts.admissions)
    assert num_blocks((prompts, decodes)) == 2, "of 34 tokens and one more"


def test_largest_decode_step_has_drafts() -> None:
    _, decodes = largest_steps(3, 100, 4096, num_drafts=4)
    assert decodes.rows.num_drafts.tolist() == [4, 4, 4]
    assert decodes.num_tokens == 15


def test_largest_prompts_are_bounded_by_context() -> None:
    prompts, decodes = largest_steps(2, 512, 40, num_drafts=0)
    assert prompts.rows.counts.tolist() == [39, 39]
    assert decodes.rows.known_ends.tolist() == [40, 40]


@given(st.integers(1, 40), st.integers(0, 3000), st.integers(2, 900), st.integers(0, 5))
def test_largest_steps_respect_limits(
    max_num_seqs: int, more_tokens: int, max_model_len: int, num_drafts: int
) -> None:
    tokens = max_num_seqs + more_tokens
    plans = largest_steps(max_num_seqs, tokens, max_model_len, num_drafts)
    limit = num_blocks(plans)
    for plan in plans:
        rows = plan.rows
        assert len(rows) == max_num_seqs and rows.samples.all()
        assert (rows.counts > 0).all() and plan.num_tokens <= tokens
        ends = rows.starts + rows.counts
        assert ends.max() <= max_model_len and blocks_for(int(ends.max())) <= limit
        assert rows.tables.max() < limit
    prompts, _ = plans
    drafts = int(plans[1].rows.num_drafts.max())
    assert prompts.num_tokens == min(tokens, max_num_seqs * (max_model_len - 1 - drafts))


def test_largest_steps_have_the_adapter() -> None:
    prompts, _ = largest_steps(3, 100, 4096, num_drafts=0, adapter="sql")
    assert [admission.adapter for admission in prompts.admissions] == ["sql"] * 3
