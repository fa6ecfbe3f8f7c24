"""A request's tools and tool_choice: what is refused, shown, and enforced."""

import json
from typing import Any

import pytest

from everlift.errors import InvalidRequest, OutOfRange, ToolsUnsupported
from router.chat.parsers.hermes import HERMES
from router.chat.parsers.llama3 import LLAMA3
from router.chat.parsers.registry import find_tool_format
from router.chat.tools import MAX_TOOLS, Choice, ToolUse
from router.config import RouterConfig
from tests.support.router import chat_support
from tests.support.router.chat_support import TOOLS, USE, read
from worker.grammar.grammar_process import compile_grammar
from worker.grammar.vocabulary import token_trie

BYTES = token_trie([bytes([byte]) for byte in range(256)])
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
BAD = '{"a": 1}'
NAMED = {"type": "function", "function": {"name": "weather"}}


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def allows(use: ToolUse, text: str, form: Any = HERMES) -> bool:
    """Return whether the grammar lets a model write ``text`` and end."""
    grammar = use.grammar(form)
    assert grammar is not None
    matcher = compile_grammar(grammar.kind.value, grammar.texts, BYTES)
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


def test_shown_tools_have_parameters_and_no_strict() -> None:
    function = {key: value for key, value in TOOLS[0]["function"].items() if key != "strict"}

    assert USE.shown == [
        {"type": "function", "function": function},
        tool(name="search", parameters=NO_PARAMETERS),
    ]


@pytest.mark.parametrize(
    ("tools", "tool_choice", "choice"),
    [
        (TOOLS, None, Choice.AUTO),
        (TOOLS, "auto", Choice.AUTO),
        (TOOLS, "required", Choice.REQUIRED),
        (TOOLS, NAMED, Choice.NAMED),
        (TOOLS, "none", Choice.NONE),
        (None, None, Choice.NONE),
    ],
)
def test_tool_choice_decides_shown_tools_and_grammar(
    tools: Any, tool_choice: Any, choice: Choice
) -> None:
    use = ToolUse.of(tools, tool_choice, True)

    assert use.choice is choice
    assert (use.shown is None) == (choice is Choice.NONE)
    assert (use.grammar(HERMES) is None) == (choice in (Choice.NONE, Choice.AUTO))


