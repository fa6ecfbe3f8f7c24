"""Masks of 32 tokens a word."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from worker.runner.token_mask import forbidden, mask_words


@given(st.integers(1, 100), st.lists(st.sets(st.integers(0, 99)), min_size=1, max_size=3))
def test_token_mask_forbids_tokens_with_clear_bit(vocab: int, rows: list[set[int]]) -> None:
    masks = torch.zeros(len(rows), mask_words(vocab), dtype=torch.int64)
    for mask, allowed in zip(masks, rows, strict=True):
        for token in allowed & {*range(vocab)}:
            mask[token // 32] |= 1 << token % 32
    expected = [[token not in allowed for token in range(vocab)] for allowed in rows]
    assert forbidden(masks.to(torch.int32), vocab).tolist() == expected


def test_token_mask_has_one_word_per_32_tokens() -> None:
    assert [mask_words(vocab) for vocab in (1, 31, 32, 33, 64, 65)] == [1, 1, 1, 2, 2, 3]
