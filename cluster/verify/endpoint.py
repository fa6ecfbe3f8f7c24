"""Client of an OpenAI endpoint that reads streams, breaks them and resumes them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from cluster.errors import VerificationFailed

_DONE = "[DONE]"


@dataclass(slots=True)
class Received:
    """Output that a client has received of one stream.

    ``num_pieces`` counts the events with text. ``last_id`` is the id of the last event; empty if
    the endpoint sends none. ``error`` says why the stream ended early; empty if it did not.
    """

    text: str = ""
    num_pieces: int = 0
    last_id: str = ""
    error: str = ""
    is_finished: bool = False
    on_piece: Callable[[], None] = field(default=lambda: None)


class Endpoint:
    """OpenAI endpoint with chat completions at ``base_url``, which ends with ``/v1``."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str) -> None:
        self._session = session
        self._base_url = base_url.rstrip("/")
        self.model = ""

    async def find_model(self, model: str) -> None:
        """Use ``model``, or the first model that the endpoint lists if ``model`` is empty.

        The models are listed in either case. Raises VerificationFailed if the endpoint does not
        answer with a list of models, or lists none.
        """
        try:
            async with self._session.get(f"{self._base_url}/models") as answer:
                answer.raise_for_status()
                names = [each["id"] for each in (await answer.json())["data"]]
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
            raise VerificationFailed(f"{self._base_url}: no list of models: {error}") from None
        if not names:
            raise VerificationFailed(f"{self._base_url} lists no model")
        self.model = model or names[0]

    async def read(
        self,
        body: Mapping[str, Any],
        key: str,
        received: Received,
        break_after: int | None = None,
    ) -> None:
        """Read the stream of a chat, and append it to ``received``.

        If ``received`` has the id of an event, the stream resumes after this event. ``key`` is the
        idempotency key. With ``break_after``, the client disconnects once ``received`` has that
        many pieces. An error ends the stream, and is written to ``received``.
        """
        headers = {"idempotency-key": key, "accept": "text/event-stream"}
        if received.last_id:
            headers["last-event-id"] = received.last_id
        received.error, received.is_finished = "", False
        try:
            async for event_id, data in self._events(body, headers):
                received.last_id = event_id or received.last_id
                if data == _DONE:
                    received.is_finished = True
                    return
                for piece in _pieces(json.loads(data)):
                    received.text += piece
                    received.num_pieces += 1
                    received.on_piece()
                if break_after is not None and received.num_pieces >= break_after:
                    return
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, _Failed) as error:
            received.error = str(error) or type(error).__name__
            return
        received.error = "the stream ended without [DONE]"

    async def _events(
        self, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> AsyncGenerator[tuple[str, str]]:
        """Yield the id and the data of each event of a chat.

        An event without an id has that of the event before, or an empty one if there was none.
        Raises _Failed if the HTTP status is not 200, and aiohttp.ClientError, OSError or ValueError
        if the stream cannot be read.
        """
        url = f"{self._base_url}/chat/completions"
        given = {"model": self.model, "stream": True, **body}
        async with self._session.post(url, json=given, headers=headers) as answer:
            if answer.status != 200:
                raise _Failed(f"HTTP status {answer.status}")
            event_id = ""
            async for line in answer.content:
                text = line.decode().rstrip("\r\n")
                if text.startswith("id:"):
                    event_id = text[3:].strip()
                elif text.startswith("data:"):
                    yield event_id, text[5:].strip()


def _pieces(chunk: Any) -> list[str]:
    """Return the texts of a chat's chunk. Raises _Failed if it is an error, or no chunk."""
    try:
        if error := chunk.get("error"):
            raise _Failed(str(error))
        deltas = [choice.get("delta") or {} for choice in chunk.get("choices") or ()]
        texts = [delta.get("content") or "" for delta in deltas]
    except (AttributeError, TypeError):
        raise _Failed("the data of an event is not a chunk of a chat") from None
    if not all(isinstance(text, str) for text in texts):
        raise _Failed("the content of a chunk is not a text")
    return [text for text in texts if text]


class _Failed(Exception):
    """Raised if the endpoint reports an error."""
