"""Chat parsers do not depend on cuts of the text, and never retract deltas."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from router.chat.deltas import Content, Delta
from router.chat.parsers.base import ToolFormat
from router.chat.parsers.hermes import HERMES
from router.chat.parsers.llama3 import LLAMA3
from router.chat.tools import ToolUse
from tests.support.router import chat_support
from tests.support.router.chat_support import NAMES, TOOLS, joined, parsed, plain

NAMED = {"type": "function", "function": {"name": "weather"}}
READINGS = [
    (HERMES, "auto", True),
    (HERMES, "auto", False),
    (LLAMA3, "auto", True),
    (None, "required", True),
    (None, NAMED, True),
]
FRAGMENTS = st.sampled_from(
    """<tool_call> </tool_call> <|python_tag|> < tool { } [ ] ; , : " \\ 1 null x é 🙂 {}
    \\u00e4 \\ud83d \\ude00 "name" "weather" "arguments" "parameters"
    {"name":"search","arguments":""".split()
) | st.sampled_from([" ", "\n"])
TEXTS = st.lists(FRAGMENTS, max_size=40).map("".join)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(["</tool_call>", "}"]),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(), parts, max_size=3),
    max_leaves=8,
)
calls = st.lists(
    st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(), json_values, max_size=3)),
    min_size=1,
    max_size=3,
)


def parser_of(reading: Any) -> Any:
    form, choice, is_parallel = reading
    return ToolUse.of(TOOLS, choice, is_parallel).parser(form, "request", 0)


def characters(deltas: list[Delta]) -> list[Any]:
    """Return the deltas as single characters, so that beginnings can be compared."""
    return [
        (type(delta), getattr(delta, "index", None), char)
        for delta in deltas
        for char in getattr(delta, "text", [delta])
    ]


@pytest.mark.parametrize("reading", READINGS)
@given(text=TEXTS, cuts=st.lists(st.integers(1, 9), min_size=40))
def test_chat_parser_result_is_independent_of_cuts(
    reading: Any, text: str, cuts: list[int]
) -> None:
    pieces, rest = [], text
    for cut in cuts:
        pieces.append(rest[:cut])
        rest = rest[cut:]

    assert parsed(parser_of(reading), [*pieces, rest]) == parsed(parser_of(reading), [text])


@pytest.mark.parametrize("reading", READINGS)
@given(text=TEXTS)
def test_chat_parser_never_retracts_deltas(reading: Any, text: str) -> None:
    whole = characters(parsed(parser_of(reading), [text]))
    for end in range(len(text)):
        before = characters(parser_of(reading).feed(text[:end]))
        assert whole[: len(before)] == before


@pytest.mark.parametrize("form", [HERMES, LLAMA3])
@given(text=TEXTS)
def test_chat_parser_output_without_calls_is_all_content(form: ToolFormat, text: str) -> None:
    parser = parser_of((form, "auto", True))
    deltas = parsed(parser, text)
    if not parser.has_calls:
        assert deltas == joined([Content(text)])


@pytest.mark.parametrize(
    ("form", "template", "opens", "ends"),
    [
        (HERMES, chat_support.HERMES, "<|im_start|>assistant\n", "<|im_end|>"),
        (LLAMA3, chat_support.LLAMA3, "<|end_header_id|>\n\n", "<|eot_id|>"),
    ],
)
@given(said=st.text(), called=calls)
def test_chat_parser_reads_calls_written_by_template(
    form: ToolFormat, template: str, opens: str, ends: str, said: str, called: list[tuple[str, Any]]
) -> None:
    message = {
        "role": "assistant",
        # Llama's template omits it.
        "content": (said := said.strip() if form is HERMES else ""),
        "tool_calls": [{"function": {"name": n, "arguments": a}} for n, a in called],
    }
    written = render_jinja_template([[message]], chat_template=template, bos_token="")[0][0]
    text = written[written.index(opens) + len(opens) : written.rindex(ends)]

    found = plain(parsed(parser_of((form, "auto", True)), text))

    if said:
        assert found.pop(0) == said
    assert [(name, json.loads(arguments)) for name, arguments in found] == called
