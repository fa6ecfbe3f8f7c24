"""Chat templates in the style of well-known families, tools, and helpers to parse outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from router.chat.deltas import Arguments, CallBegins, Content, Delta, Deltas, Reasoning
from router.chat.parsers.base import Parser, ToolFormat
from router.chat.templates import ChatTemplate
from router.chat.tools import ToolUse
from router.config import RouterConfig

HERMES = """\
{%- if tools %}<|im_start|>system
You may call functions. They are, one JSON object a line:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Write a call as <tool_call>{"name": ..., "arguments": {...}}</tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}
{% if message.role == 'tool' %}<tool_response>{{ message.content }}</tool_response>
{%- else %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think></think>
{% endif %}{% endif %}"""

LLAMA3 = """\
{{- bos_token }}
{%- if tools %}<|start_header_id|>system<|end_header_id|>

Answer {"name": ..., "parameters": {...}} to call one of:
{% for tool in tools %}{{ tool.function.name }}: {{ tool.function.parameters | tojson }}
{% endfor %}<|eot_id|>{% endif %}
{%- for message in messages %}
{%- if message.tool_calls %}<|start_header_id|>assistant<|end_header_id|>

{% for call in message.tool_calls %}{{ '; ' if not loop.first else '' -}}
{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}
{%- endfor %}<|eot_id|>
{%- else -%}
<|start_header_id|>{{ 'ipython' if message.role == 'tool' else message.role }}<|end_header_id|>

{{ message.content | trim }}<|eot_id|>
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if loop.index0 % 2 %}{{ raise_exception('user and assistant must take turns') }}{% endif -%}
[INST] {{ message.content }} [/INST]
{%- elif message.role == 'assistant' %} {{ message.content }}{{ eos_token }}
{%- else %}{{ raise_exception(message.role ~ ' is no role here') }}{% endif %}
{%- endfor %}"""

NAMES = ("weather", "search")
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "How it is outside",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "search"}},
]
USE = ToolUse.of(TOOLS, None, True)


def chat_template(directory: Path, text: str, config: RouterConfig | None = None) -> ChatTemplate:
    (directory / "chat_template.jinja").write_text(text)
    (directory / "tokenizer_config.json").write_text(
        '{"bos_token": {"content": "<s>"}, "eos_token": "</s>"}'
    )
    template = ChatTemplate.load(directory, config or RouterConfig())
    assert template is not None
    return template


def parsed(parser: Parser, pieces: Iterable[str]) -> list[Delta]:
    """Return the deltas that ``parser`` makes of a whole output, joined."""
    return joined([*(delta for piece in pieces for delta in parser.feed(piece)), *parser.finish()])


def joined(deltas: Sequence[Delta]) -> list[Delta]:
    """Join adjacent deltas of the same kind."""
    gathered = Deltas()
    for delta in deltas:
        match delta:
            case Content(text):
                gathered.content(text)
            case Reasoning(text):
                gathered.reasoning(text)
            case Arguments(index, text):
                gathered.arguments(index, text)
            case CallBegins():
                gathered.call(delta)
    return gathered.drain()


Plain = str | tuple[str, str] | Reasoning


def plain(deltas: Iterable[Delta]) -> list[Plain]:
    """Return contents, reasoning, and calls as pairs of name and arguments."""
    found: list[Plain] = []
    for delta in deltas:
        match delta:
            case Content(text):
                found.append(text)
            case Reasoning():
                found.append(delta)
            case CallBegins(name=name):
                found.append((name, ""))
            case Arguments(text=text):
                name, arguments = found.pop()  # type: ignore[misc]
                found.append((name, arguments + text))
    return found


def read(text: str, form: ToolFormat | None, use: ToolUse = USE) -> list[Plain]:
    """Return the parsed deltas of an output."""
    return plain(parsed(use.parser(form, "request", 0), [text]))
