"""Tokens of an output that count as reasoning."""

from __future__ import annotations

import pytest

from router.chat.parsers.plain import PlainParser
from router.chat.parsers.think import ThinkParser
from router.chat.reasoning_tokens import ReasoningTokens
from tests.support.worker.vocabularies import BYTE_LEVEL, byte_ids

BOS, EOS = BYTE_LEVEL.encode("<s></s>")
A = byte_ids(BYTE_LEVEL, b"a")
HALF, REST = byte_ids(BYTE_LEVEL, "é".encode())
COUNT = BYTE_LEVEL.encode("count")


def count(ids: list[int], text: str, *, keeps: bool = False) -> int:
    counter = ReasoningTokens(BYTE_LEVEL.with_special_tokens() if keeps else BYTE_LEVEL)
    for token in ids:
        counter.add([token])
    parser = ThinkParser("<s>", "</s>", PlainParser(), "" if keeps else "<s>")
    parser.feed(text)
    parser.finish()
    return counter.count(parser.reasoning_ranges)


@pytest.mark.parametrize(
    ("ids", "text", "expected"),
    [
        ([BOS, *A, *COUNT, EOS, *A], "<s>acount</s>a", 2),
        ([BOS, HALF, REST, EOS, *A], "<s>é</s>a", 2),
        ([BOS, EOS, *A], "<s></s>a", 0),
        ([BOS, *A, *A], "<s>aa", 2),
        ([*A, BOS, *A, EOS], "a<s>a</s>", 0),
        # A stop string cut the text.
        ([BOS, *A, *COUNT], "<s>a", 1),
    ],
)
def test_tokens_between_the_marks_are_reasoning(ids: list[int], text: str, expected: int) -> None:
    assert count(ids, text, keeps=True) == expected


def test_tokens_without_text_are_not_counted() -> None:
    assert count([BOS, *A, BOS, *A, EOS], "aa") == 2


def test_token_belongs_where_its_first_character_does() -> None:
    counter = ReasoningTokens(BYTE_LEVEL)
    counter.add([*COUNT, *COUNT])
    assert len(COUNT) == 1
    assert counter.count([range(5)]) == 1
    assert counter.count([range(6)]) == 2
    assert counter.count([range(1, 5)]) == 0
    assert counter.count([range(1), range(4, 7)]) == 2
