"""Tokens that would complete a banned sequence, against a search of the whole output."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.runner.banned_tokens import BannedTokens

WORDS = 4
token_lists = st.lists(st.integers(0, WORDS - 1), max_size=12)
sequence_lists = st.lists(st.lists(st.integers(0, WORDS - 1), min_size=1, max_size=4), max_size=6)


def banned(sequences: Sequence[Sequence[int]], output: Sequence[int]) -> set[int]:
    """Return the tokens that would complete one of ``sequences`` at the end of the output."""
    return {
        token
        for token in range(WORDS)
        for each in sequences
        if [*output, token][-len(each) :] == [*each]
    }


@given(sequence_lists, token_lists, token_lists, token_lists)
def test_banned_tokens_complete_a_sequence(
    sequences: list[list[int]], given: list[int], sampled: list[int], drafts: list[int]
) -> None:
    state = BannedTokens(sequences, given)
    output = [*given]
    for token in sampled:
        assert state.after() == banned(sequences, output)
        state.accept([token])
        output.append(token)
    assert state.after(drafts) == banned(sequences, output + drafts)
    restored = BannedTokens(sequences, output)
    assert restored.after(drafts) == state.after(drafts)


@pytest.mark.parametrize("output", [(), (1,), (2, 1)])
def test_sequence_of_one_token_is_banned_everywhere(output: tuple[int, ...]) -> None:
    assert BannedTokens([(3,)], output).after() == {3}
