"""Stored responses: long ones are read without blocking the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from everlift.errors import UnknownRequest
from everlift.images import Image
from everlift.messages import FinishReason
from router.api.chat_renderer import ChatRenderer
from router.api.openai.responses.record import Record
from router.api.openai.responses.stored import StoredResponses
from router.auth.caller import ANYONE, Caller
from router.chat.parsers.base import pieces_of
from router.ledger.entry import Entry, State
from router.requests.request import LiveRequest, Output
from router.requests.served_models import ServedModels
from router.requests.tokenizer import ServedModel
from tests.support.ledger.ledgers import make_request

MODEL = ServedModel.load("fake")
RECORD = Record({"input": "a"}, 7, [])
TEXT = "a" * 40_000


class Inference:
    """Inference with one request, whose attachment is ``attachment``; its output is TEXT."""

    def __init__(self, attachment: bytes) -> None:
        request = replace(
            make_request(prompt_ids=(1,)),
            model=MODEL.name,
            attachment=attachment,
            stop=(),
            stop_token_ids=(),
        )
        output = Output.of(request, MODEL.tokenizer)
        output.extend(list(TEXT.encode()))
        entry = Entry(
            "r", State.FINISHED, "g", 1.0, (len(TEXT),), finish_reasons=(FinishReason.STOP,)
        )
        self._live = LiveRequest(request, entry, [output], 1.0)

    async def read(self, caller: Caller, request_id: str) -> LiveRequest:
        return self._live


def responses(attachment: bytes) -> StoredResponses:
    inference: Any = Inference(attachment)
    return StoredResponses(inference, ChatRenderer({}), ServedModels([MODEL]))


async def test_response_is_parsed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def to_thread(work: Callable[..., Any], *args: Any) -> Any:
        return work(*args)

    # While a thread works, the others would have any number of turns.
    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    task = asyncio.create_task(others())
    stored = await responses(RECORD.to_bytes()).get(ANYONE, "resp_r")
    task.cancel()
    assert stored.output_items[0]["content"][0]["text"] == TEXT
    assert turns >= len([*pieces_of(TEXT)])


async def test_record_is_unpacked_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def from_bytes(data: bytes, images: Sequence[Image] = ()) -> Record:
        threads.append(threading.get_ident())
        return RECORD

    monkeypatch.setattr(Record, "from_bytes", from_bytes)
    stored = responses(RECORD.to_bytes())
    assert await stored.record(ANYONE, "resp_r") == RECORD
    assert await stored.created_at(ANYONE, "r") == 7
    assert len(threads) == 2 and threading.get_ident() not in threads


async def test_request_without_record_is_no_response() -> None:
    stored = responses(b"")
    assert await stored.created_at(ANYONE, "r") is None
    with pytest.raises(UnknownRequest, match="no stored response resp_r"):
        await stored.get(ANYONE, "resp_r")
