"""Prompts of later turns: which token ids of earlier turns they reuse."""

from __future__ import annotations

import random
import re
from array import array
from collections.abc import Sequence

import pytest

from everlift.hashes import chunk_hashes
from router.requests.splicing import PromptMark, Turn, TurnOutput, boundary_pattern, splice
from tests.support.worker.vocabularies import BYTE_LEVEL, byte_ids

ASK, ANSWER = "<s>user\n", "<s>assistant\n"
#: "count" in more tokens than its tokenisation has
COUNT = [*BYTE_LEVEL.encode("co"), *BYTE_LEVEL.encode("unt")]
BOS, EOS = BYTE_LEVEL.encode("<s></s>")


def encode(text: str, *, add_special_tokens: bool = False) -> list[int]:
    return BYTE_LEVEL.encode(text, add_special_tokens=add_special_tokens)


def prompt(text: str, *turns: Turn) -> tuple[list[int], PromptMark]:
    ids, mark, _ = splice(text, turns, BYTE_LEVEL, encode, has_added=False)
    return [*ids], mark


def turn(text: str, *outputs: tuple[Sequence[int], str]) -> Turn:
    ids, mark = prompt(text)
    return Turn(
        "r", mark, array("I", ids), [TurnOutput(array("I", it), say) for it, say in outputs]
    )


FIRST = f"{ASK}how?{ANSWER}"


def test_output_is_not_what_tokenisation_yields() -> None:
    assert encode("count") != COUNT
    assert prompt(f"{FIRST}count</s>{ASK}on")[0] == encode(f"{FIRST}count</s>{ASK}on")


@pytest.mark.parametrize("end", [[], [EOS], [BOS]])
def test_splice_reuses_prompt_and_output(end: list[int]) -> None:
    first = turn(FIRST, ([*COUNT, *end], "count"))
    ids, _ = prompt(f"{FIRST}count</s>{ASK}on", first)
    assert ids == [*encode(FIRST), *COUNT, EOS, *encode(f"{ASK}on")]


@pytest.mark.parametrize("answer", ["edited", "count on", "count", "counting</s>", "c ount</s>"])
def test_splice_reuses_only_the_prompt_of_another_answer(answer: str) -> None:
    first = turn(FIRST, (COUNT, "count"))
    text = f"{FIRST}{answer}"
    ids, _ = prompt(text, first)
    assert ids == encode(text)


def test_splice_ignores_white_space_around_an_output() -> None:
    call = encode('\n{"a":1,') + encode('\n  "b": [2]}\n')
    first = turn(FIRST, (call, '\n{"a":1,\n  "b": [2]}\n'))
    for written in ('{"a":1,\n  "b": [2]}', '  {"a":1,\n  "b": [2]}\n\n'):
        ids, _ = prompt(f"{FIRST}{written}</s>", first)
        assert ids == [*encode(FIRST), *call, EOS]


def test_splice_keeps_white_space_that_the_client_changed() -> None:
    first = turn(FIRST, (encode("if a:\n    b()\n    c()"), "if a:\n    b()\n    c()"))
    text = f"{FIRST}if a:\n    b()\nc()</s>"
    ids, _ = prompt(text, first)
    assert ids == encode(text)


def test_splice_chooses_the_output_that_continues() -> None:
    outputs = [(COUNT, "count"), ([*COUNT, *encode(" on")], "count on"), (encode("no"), "no")]
    for ids, text in outputs:
        assert prompt(f"{FIRST}{text}</s>", turn(FIRST, *outputs))[0] == [
            *encode(FIRST),
            *ids,
            EOS,
        ]


def test_splice_prefers_the_longest_turn() -> None:
    first = turn(FIRST, (COUNT, "count"))
    text = f"{FIRST}count</s>{ASK}more?{ANSWER}"
    ids, mark = prompt(text, first)
    second = Turn("r", mark, array("I", ids), [TurnOutput(array("I", COUNT), "count")])
    assert prompt(f"{text}count</s>", first, second)[0] == [*ids, *COUNT, EOS]
    # The last message was edited, so only the first turn continues.
    edited = f"{FIRST}count</s>{ASK}less?{ANSWER}"
    assert prompt(edited, first, second)[0] == [
        *encode(FIRST),
        *COUNT,
        *encode(f"</s>{ASK}less?{ANSWER}"),
    ]


