"""Chunks of streamed completions and chat completions. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everlift.errors import EverliftError
from everlift.explanation import spans_as_json
from everlift.v1 import inference_pb2 as pb
from router.api.http import errors
from router.api.http.streaming import Event
from router.api.http.transcript import NewOutput, Usage
from router.api.http.writer import encode


@dataclass(frozen=True, slots=True)
class ChunkOptions:
    """Token counts that a stream of chunks includes.

    ``has_usage``: a last chunk has the token counts. ``has_continuous_usage``: every chunk with
    output has the token counts so far.
    """

    has_usage: bool = False
    has_continuous_usage: bool = False


class ChunkedAnswer:
    """Base class of the writers of completions and chat completions.

    Server-sent events of such an answer have no name. The data of an event is a chunk, an error
    or ``[DONE]``.
    """

    def __init__(self, options: ChunkOptions) -> None:
        self._options = options

    def data(self, output: NewOutput, usage: Usage | None = None) -> str | None:
        """Return the chunk with the new output as JSON; None if there is nothing to send.

        The chunk has the token counts so far if ``usage`` is given.
        """
        raise NotImplementedError

    def usage_chunk(self, usage: Usage) -> Mapping[str, Any]:
        raise NotImplementedError

    def first_events(self, usage: Usage) -> Sequence[Event]:
        return ()

    def events(self, output: NewOutput, usage: Usage) -> Sequence[Event]:
        if output.is_known:
            return ()
        data = self.data(output, usage if self._options.has_continuous_usage else None)
        return () if data is None else (Event(data),)

    def last_events(self, usage: Usage, spans: Sequence[pb.Span]) -> Sequence[Event]:
        end = Event("[DONE]")
        if not (self._options.has_usage or spans):
            return (end,)
        chunk = self.usage_chunk(usage)
        if spans:
            chunk = {**chunk, "timing": spans_as_json(spans)}
        return Event(encode(chunk)), end

    def error_events(
        self, error: EverliftError, params: Mapping[str, str], resume: Mapping[str, str]
    ) -> Sequence[Event]:
        return (Event(encode(errors.streamed(error, params, resume))),)
