"""Where one client is in a request's stream."""

from __future__ import annotations

from collections.abc import Sequence

from everlift.digest import token_digest
from everlift.errors import DataLoss, OffsetOutOfRange
from everlift.v1 import inference_pb2 as pb
from router.event_loop import now
from router.requests.choice import Choice
from router.requests.delivered import Delivered
from router.requests.request import LiveRequest


class Reading:
    """``offsets`` by choice, 0 where none is given; ``digests`` of the tokens before them, of none
    where the client does not say what it has. An offset with a digest may lie beyond what there is:
    it is read on when the choice has come so far again."""

    def __init__(
        self,
        live: LiveRequest,
        offsets: Sequence[int] = (),
        digests: Sequence[int] = (),
        *,
        explains: bool = False,
    ) -> None:
        """Its last piece ``explains`` where the time went. Raises OffsetOutOfRange."""
        self._live = live
        self._explains = explains
        self._offsets = [*offsets, *[0] * (len(live.choices) - len(offsets))]
        #: choices whose client has said what it has, which was not compared yet
        self._digests = dict(zip(live.choices, digests, strict=False))
        #: choices whose last piece has not been read
        self._open = list(live.choices)
        #: of these, whose turn it is
        self._turn = 0
        self._check()

    def _check(self) -> None:
        if len(self._offsets) > len(self._live.choices):
            raise OffsetOutOfRange(
                f"{len(self._offsets)} offsets of {len(self._live.choices)} choices"
            )
        for choice, offset in zip(self._live.choices, self._offsets, strict=True):
            last = choice.readable
            if choice in self._digests:
                last = self._live.request.max_tokens
            if not 0 <= offset <= last:
                raise OffsetOutOfRange(f"offset {offset} of {choice.readable} tokens")

    def head(self) -> pb.GenerateResponse:
        return self._live.head(self._offsets[0])

    @property
    def is_at_end(self) -> bool:
        return not self._open

    def delivered(self) -> Delivered | None:
        """Return what the client has; None if tokens that it had before were not compared yet."""
        if any(self._offsets[choice.index] for choice in self._digests):
            return None
        delivered = Delivered()
        delivered.add_head()
        for choice, offset in zip(self._live.choices, self._offsets, strict=True):
            delivered.add_tokens(choice.index, choice.output.tokens[:offset])
            if choice not in self._open:
                delivered.add_end(choice.index)
        return delivered

    def next(self) -> pb.GenerateResponse | None:
        """The next piece that can be read now, of each choice in turn what it has. The last one of
        all has usage and timing. Raises DataLoss where the client has other tokens, or more than
        were made in the end."""
        for _ in range(len(self._open)):
            self._turn %= len(self._open)
            choice = self._open[self._turn]
            if self._may_read(choice):
                return self._read(choice)
            self._turn += 1
        return None

    def _read(self, choice: Choice) -> pb.GenerateResponse:
        piece = self._live.piece(choice, self._offsets[choice.index])
        self._offsets[choice.index] += len(piece.token_ids)
        choice.take(self._offsets[choice.index])
        if choice.is_late and choice.taken >= choice.readable:
            self._live.caught_up(choice, now())
        if piece.finish_reason:
            self._end(choice, piece)
        return piece

    def _may_read(self, choice: Choice) -> bool:
        offset = self._offsets[choice.index]
        if not self._digests and offset < choice.readable:
            return True
        if choice in self._digests and choice.readable >= offset:
            self._compare(choice, offset)
        if choice.is_complete and offset > len(choice.output):
            raise _lost(choice, offset, f"it ended after {len(choice.output)} tokens")
        return choice not in self._digests and choice.is_readable_from(offset)

    def _compare(self, choice: Choice, offset: int) -> None:
        if token_digest(choice.output.tokens[:offset]) != self._digests.pop(choice):
            raise _lost(choice, offset, "the tokens before it are others")

    def _end(self, choice: Choice, piece: pb.GenerateResponse) -> None:
        self._open.remove(choice)
        if self.is_at_end:
            self._live.close(piece, now(), explains=self._explains)


def _lost(choice: Choice, offset: int, cause: str) -> DataLoss:
    return DataLoss(f"choice {choice.index} cannot be continued at offset {offset}: {cause}")
