"""Where one client is in a request's stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from everlift.v1 import inference_pb2 as pb
from router.gateway.choice import Choice
from router.gateway.live import LiveRequest


class Reading:
    """``offsets`` by choice, 0 where none is given."""

    def __init__(self, live: LiveRequest, offsets: Sequence[int] = ()) -> None:
        self._live = live
        self._offsets = [*offsets, *[0] * (len(live.choices) - len(offsets))]
        #: choices whose last piece has not been read
        self._open = list(live.choices)

    def head(self) -> pb.GenerateResponse:
        return self._live.head(self._offsets[0])

    @property
    def is_at_end(self) -> bool:
        return not self._open

    def pieces(self) -> Iterator[pb.GenerateResponse]:
        """All that can be read now. The last piece of all has usage and timing."""
        for choice in tuple(self._open):
            while choice.is_readable_from(offset := self._offsets[choice.index]):
                piece = self._live.piece(choice, offset)
                self._offsets[choice.index] += len(piece.token_ids)
                if piece.finish_reason:
                    self._end(choice, piece)
                    yield piece
                    break
                yield piece

    def _end(self, choice: Choice, piece: pb.GenerateResponse) -> None:
        self._open.remove(choice)
        if self.is_at_end:
            self._live.close(piece)
