"""Conformance of every registered parser, by examples and by random texts in its format."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.chat.deltas import Arguments, CallBegins, Content, Delta, Reasoning
from router.chat.parsers.base import Parser
from router.chat.parsers.registry import REASONING_FORMATS, TOOL_FORMATS
from router.config import RouterConfig
from tests.support.example_counts import examples
from tests.support.router.chat_support import joined, parsed, plain
from tests.support.router.parser_examples import (
    FRAGMENTS,
    OTHER_TOOLS,
    REASONING_EXAMPLES,
    TOOL_EXAMPLES,
    Example,
    reasoning_parser,
    tool_parser,
)

#: Examples of at most this length are cut at each pair of positions.
SHORT = 60
#: Distance between the positions at which outputs are cut; 1 in the long tests.
STEP = 1 if examples(100) >= 100 else 5


@dataclass(frozen=True)
class Case:
    """Parser of a format, and its examples."""

    name: str
    marks: Sequence[str]
    parser: Callable[[Example], Parser]
    examples: Sequence[Example]

    def __repr__(self) -> str:
        return self.name


def cases() -> Iterator[Case]:
    for tools in TOOL_FORMATS:
        name = tools.name
        yield Case(
            name,
            tools.marks,
            lambda example, name=name: tool_parser(name),  # type: ignore[misc]
            TOOL_EXAMPLES.get(name, ()),
        )
    for reasoning in REASONING_FORMATS:
        name = reasoning.name
        yield Case(
            f"{name} reasoning",
            reasoning.marks,
            lambda example, name=name: reasoning_parser(name, example.prompt),  # type: ignore[misc]
            REASONING_EXAMPLES.get(name, ()),
        )


CASES = list(cases())
each_case = pytest.mark.parametrize("case", CASES, ids=repr)
each_example = pytest.mark.parametrize(
    ("case", "example"),
    [(case, example) for case in CASES for example in case.examples],
    ids=[f"{case}-{at}" for case in CASES for at in range(len(case.examples))],
)


def characters(deltas: list[Delta]) -> list[Any]:
    return [
        (type(delta), getattr(delta, "index", None), char)
        for delta in deltas
        for char in getattr(delta, "text", [delta])
    ]


def content(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, Content))


@each_case
def test_format_has_enough_examples(case: Case) -> None:
    expected = [item for example in case.examples for item in example.expected]
    texts = "".join(example.text for example in case.examples)

    assert len(case.examples) >= 6
    assert any(isinstance(item, str) for item in expected)
    assert any(isinstance(item, tuple) for item in expected)
    assert all(ord(max(texts)) > 0xFF and mark in texts for mark in case.marks)
    assert FRAGMENTS[case.name.split()[0]]


def test_settings_have_the_registered_formats() -> None:
    hints = get_type_hints(RouterConfig)
    tools = {each.name for each in TOOL_FORMATS}
    reasoning = {each.name for each in REASONING_FORMATS}

    assert set(hints["tool_format"].__args__) == {"auto", *tools}
    assert set(hints["reasoning_format"].__args__) == {"auto", "none", *reasoning}


@each_example
def test_example_is_parsed(case: Case, example: Example) -> None:
    parser = case.parser(example)
    deltas = parsed(parser, [example.text])

    assert plain(deltas) == list(example.expected)
    assert parser.has_calls == any(isinstance(item, tuple) for item in example.expected)
    if example.is_valid:
        for item in example.expected:
            if isinstance(item, tuple):
                assert isinstance(json.loads(item[1]), dict)


@each_example
def test_stream_equals_the_whole_at_every_cut(case: Case, example: Example) -> None:
    text = example.text
    whole = parsed(case.parser(example), [text])

    assert parsed(case.parser(example), text) == whole
    for cut in range(0, len(text) + 1, STEP):
        assert parsed(case.parser(example), [text[:cut], text[cut:]]) == whole
    if len(text) <= SHORT and STEP == 1:
        for first, second in combinations(range(len(text) + 1), 2):
            pieces = [text[:first], text[first:second], text[second:]]
            assert parsed(case.parser(example), pieces) == whole


@each_example
def test_truncated_output_never_retracts(case: Case, example: Example) -> None:
    whole = characters(parsed(case.parser(example), [example.text]))
    for end in range(len(example.text)):
        parser = case.parser(example)
        before = characters(parser.feed(example.text[:end]))
        rest = parser.finish()

        assert whole[: len(before)] == before
        # The end of a truncated output adds at most to its last call, and begins no call twice.
        all_deltas = [*before, *characters(rest)]
        begun = [item[2].index for item in all_deltas if item[0] is CallBegins]
        assert begun == list(range(len(begun)))
        last = len(begun) - 1
        assert all(delta.index == last for delta in rest if isinstance(delta, Arguments))


@each_example
def test_reasoning_ranges_contain_the_reasoning(case: Case, example: Example) -> None:
    for end in range(0, len(example.text) + 1, STEP):
        text = example.text[:end]
        whole, pieces = case.parser(example), case.parser(example)
        deltas = parsed(whole, [text])
        parsed(pieces, text)

        thought = "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))
        found = "".join(text[part.start : part.stop] for part in whole.reasoning_ranges)
        assert list(pieces.reasoning_ranges) == list(whole.reasoning_ranges)
        assert thought.strip() in found


@each_example
def test_content_ranges_contain_the_content(case: Case, example: Example) -> None:
    text, parser, found = example.text, case.parser(example), ""
    for end in range(len(text) + 1):
        ended = case.parser(example)
        whole = content([*ended.feed(text[:end]), *ended.finish()])
        assert "".join(text[it.start : it.stop] for it in ended.content_ranges) == whole
        found += content(parser.feed(text[end : end + 1]))
        assert "".join(text[it.start : it.stop] for it in parser.content_ranges) == found


@pytest.mark.parametrize("form", TOOL_FORMATS, ids=lambda form: form.name)
def test_calls_of_unknown_functions_are_content(form: Any) -> None:
    for example in TOOL_EXAMPLES[form.name]:
        parser = tool_parser(form.name, OTHER_TOOLS)
        deltas = parsed(parser, [example.text])

        assert not parser.has_calls
        for item in example.expected:
            if isinstance(item, tuple):
                assert item[0] in content(deltas)
        if not form.has_channels:
            assert content(deltas) == example.text


@pytest.mark.parametrize("form", TOOL_FORMATS, ids=lambda form: form.name)
def test_output_ends_after_one_call_if_not_parallel(form: Any) -> None:
    for example in TOOL_EXAMPLES[form.name]:
        parser = tool_parser(form.name, is_parallel=False)
        found = plain(parsed(parser, [example.text]))
        calls = [at for at, item in enumerate(example.expected) if isinstance(item, tuple)]

        end = calls[0] + 1 if calls else len(example.expected)
        assert found == list(example.expected[:end])


def texts(case: Case) -> st.SearchStrategy[str]:
    fragments = [*case.marks, *FRAGMENTS[case.name.split()[0]], " ", "x", "é🙂"]
    return st.lists(st.sampled_from(fragments), max_size=30).map("".join)


@each_case
@settings(max_examples=examples(100), deadline=None)
@given(data=st.data())
def test_random_text_is_parsed_alike_in_any_pieces(case: Case, data: st.DataObject) -> None:
    text = data.draw(texts(case))
    prompt = data.draw(st.sampled_from(["", *case.marks]))
    example = Example(text, (), prompt)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    whole = parsed(parser := case.parser(example), [text])

    assert "".join(text[it.start : it.stop] for it in parser.content_ranges) == content(whole)
    assert parsed(case.parser(example), pieces) == whole
    before = characters(case.parser(example).feed("".join(pieces[:-1])))
    assert characters(whole)[: len(before)] == before
    if not parser.has_calls and not parser.reasoning_ranges and case.name[:7] != "gpt_oss":
        closed = case.name.endswith("reasoning") and text.startswith(case.marks[1])
        assert closed or whole == joined([Content(text)])


class Counted:
    """Generator that counts the characters it receives."""

    def __init__(self, reading: Any) -> None:
        self.reading = reading
        self.num_read = 0

    def send(self, char: str) -> None:
        self.num_read += 1
        self.reading.send(char)

    def close(self) -> None:
        self.reading.close()


@each_case
@settings(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_characters_are_read_a_bounded_number_of_times(case: Case, data: st.DataObject) -> None:
    fragments = [*case.marks, *FRAGMENTS[case.name.split()[0]], " ", "x" * 50]
    text = "".join(data.draw(st.lists(st.sampled_from(fragments), min_size=1, max_size=4))) * 200
    parser: Any = case.parser(Example(text, ()))
    parser._reading = counted = Counted(parser._reading)

    parsed(parser, [text])

    assert counted.num_read <= 40 * len(text)
