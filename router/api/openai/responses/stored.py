"""Stored responses: their requests in the ledger, read as responses and as turns."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from everlift.errors import InvalidRequest, UnknownRequest
from everlift.request_id import strip_tenant
from everlift.text import Vocabulary
from router.api.chat_renderer import ChatRenderer
from router.api.http.transcript import Usage
from router.api.openai.responses.answer import FROM_START, ResponseAnswer
from router.api.openai.responses.items import Item, input_turns, tool_use
from router.api.openai.responses.record import Record
from router.api.service import Inference
from router.auth.caller import Caller
from router.chat.conversation import Turn
from router.ledger.entry import State
from router.requests.request import LiveRequest
from router.requests.served_models import ServedModels

PREFIX = "resp_"
#: Maximum number of earlier responses that a response continues.
_MAX_ANCESTORS = 1024
#: Maximum number of earlier responses that are read from the ledger at the same time.
READS_AT_ONCE = 8
#: Number of last tokens of a prompt that the parser of the output needs.
_PROMPT_TAIL = 64
_STATUSES = {
    State.QUEUED: "queued",
    State.RUNNING: "in_progress",
    State.FAILED: "failed",
    State.EXPIRED: "failed",
    State.CANCELLED: "cancelled",
}


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """Response in the ledger, with the output that the ledger had when it was read."""

    name: str
    record: Record
    live: LiveRequest
    answer: ResponseAnswer

    @property
    def usage(self) -> Usage:
        request, entry = self.live.request, self.live.entry
        return Usage(len(request.prompt_ids), sum(entry.num_tokens), entry.tally.cached_tokens)

    @property
    def body(self) -> dict[str, object]:
        """Return the response as JSON; with ``usage`` once it has ended."""
        entry = self.live.entry
        status = _STATUSES.get(entry.state) or self.answer.status
        response = self.answer.response(status, self.usage if entry.state.is_final else None)
        if status == "failed":
            response["error"] = {"code": entry.error_slug, "message": entry.error_message}
        return response

    @property
    def output_items(self) -> list[Item]:
        items = self.body["output"]
        assert isinstance(items, list)
        return items

    @property
    def turns(self) -> list[Turn]:
        """Return the turns of the response's input and output.

        Raises InvalidRequest unless the response has finished.
        """
        if self.live.entry.state is not State.FINISHED:
            status = self.body["status"]
            raise InvalidRequest(
                f"the response {PREFIX}{self.name} is {status} and cannot be continued",
                field="previous_response_id",
            )
        items = self.output_items
        return input_turns(self.record.body["input"]) + (input_turns(items) if items else [])


class StoredResponses:
    """Reader of stored responses."""

    def __init__(self, inference: Inference, renderer: ChatRenderer, models: ServedModels) -> None:
        self._inference = inference
        self._renderer = renderer
        self._models = models

    async def get(self, caller: Caller, response_id: str) -> StoredResponse:
        """Return a response.

        Raises UnknownRequest if there is none, InvalidRequest if the id is malformed, UnknownModel
        if the response's model is no longer served, and LedgerUnavailable.
        """
        live, record = await self._read(caller, response_id)
        answer = self.answer(live, record)
        choice = live.choices[0]
        reason = choice.finish_reason
        for _ in answer.read(
            choice.output.whole_text,
            choice.output.tokens,
            [it.to_proto() for it in choice.output.logprobs],
            None if reason is None else reason.name.lower(),
        ):
            await asyncio.sleep(0)
        if reason is None and live.entry.state.is_final:
            answer.cut_off()
        return StoredResponse(strip_tenant(live.request.request_id), record, live, answer)

    async def record(self, caller: Caller, response_id: str) -> Record:
        """Return the record of a response, even if the response's model is no longer served.

        Raises UnknownRequest if there is none, InvalidRequest if the id is malformed, and
        LedgerUnavailable.
        """
        _, record = await self._read(caller, response_id)
        return record

    async def _read(self, caller: Caller, response_id: str) -> tuple[LiveRequest, Record]:
        live = await self._inference.read(caller, response_id.removeprefix(PREFIX))
        record = await _record(live)
        if record is None or not response_id.startswith(PREFIX):
            raise UnknownRequest(f"there is no stored response {response_id}")
        return live, record

    async def created_at(self, caller: Caller, name: str) -> int | None:
        """Return the time at which a stored response was created; None if there is none.

        Raises LedgerUnavailable.
        """
        try:
            live = await self._inference.read(caller, name)
        except UnknownRequest:
            return None
        record = await _record(live)
        return None if record is None else record.created_at

    def answer(self, live: LiveRequest, record: Record, after: int = FROM_START) -> ResponseAnswer:
        """Return a writer that encodes a stored response for the client; no output is added yet.

        The writer's stream begins after the event with the sequence number ``after``. Raises
        UnknownModel if the response's model is no longer served.
        """
        request, name = live.request, strip_tenant(live.request.request_id)
        model = self._models.of(request)
        shown = model.tokenizer.with_special_tokens()
        tail = shown.decode(request.prompt_ids[-_PROMPT_TAIL:])
        rendered = self._renderer.rendered(model, tail, tool_use(record.prompt_fields))
        is_constrained = request.sampling.grammar is not None
        parser = rendered.parser(name, 0, is_constrained=is_constrained)
        vocabulary: Vocabulary = shown if request.keep_special_tokens else model.tokenizer
        return ResponseAnswer(name, request.model, record, parser, vocabulary, after)

    async def chain(self, caller: Caller, response_id: str) -> list[StoredResponse]:
        """Return a response and all earlier ones that it continues, the first one first.

        Raises UnknownRequest if one of them is missing, UnknownModel if the model of one is no
        longer served, and LedgerUnavailable. Raises InvalidRequest if the id is malformed, or if
        there are too many responses. Raises InvalidRequest also if the response belongs to a
        conversation, because the earlier responses would lack the conversation's other items.
        """
        last = await self.get(caller, response_id)
        if (conversation_id := last.record.conversation_id) is not None:
            raise InvalidRequest(
                f"the response {response_id} belongs to a conversation: continue it with "
                f"conversation {conversation_id}",
                field="previous_response_id",
            )
        names = last.record.ancestors
        if len(names) >= _MAX_ANCESTORS:
            raise InvalidRequest(
                f"a response continues at most {_MAX_ANCESTORS} responses",
                field="previous_response_id",
            )
        return [*await self._get_all(caller, names), last]

    async def _get_all(self, caller: Caller, names: Sequence[str]) -> list[StoredResponse]:
        stored: list[StoredResponse] = []
        for start in range(0, len(names), READS_AT_ONCE):
            part = names[start : start + READS_AT_ONCE]
            stored += await asyncio.gather(*(self.get(caller, PREFIX + name) for name in part))
        return stored


async def _record(live: LiveRequest) -> Record | None:
    """Return the record that is stored with a request; None if there is none."""
    request = live.request
    # Only requests of responses have an attachment.
    if not request.attachment:
        return None
    # Even a short attachment may be long when unpacked, so its length does not matter.
    return await asyncio.to_thread(Record.from_bytes, request.attachment, request.images)
