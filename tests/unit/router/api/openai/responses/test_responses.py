"""Creation of responses: work on large requests leaves the event loop."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from everlift.v1 import inference_pb2 as pb
from router.api.http.fields import parse
from router.api.openai.responses.fields import ResponseFields
from router.api.openai.responses.record import Record
from router.api.openai.responses.responses import Responses, _Earlier
from router.auth.caller import ANYONE
from router.chat.conversation import Turn
from router.requests.tokenizer import ByteTokenizer

LONG = "a" * 5000
CALL: Any = SimpleNamespace(caller=ANYONE, headers={})


class Renderer:
    async def render(self, model: Any, conversation: Any) -> Any:
        shown = SimpleNamespace(name="m", longest_sequence=100)
        return SimpleNamespace(model=shown, images=(), parser=lambda *_, **__: None)


class Answering:
    def chat_message(self, generation: Any, rendered: Any) -> pb.GenerateRequest:
        return pb.GenerateRequest()

    def set_session(self, call: Any, name: str, *_: Any) -> str:
        return name

    def vocabulary(self, message: Any) -> ByteTokenizer:
        return ByteTokenizer()


def responses(chain: list[Any]) -> Responses:
    async def stored_chain(caller: Any, response_id: str) -> list[Any]:
        return chain

    answering: Any = Answering()
    renderer: Any = Renderer()
    models: Any = SimpleNamespace(requested=lambda name: None)
    stored: Any = SimpleNamespace(chain=stored_chain)
    unused: Any = None
    return Responses(answering, unused, renderer, models, stored, unused)


@pytest.mark.parametrize(("text", "is_inline"), [("a", True), (LONG, False)])
async def test_large_request_is_encoded_in_a_thread(
    text: str, is_inline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def to_bytes(record: Record, images: Any) -> bytes:
        threads.append(threading.get_ident())
        return b"R"

    monkeypatch.setattr(Record, "to_bytes", to_bytes)
    fields = parse(ResponseFields, {"input": text})
    prepared = await responses([])._prepare(CALL, "r", fields, _Earlier())
    assert prepared.message.attachment == b"R"
    assert (threads == [threading.get_ident()]) == is_inline


class Stored:
    """Stored response; ``threads`` has the threads in which its turns were read."""

    name = "r"
    live = SimpleNamespace(request=SimpleNamespace(session_id="s"))

    def __init__(self, given: str, output: str) -> None:
        self.record = SimpleNamespace(body={"input": given})
        self.output_items = [{"role": "assistant", "content": output}]
        self.threads: list[int] = []

    @property
    def turns(self) -> list[Turn]:
        self.threads.append(threading.get_ident())
        return [Turn("user", ("a",))]


@pytest.mark.parametrize(
    ("given", "output", "is_inline"), [("a", "b", True), (LONG, "b", False), ("a", LONG, False)]
)
async def test_turns_of_long_responses_are_read_in_a_thread(
    given: str, output: str, is_inline: bool
) -> None:
    stored = Stored(given, output)
    fields = parse(ResponseFields, {"input": "a", "previous_response_id": "resp_r"})
    earlier = await responses([stored, stored])._earlier(CALL, fields)
    assert earlier == _Earlier([Turn("user", ("a",))] * 2, "s", ["r", "r"])
    assert (set(stored.threads) == {threading.get_ident()}) == is_inline
