"""One choice of a live request: what came, what the ledger has, what clients may see. Pure."""

from __future__ import annotations

from everlift.messages import FinishReason
from everlift.request_id import bare
from everlift.v1 import inference_pb2 as pb
from router.requests.output import Output

#: Where nothing but text is told of them.
_TOKENS_A_PIECE = 4096
#: Alternatives counted in: what is made of them is far below what a connection takes as one
#: message, and takes some 20 ms as a chat's JSON.
_LOGPROBS_A_PIECE = 4096


class Choice:
    """Four counts of tokens: ``len(output)`` came from workers, ``stored`` of them are in the
    ledger, ``readable`` may be seen by clients: what is stored, or more where deliveries run ahead
    of the ledger and are marked; and ``taken`` were, by the client that reads fastest.
    """

    def __init__(
        self, request_id: str, index: int, output: Output, finish_reason: FinishReason | None
    ) -> None:
        """``output`` and its end are what the ledger has."""
        self.request_id = bare(request_id)
        self.index = index
        self.output = output
        self.stored = self.readable = self.taken = len(output)
        #: its client had not taken all when more came, or somebody asked, and has not since
        self.is_late = False
        #: how it ended; its last tokens may still be on their way into the ledger
        self.finish_reason = finish_reason
        #: its end is in the ledger
        self.is_complete = False
        #: its worker took its KV blocks away and did not give them back yet
        self.is_preempted = False
        #: tokens, prompt counted in, that workers have computed by what they said
        self.num_computed = 0
        self._epochs: list[tuple[int, int]] = [(0, 0)]
        if finish_reason:
            self.complete()

    @property
    def is_stored(self) -> bool:
        """The ledger has all that came so far."""
        has_end = self.is_complete or not self.finish_reason
        return has_end and self.stored >= len(self.output)

    # what happens to it

    def begin(self, epoch: int) -> None:
        """A worker gets it, under a fresh epoch."""
        self.is_preempted = False
        self._epochs.append((len(self.output), epoch))

    def mark_stored(self, count: int) -> bool:
        """The first ``count`` tokens are in the ledger. Answers whether more can be read."""
        self.stored = max(self.stored, count)
        return self._make_readable(self.stored)

    def run_ahead(self) -> bool:
        """All tokens may be seen before the ledger has them. Answers whether that is more."""
        return self._make_readable(len(self.output))

    def _make_readable(self, count: int) -> bool:
        if count <= self.readable:
            return False
        self.is_late = self.taken < self.readable
        self.readable = count
        return True

    def take(self, count: int) -> None:
        """A client has the first ``count`` tokens."""
        self.taken = max(self.taken, count)

    def complete(self) -> None:
        """Its end is in the ledger, with all its tokens."""
        assert self.finish_reason is not None
        if not self.is_complete:
            self.is_complete = True
            self.output.finish()

    # what it looks like outside

    def is_readable_from(self, offset: int) -> bool:
        """There is a token there, or the end."""
        return offset < self.readable or self.is_complete

    def piece(self, offset: int) -> pb.GenerateResponse:
        """Return the tokens that can be read from ``offset`` on, of one epoch and of one message's
        size. The last piece has the finish reason; it may have no tokens."""
        end, epoch = self._segment(offset)
        piece = pb.GenerateResponse(
            request_id=self.request_id,
            choice=self.index,
            offset=offset,
            epoch=epoch,
            token_ids=self.output.tokens[offset:end],
            text=self.output.text(offset, end),
            unledgered=end > self.stored,
        )
        if self.output.logprobs:
            piece.logprobs.extend(it.to_proto() for it in self.output.logprobs[offset:end])
        if self.is_complete and end == len(self.output):
            assert self.finish_reason is not None
            piece.text += self.output.tail
            piece.finish_reason = self.finish_reason.value
            if self.finish_reason is FinishReason.STOP:
                _set_stop_reason(piece, self.output.stop_reason)
        return piece

    def _tokens_a_piece(self) -> int:
        """Each has as many log probabilities."""
        if not self.output.logprobs:
            return _TOKENS_A_PIECE
        return max(1, _LOGPROBS_A_PIECE // (1 + len(self.output.logprobs[0].top)))

    def _segment(self, offset: int) -> tuple[int, int]:
        end = min(self.readable, offset + self._tokens_a_piece())
        for start, epoch in reversed(self._epochs):
            if start <= offset:
                return end, epoch
            end = min(end, start)
        raise AssertionError("the first segment starts at 0")


def _set_stop_reason(piece: pb.GenerateResponse, reason: str | int | None) -> None:
    match reason:
        case str():
            piece.stop_string = reason
        case int():
            piece.stop_token_id = reason
