"""Content and calls in an output's text."""

from collections import deque

import pytest

from router.chat.deltas import Arguments, CallBegins, Content, call_id
from router.chat.parsers.hermes import HERMES
from router.chat.parsers.json_calls import JsonCallParser
from router.chat.parsers.llama3 import LLAMA3
from router.chat.tools import ToolUse
from tests.support.router.chat_support import TOOLS, USE, joined, plain, read

CALL = '{"name": "search", "arguments": {"a": 1}}'
OTHER = '{"name": "weather", "arguments": {}}'
SEARCH = ("search", '{"a": 1}')
WEATHER = ("weather", "{}")


def marked(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain  text \n", ["plain  text \n"]),
        ("", []),
        (marked(CALL), [SEARCH]),
        (f"Let me see.\n\n{marked(CALL)}\n", ["Let me see.", SEARCH]),
        (f"{marked(CALL)}\n{marked(OTHER)}", [SEARCH, WEATHER]),
        (f"{marked(CALL)} and <b>then \n", [SEARCH, "and <b>then \n"]),
        # marks and brackets inside a string belong to the string
        (
            marked('{"name": "search", "arguments": {"a": "}</tool_call>\\"{"}}'),
            [("search", '{"a": "}</tool_call>\\"{"}')],
        ),
        # members in any order, and additional ones
        (marked('{"arguments": {"a": 1}, "name": "search"}'), [SEARCH]),
        (marked('{"id": [1, "]"], "name": "search", "arguments": {"a": 1}}'), [SEARCH]),
        (marked('{"type": "function", "name": "search", "parameters": {"a": 1}}'), [SEARCH]),
        (marked('{"name": "search", "arguments": {"a": 1}, "id": 3, "why": null}'), [SEARCH]),
        # arguments as a JSON string, and no arguments
        (marked('{"name": "search", "arguments": "{\\"a\\": 1}"}'), [SEARCH]),
        (marked('{"arguments": "{\\"a\\": 1}", "name": "search"}'), [SEARCH]),
        (marked('{"name": "weather"}'), [WEATHER]),
        (marked('{"name": "weather", "arguments": null}'), [WEATHER]),
        # wrong ends
        (f"<tool_call>{CALL}<tool_call>{OTHER}", [SEARCH, WEATHER]),
        (marked(CALL + "}"), [SEARCH]),
        (marked(CALL[:-1]), [SEARCH]),
        (marked(CALL[:-1] + ",}"), [SEARCH]),
        (marked(CALL[:-1] + ", x}"), [SEARCH, "x}\n</tool_call>"]),
        (marked('{"name": "search", "arguments": {"a": 1}, "arguments": {}}'), [SEARCH]),
        (
            marked('{"name": "search", "arguments": {"a": "\\u12"}}') + "x",
            [("search", '{"a": "\\u12"}'), "x"],
        ),
        # cut off
        ('Yes. <tool_call>{"name": "sea', ['Yes. <tool_call>{"name": "sea']),
        ("a <tool_", ["a <tool_"]),
        ('<tool_call>{"name": "search", "arguments": {"a": "\\u00', [("search", '{"a": "\\u00')]),
        (f"<tool_call>{CALL}\n</tool", [SEARCH]),
        # not a call
        (marked('{"name": "unknown", "arguments": {}}'), ["all of it"]),
        (marked('{"name": "search", "arguments": 3}'), ["all of it"]),
        (marked('{"name": "search", "arguments": "[]"}'), ["all of it"]),
        (marked('{"name": "search", "arguments": "{\\"a\\": \\"\\ud83d\\"}"}'), ["all of it"]),
        (marked('{"name": 3, "arguments": {}}'), ["all of it"]),
        (marked('{"thought": "", "name": "search"}'), ["all of it"]),
        (marked("{}"), ["all of it"]),
        (marked("search(1)"), ["all of it"]),
        (CALL, ["all of it"]),
        # a call within text that is not a call
        (f"<tool_call><tool_call>{CALL}", ["<tool_call>", SEARCH]),
        (f"<<tool_call>{CALL}", ["<", SEARCH]),
    ],
)
def test_hermes_output_is_split_into_content_and_calls(
    text: str, expected: list[str | tuple[str, str]]
) -> None:
    assert read(text, HERMES) == ([text] if expected == ["all of it"] else expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain text; {", ["plain text; {"]),
        ('{"name": "search", "parameters": {"a": 1}}', [SEARCH]),
        ('\n<|python_tag|>{"name": "search", "parameters": {"a": 1}};', [SEARCH]),
        (f"{CALL}; {OTHER}", [SEARCH, WEATHER]),
        (f"{CALL}\n{OTHER}", [SEARCH, WEATHER]),
        (f"{CALL}\nDone.", [SEARCH, "Done."]),
        ('{"name": "Bob", "age": 3}', ['{"name": "Bob", "age": 3}']),
        ('{"answer": 3}', ['{"answer": 3}']),
        (f"See {CALL}", [f"See {CALL}"]),
        (f"See <|python_tag|>{CALL}", ["See", SEARCH]),
        ("<|python_tag|>print(1)", ["<|python_tag|>print(1)"]),
        (f'{CALL}; {{"name": "wea', [SEARCH]),
    ],
)
def test_llama3_output_is_split_into_content_and_calls(
    text: str, expected: list[str | tuple[str, str]]
) -> None:
    assert read(text, LLAMA3) == expected


def test_arguments_are_streamed_with_whole_escapes() -> None:
    parser = USE.parser(HERMES, "request", 0)
    begins = CallBegins(0, call_id("request", 0, 0), "weather")

    assert parser.feed('<tool_call>{"name": "weather", "arguments": ') == []
    assert not parser.has_calls
    assert parser.feed('{"city": "B') == [begins, Arguments(0, '{"city": "B')]
    assert parser.has_calls
    assert parser.feed("\\u00e") == []
    assert parser.feed("4r") == [Arguments(0, "\\u00e4r")]
    # both surrogates of one character
    assert parser.feed("\\ud83d\\ude0") == []
    assert parser.feed("0") == [Arguments(0, "\\ud83d\\ude00")]
    assert parser.feed("\\") == []
    assert parser.feed('""}') == [Arguments(0, '\\""}')]
    assert parser.feed("}</tool_call>") == parser.finish() == []


def test_incomplete_character_is_sent_with_what_follows() -> None:
    parser = USE.parser(HERMES, "request", 0)
    parser.feed('<tool_call>{"name": "weather", "arguments": {"city": "')

    assert parser.feed("\\ud83d") == []
    assert parser.feed('"') == [Arguments(0, '\\ud83d"')]


def test_content_that_cannot_become_a_call_is_sent_at_once() -> None:
    parser = USE.parser(HERMES, "request", 0)

    assert parser.feed("Well, 1 <") == [Content("Well, 1")]
    assert parser.feed(" 2") == [Content(" < 2")]


def test_non_call_is_sent_as_content_at_its_first_wrong_key() -> None:
    parser = USE.parser(HERMES, "request", 0)

    assert parser.feed('<tool_call>{"thought') == []
    assert parser.feed('"') == [Content('<tool_call>{"thought"')]
    assert parser.feed(': "') == [Content(': "')]


def test_call_key_may_be_fully_escaped() -> None:
    escaped = "".join(f"\\u{ord(char):04x}" for char in "parameters")

    assert read(marked(f'{{"name": "search", "{escaped}": {{"a": 1}}}}'), HERMES) == [SEARCH]


class Counted(deque[str]):
    """Queue that counts how often characters are read."""

    num_taken = 0

    def popleft(self) -> str:
        self.num_taken += 1
        return super().popleft()


#: Ten nested calls, as many as fit into the text that is parsed again.
NESTED = '<tool_call>{"id":[' * 10 + "]" * 40


@pytest.mark.parametrize(
    ("text", "at_most"),
    [
        # an unknown key, and one that calls may have
        ('<tool_call>{"a":[' * 1000 + "]" * 2000, 2),
        ('<tool_call>{"id":[' * 1000 + "]" * 2000, 2),
        ('<tool_call>{"arguments":{"' * 1000 + "}" * 2000, 2),
        # a key that does not end, or no key
        ('<tool_call>{"' * 1000, 3),
        ("<tool_call>{" * 1000 + "}" * 1000, 2),
        ("<tool_call>[" * 1000 + "]" * 1000, 2),
        ("<tool_call>" + " " * 10_000 + '{"a"', 2),
        (NESTED * 100, 8),
    ],
)
def test_parser_reads_each_character_a_bounded_number_of_times(text: str, at_most: int) -> None:
    parser = USE.parser(HERMES, "request", 0)
    assert isinstance(parser, JsonCallParser)
    parser._unread = counted = Counted()

    assert plain(joined([*parser.feed(text), *parser.finish()])) == [text]
    assert counted.num_taken <= at_most * len(text)


def test_call_after_a_long_failed_one_is_parsed() -> None:
    failed = f'<tool_call>{{"arguments": {{"a": "{"x" * 1000}"}}, "name": 3'

    assert read(failed + marked(CALL), HERMES) == [failed, SEARCH]


def test_parser_reads_one_call_if_not_parallel() -> None:
    use = ToolUse.of(TOOLS, "auto", False)

    assert read(f"Well. {marked(CALL)} {marked(OTHER)} more", HERMES, use) == ["Well.", SEARCH]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"[{CALL}, {OTHER}]", [SEARCH, WEATHER]),
        (f"[{CALL.replace('arguments', 'parameters')}]", [SEARCH]),
        # cut off, without content
        (f'[{CALL}, {{"na', [SEARCH]),
        ('[{"na', []),
        ("[", []),
    ],
)
def test_required_calls_are_parsed(text: str, expected: list[str | tuple[str, str]]) -> None:
    assert read(text, None, ToolUse.of(TOOLS, "required", True)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"city": "{"}', [("weather", '{"city": "{"}')]),
        ('{"city": {"a": []}} \n', [("weather", '{"city": {"a": []}}')]),
        ('{"city": "B', [("weather", '{"city": "B')]),
        ("", []),
        ("no", ["no"]),
    ],
)
def test_named_function_arguments_are_parsed(
    text: str, expected: list[str | tuple[str, str]]
) -> None:
    named = {"type": "function", "function": {"name": "weather"}}

    assert read(text, None, ToolUse.of(TOOLS, named, True)) == expected


@pytest.mark.parametrize("use", [ToolUse.of(TOOLS, "none", True), ToolUse.of(None, None, True)])
def test_output_without_tools_is_all_content(use: ToolUse) -> None:
    assert read(marked(CALL), HERMES, use) == [marked(CALL)]


def test_call_ids_are_stable_and_unique() -> None:
    ids = [
        call_id(request, choice, index)
        for request in ("a", "b")
        for choice in (0, 1)
        for index in (0, 1)
    ]

    assert len(set(ids)) == 8
    assert call_id("a", 0, 0) == ids[0] and ids[0].isalnum() and len(ids[0]) == 9