@pytest.mark.parametrize(
    ("tools", "tool_choice", "words"),
    [
        ({}, None, "tools must be a list"),
        (["f"], None, "tools[0] must be an object of type function"),
        ([{"type": "custom"}], None, "tools[0] must be an object of type function"),
        ([{"type": "function"}], None, "tools[0].function must be an object"),
        ([tool(name=None)], None, "tools[0].function.name must be"),
        ([tool(name="a b")], None, "tools[0].function.name must be"),
        ([tool(name="a" * 65)], None, "tools[0].function.name must be"),
        ([tool(parameters=[])], None, "parameters must be a JSON schema"),
        ([tool(parameters={"type": "string"})], None, "must be the schema of an object"),
        ([tool(description=1)], None, "description must be a string"),
        ([tool(strict="yes")], None, "strict must be true or false"),
        ([tool(), tool()], None, "tools[1] has the same name as an earlier tool"),
        (TOOLS, "always", "tool_choice must be none, auto, required"),
        (TOOLS, [], "tool_choice must be none, auto, required"),
        (TOOLS, {"type": "function"}, "tool_choice.function.name"),
        (TOOLS, {"type": "function", "function": {"name": "x"}}, "names x, which is not in tools"),
        (None, "required", "there are no tools"),
        ([], None, "tools must have at least one tool"),
        ([], NAMED, "tools must have at least one tool"),
    ],
)
def test_malformed_tools_are_rejected(tools: Any, tool_choice: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ToolUse.of(tools, tool_choice, True)

    assert words in str(caught.value)


def test_unknown_members_of_tools_are_ignored() -> None:
    extra = {"cache_control": {"type": "ephemeral"}, "strict": None, "eager": True, "x": None}
    given = [{**TOOLS[0], **extra, "function": {**TOOLS[0]["function"], **extra}}, TOOLS[1]]

    assert ToolUse.of(given, None, True) == USE


def deep(levels: int) -> Any:
    schema: Any = {}
    for _ in range(levels):
        schema = {"items": schema}
    return {"type": "object", "properties": {"a": schema}}


@pytest.mark.parametrize(
    "tools",
    [
        [tool(name=f"f{i}") for i in range(MAX_TOOLS + 1)],
        [tool(description="x" * 70_000)],
        [tool(name=f"f{i}", description="x" * 60_000) for i in range(10)],
        [tool(parameters=deep(100))],
        [tool(parameters=deep(100_000))],
    ],
)
def test_tools_beyond_limits_are_rejected(tools: Any) -> None:
    with pytest.raises(OutOfRange):
        ToolUse.of(tools, None, True)


@pytest.mark.parametrize(("form", "key"), [(HERMES, "arguments"), (LLAMA3, "parameters")])
def test_required_calls_are_constrained_to_the_tools(form: Any, key: str) -> None:
    use = ToolUse.of(TOOLS, "required", True)
    weather = f'{{"name": "weather", "{key}": {{"city": "Bern", "days": 2}}}}'
    search = f'{{"name": "search", "{key}": {{}}}}'

    assert allows(use, f"[{weather}]", form)
    assert allows(use, f"[{search}, {weather}]", form)
    assert read(f"[{search}, {weather}]", form, use) == [
        ("search", "{}"),
        ("weather", '{"city": "Bern", "days": 2}'),
    ]
    assert not allows(use, "[]", form)
    assert not allows(use, f"[{weather.replace('weather', 'other')}]", form)
    assert not allows(use, f"[{weather.replace('2', '2.5')}]", form)
    assert not allows(use, f"[{search.replace('{}', BAD)}]", form)
    assert not allows(use, f"Well: [{search}]", form)


def test_tool_grammar_allows_one_call_if_not_parallel() -> None:
    search = '{"name": "search", "arguments": {}}'
    use = ToolUse.of(TOOLS, "required", False)

    assert allows(use, f"[{search}]")
    assert not allows(use, f"[{search}, {search}]")


def test_named_function_grammar_allows_only_its_arguments() -> None:
    use = ToolUse.of(TOOLS, NAMED, True)

    assert allows(use, '{"city": "Bern"}')
    assert read('{"city": "Bern"}', HERMES, use) == [("weather", '{"city": "Bern"}')]
    assert not allows(use, '{"days": 3}')
    assert not allows(use, '{"name": "weather", "arguments": {"city": "Bern"}}')


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_schema_references_resolve_to_their_own_root(choice: Any) -> None:
    node = {
        "type": "object",
        "properties": {"default": {"$ref": "#/$defs/n"}, "next": {"$ref": "#"}},
        "$defs": {"n": {"type": "integer"}},
    }
    use = ToolUse.of([tool(parameters=node), tool(name="g")], choice, True)
    good, bad = '{"default": 1, "next": {"default": 2}}', '{"default": "1"}'
    written = '[{"name": "f", "arguments": %s}]' if choice == "required" else "%s"

    assert allows(use, written % good)
    assert not allows(use, written % bad)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_required_calls_allow_an_id_at_the_root_of_parameters(choice: Any) -> None:
    own = "https://example.com/f.json"
    node = {
        "$id": own,
        "type": "object",
        "properties": {"n": {"$ref": f"{own}#/$defs/n"}, "$id": {"type": "string"}},
        "$defs": {"n": {"type": "integer"}},
    }
    use = ToolUse.of([tool(parameters=node)], choice, True)
    written = '[{"name": "f", "arguments": %s}]' if choice == "required" else "%s"

    assert allows(use, written % '{"n": 1, "$id": "a"}')
    assert not allows(use, written % '{"n": "1"}')


@pytest.mark.parametrize("base", ["", "https://example.com/f.json"])
def test_anchors_of_required_tools_stay_separate(base: str) -> None:
    def anchored(name: str, kind: str) -> Any:
        node = {
            "$id": base,
            "type": "object",
            "properties": {"a": {"$ref": f"{base}#A"}},
            "$defs": {"x": {"$anchor": "A", "type": kind}},
        }
        return tool(name=name, parameters=node)

    use = ToolUse.of([anchored("f", "string"), anchored("g", "integer")], "required", True)
    for name, good, bad in (("f", '"x"', "1"), ("g", "1", '"x"')):
        written = f'[{{"name": "{name}", "arguments": {{"a": %s}}}}]'
        assert allows(use, written % good)
        assert not allows(use, written % bad)


def test_large_tool_schemas_are_rejected_if_grammar_is_needed() -> None:
    tools = [tool(name=f"f{i}", parameters={"title": "x" * 40_000}) for i in range(3)]

    assert ToolUse.of(tools, "auto", True).grammar(HERMES) is None
    with pytest.raises(OutOfRange, match="grammar is longer") as caught:
        ToolUse.of(tools, "required", True).grammar(HERMES)
    assert caught.value.field == "tools"


def test_tools_of_an_unknown_format_need_a_grammar() -> None:
    with pytest.raises(ToolsUnsupported, match="chat template"):
        USE.grammar(None)

    required = ToolUse.of(TOOLS, "required", True)
    assert allows(required, '[{"name": "search", "arguments": {}}]', None)
    assert json.loads(required.grammar(None).texts[0])["minItems"] == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("setting", [{"template_timeout": 0.0}, {"template_processes": 0}])
def test_template_settings_that_render_nothing_are_rejected(setting: Any) -> None:
    with pytest.raises(ValueError, match="template"):
        RouterConfig(**setting)


def test_tool_format_is_detected_from_the_template() -> None:
    assert find_tool_format("auto", chat_support.HERMES) is HERMES
    assert find_tool_format("auto", chat_support.LLAMA3) is LLAMA3
    assert find_tool_format("auto", chat_support.MISTRAL) is None
    # other formats with the same mark
    assert find_tool_format("auto", "<tool_call>\n<function=") is None
    assert find_tool_format("auto", "<tool_call>\n<arg_key>") is None
    assert find_tool_format("llama3", chat_support.HERMES) is LLAMA3


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_limit_calls_but_not_the_prompt(mode: str) -> None:
    [first, second] = [tool(name="f"), tool(name="g")]
    use = ToolUse.of([first, second], allowed(mode, "g"), True)

    assert use.shown == ToolUse.of([first, second], None, True).shown
    assert [function.name for function in use.callable] == ["g"]
    grammar = use.grammar(HERMES)
    if mode == "auto":
        assert grammar is None
        parser = use.parser(HERMES, "request", 0)
        deltas = parser.feed('<tool_call>{"name": "f", "arguments": {}}</tool_call>')
        assert not parser.has_calls and deltas
    else:
        assert grammar is not None
        [schema] = grammar.texts
        assert '"const": "g"' in schema and '"const": "f"' not in schema


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (allowed("auto", "h"), "names h, which is not in tools"),
        (allowed("auto"), "tools must be a list of at least one"),
        (allowed("none", "f"), "mode must be auto or required"),
        ({"type": "allowed_tools"}, "mode must be"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"name": "f"}]}},
            "tools[0] must be an object of type function",
        ),
    ],
)
def test_malformed_allowed_tools_are_rejected(raw: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ToolUse.of([tool(name="f")], raw, True)

    assert words in str(caught.value)
