"""Chats whose reasoning marks are special tokens, from the fields to the answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from everlift.messages import FinishReason, Submission
from everlift.v1 import inference_pb2 as pb
from router.api.anthropic.fields import MessagesFields
from router.api.anthropic.messages import Messages
from router.api.chat_renderer import RenderedChat
from router.api.http.fields import parse
from router.api.http.transcript import NewOutput, Usage
from router.api.openai import answering
from router.api.openai.answering import Answering
from router.api.openai.chat import ChatAnswer
from router.api.openai.envelope import Envelope
from router.api.openai.fields import ChatFields
from router.chat.conversation import Conversation
from router.chat.parsers.base import ReasoningFormat
from router.chat.parsers.plain import PlainParser
from router.chat.parsers.registry import Formats
from router.chat.parsers.think import ThinkParser
from router.chat.tools import ToolUse
from router.config import RouterConfig
from router.requests.request import Choice, Output
from router.requests.served_models import ServedModels
from router.requests.tokenizer import ServedModel
from tests.support.worker.vocabularies import BYTE_LEVEL

BEGIN, END = BYTE_LEVEL.encode("<s></s>")
THOUGHT, ANSWER = BYTE_LEVEL.encode("one two"), BYTE_LEVEL.encode("ten")
MODEL = ServedModel("m", BYTE_LEVEL, (), BYTE_LEVEL.vocab_size, 4096)
MARKED = ReasoningFormat(
    "marked",
    ("<s>", "</s>"),
    lambda inner, prompt: ThinkParser("<s>", "</s>", inner, prompt),
    lambda template: True,
)


class Generated:
    """Output of a request that a worker has generated."""

    trace = None
    prompt_tokens = 2

    def __init__(self, message: pb.GenerateRequest, tokens: Sequence[int]) -> None:
        request = MODEL.resolve(Submission.from_proto(message, "r", seed=1))
        output = Output.of(request, BYTE_LEVEL)
        output.extend(tokens)
        self._choice = Choice("r", 0, output, FinishReason.STOP)

    async def pieces(self) -> AsyncIterator[tuple[int, pb.GenerateResponse]]:
        yield 0, self._choice.piece(0)

    async def aclose(self) -> None:
        pass


async def answered(
    monkeypatch: pytest.MonkeyPatch,
    formats: Formats,
    tokens: Sequence[int],
    *,
    prompt: str = "hi",
    is_anthropic: bool = False,
    **fields: Any,
) -> Any:
    rendered = RenderedChat(MODEL, prompt, None, ToolUse.of(None, None, True), formats)

    async def render(model: ServedModel, conversation: Conversation) -> RenderedChat:
        return rendered

    async def submit(inference: Any, caller: Any, messages: Any, *rest: Any) -> Generated:
        return Generated(messages[0], tokens)

    monkeypatch.setattr(answering.Generation, "submit", submit)
    call: Any = SimpleNamespace(headers={}, response_headers={}, arrived_at=0.0, caller=None)
    renderer: Any = SimpleNamespace(render=render)
    inference: Any = SimpleNamespace(count_rejected=lambda error: None)
    models = ServedModels([MODEL])
    handler = Answering(RouterConfig(), inference, models, renderer)
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    response: Any
    if is_anthropic:
        read = parse(MessagesFields, {"model": "m", "max_tokens": 9, **body})
        response = await Messages(handler, renderer, models)._create(call, "r", read)
    else:
        response = await handler._chat(call, "r", parse(ChatFields, body))
    return json.loads(response.body)


async def test_chat_answers_with_its_reasoning(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [BEGIN, *THOUGHT, END, *ANSWER]
    body = await answered(monkeypatch, Formats(None, MARKED), tokens, logprobs=False)
    message = body["choices"][0]["message"]

    assert (message["reasoning_content"], message["content"]) == ("one two", "ten")
    assert body["usage"]["completion_tokens"] == len(tokens)
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": len(THOUGHT)}


async def test_chat_of_other_models_has_no_reasoning(monkeypatch: pytest.MonkeyPatch) -> None:
    body = await answered(monkeypatch, Formats(), [BEGIN, *THOUGHT, END, *ANSWER])
    message = body["choices"][0]["message"]

    assert message == {"role": "assistant", "content": "one twoten", "refusal": None}
    assert "completion_tokens_details" not in body["usage"]


@pytest.mark.parametrize("is_constrained", [False, True])
async def test_message_has_reasoning_unless_constrained(
    monkeypatch: pytest.MonkeyPatch, is_constrained: bool
) -> None:
    form = {"format": {"type": "json_schema", "schema": {}}} if is_constrained else {}
    body = await answered(
        monkeypatch,
        Formats(None, MARKED),
        ANSWER,
        prompt="hi<s>",
        is_anthropic=True,
        output_config=form,
    )

    [block] = body["content"]
    assert block["type"] == ("text" if is_constrained else "thinking")


async def test_chat_with_a_grammar_has_no_reasoning(monkeypatch: pytest.MonkeyPatch) -> None:
    form = {"type": "json_object"}
    body = await answered(monkeypatch, Formats(None, MARKED), ANSWER, response_format=form)

    assert body["choices"][0]["message"]["content"] == "ten"
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize("has_reasoning", [True, False])
def test_usage_so_far_counts_the_reasoning(has_reasoning: bool) -> None:
    answer = ChatAnswer(
        Envelope("r", 7, "m", None),
        BYTE_LEVEL.with_special_tokens(),
        lambda choice: MARKED.wrapped(PlainParser(), ""),
        has_logprobs=False,
        has_reasoning=has_reasoning,
    )
    counts: list[object] = []
    for number, token in enumerate([BEGIN, *THOUGHT, END, *ANSWER], 1):
        text = BYTE_LEVEL.with_special_tokens().decode([token])
        chunk = answer.chunk(NewOutput(0, text, [token], (), None), Usage(2, number))
        if chunk is not None and chunk["usage"] is not None:
            counts.append(chunk["usage"].get("completion_tokens_details"))
    if not has_reasoning:
        assert counts and not any(counts)
        return
    assert counts[0] == {"reasoning_tokens": 1}
    assert counts[-1] == {"reasoning_tokens": len(THOUGHT)}
