"""Server-sent events of streamed answers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from everlift.errors import EverliftError
from everlift.v1 import inference_pb2 as pb
from router.api.http.transcript import NewOutput, Usage


class Event(NamedTuple):
    """Server-sent event: its data, and its name; an empty name is not sent."""

    data: str
    name: str = ""


class StreamedAnswer(Protocol):
    """Writer of a streamed answer.

    ``usage`` has the token counts so far. Events are returned in their order.
    """

    def first_events(self, usage: Usage) -> Sequence[Event]:
        """Return the events before any output. They are not sent when a client resumes a stream."""
        ...

    def events(self, output: NewOutput, usage: Usage) -> Sequence[Event]:
        """Return the events of new output; empty if there is nothing to send.

        The caller drops the events of output that ``is_known``, which only the last events need.
        """
        ...

    def last_events(self, usage: Usage, spans: Sequence[pb.Span]) -> Sequence[Event]:
        """Return the events after all output; ``spans`` are the time breakdown, if requested."""
        ...

    def error_events(
        self, error: EverliftError, params: Mapping[str, str], resume: Mapping[str, str]
    ) -> Sequence[Event]:
        """Return the events that end a stream that failed with ``error``.

        ``params`` maps names of fields in everlift.messages to the client's names. ``resume`` has
        the headers with which the same POST continues the stream.
        """
        ...
