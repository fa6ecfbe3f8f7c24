"""Outputs in each format of tool calls and reasoning, and their expected parses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.chat.deltas import Reasoning
from router.chat.parsers.base import Parser
from router.chat.parsers.registry import (
    Formats,
    find_reasoning_format,
    find_tool_format,
)
from router.chat.tools import ToolUse
from tests.support.router.chat_support import Plain


def _tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    _tool("get_weather", city={"type": "string"}, days={"type": "integer"}),
    _tool(
        "run",
        code={"type": "string"},
        options={"type": "object"},
        tags={"type": "array"},
        verbose={"type": "boolean"},
        ratio={"type": "number"},
        note={"type": ["string", "null"]},
    ),
    _tool("get_time"),
]
#: tools that no example calls
OTHER_TOOLS = [_tool("unrelated")]


@dataclass(frozen=True)
class Example:
    """Output of a model and its expected parse; ``prompt`` is the end of its prompt."""

    text: str
    expected: Sequence[Plain]
    prompt: str = ""
    #: whether the output is complete and its arguments are JSON
    is_valid: bool = True


def _same(text: str) -> Example:
    """Return an output that is all content."""
    return Example(text, [text])


def _hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


_PARIS = ("get_weather", '{"city": "Paris"}')
_ODD = '{"code": "a = {\\"b\\": [1]}}\\n</tool_call>", "options": {"x": [{"y": "]}"}]}}'
_UNICODE = '{"city": "Zürich 北京 🙂 \\u00e4 \\ud83d\\ude00"}'

_HERMES = [
    _same("Plain text with <tags> and {braces}.\n"),
    Example(_hermes(*_PARIS), [_PARIS]),
    Example(f"{_hermes(*_PARIS)}\n{_hermes('get_time', '{}')}", [_PARIS, ("get_time", "{}")]),
    Example(f"Let me look.\n\n{_hermes(*_PARIS)}\nDone.", ["Let me look.", _PARIS, "Done."]),
    Example(_hermes("run", _ODD), [("run", _ODD)]),
    Example(_hermes("get_weather", _UNICODE), [("get_weather", _UNICODE)]),
    _same("<tool_call>\nget_weather(Paris)\n</tool_call>"),
    _same(_hermes("unknown", "{}")),
]


def _llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


_LLAMA3 = [
    _same('Plain text; {"a": 1}'),
    Example(_llama(*_PARIS), [_PARIS]),
    Example(f"<|python_tag|>{_llama(*_PARIS)}", [_PARIS]),
    Example(f"{_llama(*_PARIS)}; {_llama('get_time', '{}')}", [_PARIS, ("get_time", "{}")]),
    Example(f"Well.\n<|python_tag|>{_llama(*_PARIS)}\nDone.", ["Well.", _PARIS, "Done."]),
    Example(_llama("run", _ODD), [("run", _ODD)]),
    Example(_llama("get_weather", _UNICODE), [("get_weather", _UNICODE)]),
    _same('<|python_tag|>brave_search.call(query="x")'),
]

_PYTHONIC = [
    _same("Plain text (with brackets) [1, 2]."),
    _same("[1, 2, 3] is a list."),
    Example('[get_weather(city="Paris")]', [_PARIS]),
    Example(
        "<|python_tag|>[get_weather(city='Paris', days=3), get_time()]",
        [("get_weather", '{"city": "Paris", "days": 3}'), ("get_time", "{}")],
    ),
    Example("Well.\n<|python_tag|>[get_time( ),]\nDone.", ["Well.", ("get_time", "{}"), "Done."]),
    Example(
        '[run(code="print(\\"[(\\")\\n\\x41\\u00e9\\q", options={"a": [1, -2.5e3, {}], \'b\': None,'
        "}, tags=(True, False, []), ratio=.5, note='''it's\n''')]",
        [
            (
                "run",
                '{"code": "print(\\"[(\\")\\nAé\\\\q", "options": {"a": [1, -2.5e3, {}], "b": null}'
                ', "tags": [true, false, []], "ratio": 0.5, "note": "it\'s\\n"}',
            )
        ],
    ),
    Example(
        '[get_weather(city="Zürich 北京 🙂 \\U0001f642")]',
        [("get_weather", '{"city": "Zürich 北京 🙂 🙂"}')],
    ),
    Example('[run(code="""a\\"""")]', [("run", '{"code": "a\\""}')]),
    Example('[get_weather(city="\\ud83d")]', [("get_weather", '{"city": "\\ud83d"}')]),
    *map(
        _same,
        (
            "[get_weather(Paris)]",
            "[get_weather(city=Paris)]",
            '[get_weather("Paris")]',
            '[unknown(city="Paris")]',
            "[get_weather(days=007)]",
            "[get_weather(days=1 + 2)]",
            "[get_weather(city='a', city='b')]",
            "[run(options={1: 2})]",
            '[get_weather(city="Par',
            "[get_weather(days=1e)]",
            "[run(tags=" + "[" * 40 + "]" * 40 + ")]",
        ),
    ),
    Example(
        '[get_time(), unknown(a=1), get_weather(city="Paris")]',
        [("get_time", "{}"), ', unknown(a=1), get_weather(city="Paris")]'],
    ),
]


def _listed(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "arguments": {arguments}}}'


_MISTRAL = [
    _same("Plain text with [brackets] and {braces}."),
    Example(f"[TOOL_CALLS][{_listed(*_PARIS)}]", [_PARIS]),
    Example(
        f"[TOOL_CALLS] [{_listed(*_PARIS)}, {_listed('get_time', '{}')}]",
        [_PARIS, ("get_time", "{}")],
    ),
    Example('[TOOL_CALLS]get_weather{"city": "Paris"}', [_PARIS]),
    Example(
        'I look.[TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]get_time{} Done.',
        ["I look.", _PARIS, ("get_time", "{}"), "Done."],
    ),
    Example('[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', [_PARIS]),
    Example(
        '[TOOL_CALLS]get_weather[CALL_ID]aB3dE5gH7[ARGS]{"city": "Paris"}'
        "[TOOL_CALLS]get_time[ARGS]{}",
        [_PARIS, ("get_time", "{}")],
    ),
    Example(f"[TOOL_CALLS]run[ARGS]{_ODD}", [("run", _ODD)]),
    Example(f"[TOOL_CALLS]get_weather{_UNICODE}", [("get_weather", _UNICODE)]),
    _same("[TOOL_CALLS]get_weather[ARGS]none"),
    _same("[TOOL_CALLS]unknown{}"),
    _same('[TOOL_CALLS][{"name": "unknown", "arguments": {}}]'),
    _same("[TOOL_CALLS]get_weather[CALL_ID]1[ARG]{}"),
]


def _xml(name: str, **values: str) -> str:
    parts = (f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{''.join(parts)}</function>\n</tool_call>"


_QWEN3_CODER = [
    _same("Plain text with <tags> and <function>."),
    Example(_xml("get_weather", city="Paris"), [_PARIS]),
    Example(
        f"{_xml('get_weather', city='Paris', days='3')}\n{_xml('get_time')}",
        [("get_weather", '{"city": "Paris", "days": 3}'), ("get_time", "{}")],
    ),
    Example(f"I look.\n{_xml('get_weather', city='Paris')}\nDone.", ["I look.", _PARIS, "Done."]),
    Example(
        _xml(
            "run",
            code='\nif a < b:\n\tprint("{}</param>")\n',
            options='{"x": [{"y": "]}"}]}',
            tags='["a", 1]',
            verbose="True",
            ratio="-2.5",
            note="null",
        ),
        [
            (
                "run",
                '{"code": "\\nif a < b:\\n\\tprint(\\"{}</param>\\")\\n", '
                '"options": {"x": [{"y": "]}"}]}, "tags": ["a", 1], "verbose": true, '
                '"ratio": -2.5, "note": null}',
            )
        ],
    ),
    Example(
        _xml(
            "run",
            options="{'a': 1}",
            tags='{"a": 1}',
            verbose="yes",
            ratio="1e",
            note="nul\\l",
            other="5",
        ),
        [
            (
                "run",
                '{"options": "{\'a\': 1}", "tags": "{\\"a\\": 1}", "verbose": "yes", '
                '"ratio": "1e", "note": "nul\\\\l", "other": "5"}',
            )
        ],
    ),
    Example(
        _xml("get_weather", city="Zürich 北京 🙂"), [("get_weather", '{"city": "Zürich 北京 🙂"}')]
    ),
    Example("<function=get_weather><parameter=city>Paris</parameter></function>", [_PARIS]),
    Example("<tool_call><function=get_time>\nI forgot.", [("get_time", "{}"), "I forgot."]),
    Example(
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar",
        [("get_weather", '{"city": "Par')],
        is_valid=False,
    ),
    _same("<tool_call>\n<function=unknown>\n</function>\n</tool_call>"),
    _same('<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'),
]


def _v3(name: str, arguments: str) -> str:
    return (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
        "<｜tool▁call▁end｜>"
    )


def _v31(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def _deepseek(*calls: str) -> str:
    return f"<｜tool▁calls▁begin｜>{''.join(calls)}<｜tool▁calls▁end｜>"


_DEEPSEEK = [
    _same("Plain text with <tags> and ```json\n{}\n```."),
    *(
        example
        for call in (_v3, _v31)
        for example in (
            Example(_deepseek(call(*_PARIS)), [_PARIS]),
            Example(
                _deepseek(call(*_PARIS), "\n", call("get_time", "{}")),
                [_PARIS, ("get_time", "{}")],
            ),
            Example(f"I look.\n{_deepseek(call(*_PARIS))}\nDone.", ["I look.", _PARIS, "Done."]),
            Example(_deepseek(call("run", _ODD)), [("run", _ODD)]),
            Example(_deepseek(call("get_weather", _UNICODE)), [("get_weather", _UNICODE)]),
            _same(_deepseek(call("unknown", "{}"))),
            _same(_deepseek(call("get_time", "now"))),
        )
    ),
    _same("<｜tool▁calls▁begin｜>get_time<｜tool▁calls▁end｜>"),
]


def _message(channel: str, text: str, mark: str = "<|end|>") -> str:
    return f"<|channel|>{channel}<|message|>{text}{mark}"


def _called(name: str, arguments: str) -> str:
    return _message(f"commentary to=functions.{name} <|constrain|>json", arguments, "<|call|>")


_ANALYSIS = _message("analysis", "The user\nwants 1 < 2. ")
_AGAIN = "<|start|>assistant"
_GPT_OSS = [
    Example(_message("final", "Plain text with <tags>.\n", ""), ["Plain text with <tags>.\n"]),
    _same("Text without a header."),
    _same('{"city": "Paris"}'),
    Example(
        f"{_ANALYSIS}{_AGAIN}{_message('final', 'Yes.', '<|return|>')}",
        [Reasoning("The user\nwants 1 < 2. "), "Yes."],
    ),
    Example(_called(*_PARIS), [_PARIS]),
    Example(
        f"{_ANALYSIS}{_AGAIN}{_message('commentary', 'I look.')}{_AGAIN}{_called(*_PARIS)}",
        [Reasoning("The user\nwants 1 < 2. "), "I look.", _PARIS],
    ),
    Example(
        f"{_called(*_PARIS)}{_AGAIN}{_called('get_time', '')}{_AGAIN}{_message('final', 'Done.')}",
        [_PARIS, ("get_time", "{}"), "Done."],
    ),
    Example(
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}', [_PARIS]
    ),
    Example(
        "<|start|>assistant to=functions.get_weather<|channel|>analysis<|message|>"
        '{"city": "Paris"}',
        [_PARIS],
    ),
    Example(_called("run", _ODD), [("run", _ODD)]),
    Example(_called("get_weather", _UNICODE), [("get_weather", _UNICODE)]),
    _same("<|channel|>commentary to=functions.unknown <|constrain|>json<|message|>{}"),
    _same("<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>now"),
    _same("<|channel|>analysis to=python code<|message|>print(1)"),
    Example(
        f"{_ANALYSIS}{_AGAIN}<|channel|>commentary to=functions.unknown<|message|>{{}}",
        [
            Reasoning("The user\nwants 1 < 2. "),
            "<|start|>assistant<|channel|>commentary to=functions.unknown<|message|>{}",
        ],
    ),
]


def _thought(opens: str, closes: str) -> list[Example]:
    inside = f"user\n{opens}\n"
    return [
        _same("Plain text with <tags>."),
        _same(f" \nLate {opens}no reasoning{closes}"),
        Example(f"{opens}\nHm, 1 < 2.\n{closes}\n\nYes.\n", [Reasoning("Hm, 1 < 2."), "Yes.\n"]),
        Example(
            f"Hm,\n\n[or]<not>\n\n{closes}\nYes.", [Reasoning("Hm,\n\n[or]<not>"), "Yes."], inside
        ),
        Example(f"{closes}Yes.", ["Yes."], inside),
        Example("Hm, \n", [Reasoning("Hm, \n")], inside),
        Example(f"{opens}{closes}\n\nYes.", ["Yes."]),
        Example("Yes.", ["Yes."], f"user\n{opens}\n\n{closes}\n\n"),
        Example(
            f"\n{opens}Größe 北京 🙂{closes} ja {opens}",
            [Reasoning("Größe 北京 🙂"), f" ja {opens}"],
        ),
        Example(
            f"{opens}I call.{closes}\n\n{_hermes(*_PARIS)}\nDone.",
            [Reasoning("I call."), _PARIS, "Done."],
        ),
        Example(f"{opens}{_hermes(*_PARIS)}{closes}", [Reasoning(_hermes(*_PARIS))]),
    ]


TOOL_EXAMPLES: Mapping[str, Sequence[Example]] = {
    "hermes": _HERMES,
    "llama3": _LLAMA3,
    "pythonic": _PYTHONIC,
    "mistral": _MISTRAL,
    "qwen3_coder": _QWEN3_CODER,
    "deepseek": _DEEPSEEK,
    "gpt_oss": _GPT_OSS,
}
#: Tool calls in these outputs are in the format of Hermes, except those of gpt-oss.
REASONING_EXAMPLES: Mapping[str, Sequence[Example]] = {
    "think": _thought("<think>", "</think>"),
    "mistral_think": _thought("[THINK]", "[/THINK]"),
    "gpt_oss": _GPT_OSS,
}
#: Fragments of random outputs in a format, beside its markers.
FRAGMENTS: Mapping[str, Sequence[str]] = {
    "hermes": ('{"name": "get_time"', ', "arguments": ', "{", "}", '"', "\\u00e4", "\n"),
    "llama3": ('{"name": "get_time"', ', "parameters": ', "{", "}", ";", '"', "\\ud83d"),
    "pythonic": ("[get_weather(", "city=", "'", '"', "\\x4", ",", "[", "]", "{", ":", ")", "1"),
    "mistral": ("[", "get_time", "{", "}", '{"name": "get_time", "arguments": {}', ",", "]", '"'),
    "qwen3_coder": (
        *("<function=run>", "<function=x>", "</function>", "<parameter=code>", "\n", "<", '"'),
        *("<parameter=options>", "<parameter=note>", "<parameter=", "</parameter>", "null", "{}"),
    ),
    "deepseek": ("function", "get_time", "{", "}", "```", "```json", "\n", '"'),
    "gpt_oss": ("assistant", "analysis", "final", "commentary", " to=functions.get_time", "{", "}"),
    "think": ("\n", " ", "a", "<", "</"),
    "mistral_think": ("\n", " ", "a", "[", "[/"),
}


#: Parsed once, because tests create a parser for each cut of an example.
_USE = ToolUse.of(TOOLS, None, True)


def tool_parser(name: str, tools: Sequence[Any] = TOOLS, *, is_parallel: bool = True) -> Parser:
    use = _USE if tools is TOOLS and is_parallel else ToolUse.of(tools, None, is_parallel)
    return use.parser(find_tool_format(name, ""), "request", 0)


def reasoning_parser(name: str, prompt: str = "") -> Parser:
    reasoning = find_reasoning_format(name, "")
    inner = tool_parser("gpt_oss" if name == "gpt_oss" else "hermes")
    return Formats(None, reasoning).wrapped(inner, prompt)