def test_splice_omits_tokens_of_the_stop_string() -> None:
    stop = encode("\n\n") + encode("q")
    first = turn(FIRST, ([*COUNT, *stop], "count"))
    assert prompt(f"{FIRST}count</s>", first)[0] == [*encode(FIRST), *COUNT, EOS]


def test_splice_cuts_no_token_at_a_stop_string() -> None:
    count = encode("count")
    assert len(count) == 1
    text = f"{FIRST}cou</s>"
    assert prompt(text, turn(FIRST, (count, "cou")))[0] == encode(text)


def test_splice_keeps_a_character_that_length_cut() -> None:
    cut = [*COUNT, *byte_ids(BYTE_LEVEL, "你".encode()[:2])]
    first = turn(FIRST, (cut, "count�"))
    assert prompt(f"{FIRST}count�</s>", first)[0] == [*encode(FIRST), *cut, EOS]


def test_splice_rejects_output_with_an_unseen_special_token() -> None:
    first = turn(FIRST, ([BOS, *COUNT], "count"))
    text = f"{FIRST}count</s>"
    assert prompt(text, first)[0] == encode(text)


@pytest.mark.parametrize("end", [[], [EOS]])
def test_splice_reuses_an_output_with_kept_special_tokens(end: list[int]) -> None:
    first = turn(FIRST, ([BOS, *COUNT, BOS, *COUNT, *end], "<s>count<s>count"))
    ids, _ = prompt(f"{FIRST}<s>count<s>count</s>{ASK}on", first)
    assert ids == [*encode(FIRST), BOS, *COUNT, BOS, *COUNT, EOS, *encode(f"{ASK}on")]


def test_splice_keeps_the_last_token_of_a_kept_text() -> None:
    first = turn(FIRST, ([*COUNT, BOS], "count<s>"))
    assert prompt(f"{FIRST}count<s></s>", first)[0] == [*encode(FIRST), *COUNT, BOS, EOS]


def test_splice_survives_a_dropped_generation_prompt() -> None:
    """Templates drop the reasoning of earlier turns, and its mark in the generation prompt."""
    first_text = f"{ASK}how?</s>{ANSWER}count</s>{ASK}why?{ANSWER}"
    spliced = [*encode(f"{ASK}how?</s>{ANSWER}"), *COUNT, *encode(f"</s>{ASK}why?{ANSWER}<think>")]
    _, mark = prompt(f"{first_text}<think>")
    assert mark.divisible.num_characters == len(first_text) - len(ANSWER)
    difference = len(spliced) - mark.whole.num_ids
    divisible = mark.divisible._replace(num_ids=mark.divisible.num_ids + difference)
    before = Turn("r", PromptMark(mark.whole, divisible), array("I", spliced), [])
    ids, _ = prompt(f"{first_text}because</s>", before)
    assert ids == [*spliced[: divisible.num_ids], *encode(f"{ANSWER}because</s>")]


def test_prompt_without_special_tokens_is_not_spliced() -> None:
    first = turn("how? ", (COUNT, "count"))
    assert first.mark.divisible.num_characters == 0
    for text in ("how? count on", "how? count</s>"):
        ids = prompt(text, first)[0]
        assert BYTE_LEVEL.decode(ids) == BYTE_LEVEL.decode(encode(text))
    assert prompt("how? count on", first)[0] == encode("how? count on")


def test_prompt_mark_survives_the_ledger() -> None:
    mark = turn(FIRST).mark
    assert PromptMark.from_bytes(mark.to_bytes()) == mark
    assert PromptMark.from_bytes(b"other") is None
    assert PromptMark.from_bytes(b"") is None


def test_text_with_added_tokens_is_another_prompt() -> None:
    first = turn(FIRST, (COUNT, "count"))
    text = f"{FIRST}count</s>"
    ids, _, _ = splice(text, [first], BYTE_LEVEL, encode, has_added=True)
    assert [*ids] == encode(text, add_special_tokens=True)


def test_mark_matches_the_longer_prefix() -> None:
    mark = turn(f"{ASK}how?{ANSWER}").mark
    for text, length in (
        (f"{FIRST}count", len(FIRST)),
        (f"{ASK}how?<s>other", len(f"{ASK}how?")),
        (f"{ASK}what?{ANSWER}", 0),
    ):
        assert mark.match(text, has_added=False) == length
        assert mark.match(text, has_added=True) == 0


