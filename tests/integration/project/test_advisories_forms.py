"""Inputs from advisories, as in test_advisories.py: grammars and chat templates.

They crashed other servers' workers or blocked their event loops.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from everlift.errors import (
    InvalidGrammar,
    InvalidRequest,
    OutOfRange,
    PromptTextTooLong,
    PromptTooLong,
    TemplateTimeout,
    Unsupported,
)
from everlift.v1 import inference_pb2 as pb
from tests.support.router.bystander import beside_a_good_stream
from tests.support.router.fronts import (
    CHAT,
    Cases,
    Send,
    chat,
    check,
    completion,
    demo_fronts,
    kserve,
    native,
    said,
    tokenize,
)
from tests.support.worker.grammar_support import DEMO_MODEL

DEEP = 20_000
#: Fields of structured_outputs by kind of grammar.
FIELDS = {"regex": "regex", "json_schema": "json", "ebnf": "grammar"}


def over_each(kind: str, texts: dict[str, str]) -> Cases:
    return {
        f"{front}, {name}": (InvalidGrammar, send)
        for name, text in texts.items()
        for front, send in (
            ("native", native(sampling=pb.Sampling(grammar=pb.Grammar(**{kind: text})))),
            ("kserve", kserve(**{kind: text})),
            ("completion", completion(structured_outputs={FIELDS[kind]: text})),
            ("chat", chat(structured_outputs={FIELDS[kind]: text})),
        )
    }


async def test_malformed_regex_fails_only_its_request() -> None:
    texts = {
        "open": "(a",
        "range": "[z-a]",
        "counts": "a{3,1}",
        "deep": "(" * DEEP + "a" + ")" * DEEP,
    }
    async with demo_fronts() as fronts:
        await check(fronts, over_each("regex", texts))


@pytest.mark.long
async def test_malformed_json_schema_fails_only_its_request() -> None:
    texts = {
        "no JSON": '{"type":',
        "no type": '{"type": "something"}',
        "no types": '{"type": [{}]}',
        "pattern": '{"type": "string", "pattern": "(\\\\d+"}',
        "itself": '{"$ref": "#"}',
        "deep": "[" * DEEP + "]" * DEEP,
    }
    bad = {"type": "object", "properties": {"a": {"type": "something"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": bad}}
    cases = over_each("json_schema", texts) | {
        "response_format": (InvalidGrammar, completion(response_format=form)),
        "chat, response_format": (InvalidGrammar, chat(response_format=form)),
    }
    async with demo_fronts() as fronts:
        await check(fronts, cases)


@pytest.mark.long
async def test_malformed_or_endless_ebnf_fails_only_its_request() -> None:
    texts = {
        "itself": "root ::= root",
        "each other": "root ::= a\na ::= b\nb ::= a",
        "deep": "root ::= " + "(" * DEEP + '"a"' + ")" * DEEP,
        "unknown": "root ::= other",
    }
    async with demo_fronts() as fronts:
        await check(fronts, over_each("ebnf", texts))


def called(parameters: dict[str, Any], **choice: Any) -> Send:
    """Return a chat with a tool that, by default, the output must call."""
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return chat(tools=[tool], **{"tool_choice": "required"} | choice)


def argument(**schema: Any) -> dict[str, Any]:
    properties = {"a": {"type": "string"} | schema}
    return {"type": "object", "properties": properties, "required": ["a"]}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


async def test_malformed_tool_schema_fails_only_its_request() -> None:
    named = {"type": "function", "function": {"name": "f"}}
    cases: Cases = {
        "no object": (InvalidRequest, called({"type": "something"})),
        "type": (InvalidGrammar, called(argument(type="something"))),
        "pattern": (InvalidGrammar, called(argument(pattern="(\\d+"))),
        "named": (InvalidGrammar, called(argument(pattern="(\\d+"), tool_choice=named)),
        "types": (InvalidGrammar, called(argument(type=[{}]))),
        "deep": (OutOfRange, called(argument(**nested(60)))),
    }
    async with demo_fronts() as fronts:
        await check(fronts, cases)


# chat templates

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


async def test_chat_template_from_a_client_is_rejected() -> None:
    messages = [said("a")]
    cases: Cases = {}
    for name, value in {
        "chat_template": LOOP,
        "tokenize": True,
        "return_dict": True,
        "return_tensors": "pt",
        "continue_final_message": True,
        "documents": "a",
        "__class__": "a",
        "messages": "a",
    }.items():
        for path, send in (("chat", chat), ("tokenize", tokenize)):
            fields = {"messages": messages, "chat_template_kwargs": {name: value}}
            cases[f"{path}, {name}"] = InvalidRequest, send(**fields)
    for path, send in (("chat", chat), ("tokenize", tokenize)):
        cases[path] = Unsupported, send(messages=messages, chat_template=LOOP)
        cases[f"{path}, text"] = None, send(messages=[said(LOOP[:90])])
    async with demo_fronts() as fronts:
        await check(fronts, cases)


async def test_long_chat_does_not_block_the_event_loop() -> None:
    long = [said("count " * 500_000)]
    cases: Cases = {
        "chat": (PromptTextTooLong, chat(messages=long)),
        "tokenize": (PromptTextTooLong, tokenize(messages=long)),
        "completion": (PromptTooLong, completion(prompt="count " * 20_000)),
    }
    async with demo_fronts() as fronts:
        await check(fronts, cases)


@pytest.mark.long
async def test_endless_chat_template_delays_no_stream(tmp_path: Path) -> None:
    """The template belongs to the model and loops for certain chats only."""
    directory = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    template = "{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}a"
    (directory / "chat_template.jinja").write_text(template)
    async with demo_fronts(directory, template_timeout=3.0) as fronts:
        assert await fronts.chat(max_tokens=1) is None
        looping = asyncio.create_task(fronts.over_http(CHAT, {"messages": [said("loop")]}))
        async with beside_a_good_stream(fronts.grpc):
            assert await looping is TemplateTimeout
        assert await fronts.chat(max_tokens=1) is None