def test_mark_is_last_unless_a_later_prompt_follows() -> None:
    mark = turn(FIRST).mark
    second = f"{FIRST}count</s>{ASK}more?{ANSWER}"
    assert mark.is_last(second, has_added=False)
    assert not mark.is_last(f"{second}no</s>{ASK}why?{ANSWER}", has_added=False)
    assert not mark.is_last(f"{ASK}what?{ANSWER}", has_added=False)


def test_splice_keeps_the_hashes_of_known_chunks() -> None:
    for length in range(240, 262):
        text = f"{ASK}{'a ' * length}{ANSWER}"
        first = turn(text, (COUNT, "count"))
        first.chunk_hashes = chunk_hashes(first.ids)
        before = text.removesuffix(ANSWER)
        for later in (f"{text}count</s>", f"{text}edited</s>", f"{before}<s>other"):
            ids, _, hashes = splice(later, [first], BYTE_LEVEL, encode, has_added=False)
            assert list(hashes) == chunk_hashes(ids)[: len(hashes)]
            assert len(hashes) >= len(first.chunk_hashes) - 1


class Recorder:
    """``encode`` that records the texts it is given."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        self.texts.append(text)
        return encode(text, add_special_tokens=add_special_tokens)


def encoded(text: str, *turns: Turn) -> list[str]:
    """Return the texts that are tokenised for a prompt."""
    recorder = Recorder()
    splice(text, turns, BYTE_LEVEL, recorder, has_added=False)
    return recorder.texts


def test_splice_encodes_only_the_text_behind_known_turns() -> None:
    asked = f"{ASK}{'how? ' * 200}{ANSWER}"
    first = turn(asked, (COUNT * 100, "count" * 100))
    assert encoded(asked) == [asked, ANSWER]
    # The last message is encoded again, to find where a later turn can be cut.
    new = f"</s>{ASK}on{ANSWER}"
    assert encoded(f"{asked}{'count' * 100}{new}", first) == [new, ANSWER]
    # Another answer is unknown, so its text is encoded with the generation prompt.
    edited = f"{ANSWER}no{new}"
    assert encoded(f"{asked}no{new}", first) == [edited, ANSWER]
    assert encoded(f"{ASK}why?{ANSWER}", first) == [f"{ASK}why?{ANSWER}", ANSWER]


def test_splice_encodes_as_much_in_every_turn_of_a_session() -> None:
    turns: list[Turn] = []
    text = f"{ASK}{'how? ' * 200}{ANSWER}"
    for number in range(8):
        ids, mark = prompt(text, *turns)
        if turns:
            assert sum(map(len, encoded(text, *turns))) == len(f"</s>{ASK}on{ANSWER}{ANSWER}")
        outputs = [TurnOutput(array("I", COUNT), "count")]
        turns.append(Turn(f"r{number}", mark, array("I", ids), outputs))
        text += f"count</s>{ASK}on{ANSWER}"


def test_boundary_pattern_matches_the_longest_text() -> None:
    rng = random.Random(1)

    def draw(least: int, most: int) -> str:
        return "".join(rng.choices("ab<|.\n", k=rng.randint(least, most)))

    for _ in range(300):
        texts = [draw(1, 5) for _ in range(rng.randint(1, 12))]
        pattern = boundary_pattern(texts)
        flat = re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))
        text = draw(100, 100)
        assert [it.span() for it in pattern.finditer(text)] == [
            it.span() for it in flat.finditer(text)
        ]


def test_boundary_pattern_of_no_texts_matches_nothing() -> None:
    assert boundary_pattern(()).search("a") is None


def test_boundary_pattern_has_few_alternatives_at_each_place() -> None:
    # Each alternative of a group costs time at every character of a prompt that begins like a
    # special token; no other thread can run meanwhile.
    counts, most = list[int](), 0
    pattern = boundary_pattern(f"<SPECIAL_{number}>" for number in range(1000)).pattern
    for char in f"({pattern})":
        if char == "(":
            counts.append(1)
        elif char == "|":
            counts[-1] += 1
        elif char == ")":
            most = max(most, counts.pop())
    assert most <= len("0123456789>")
