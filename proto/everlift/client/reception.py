"""State of the output that a client has received of one request. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from everlift.errors import DataLoss, Unreachable
from everlift.hashes import TokenDigest
from everlift.messages import FinishReason
from everlift.sampling import TokenLogprobs
from everlift.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of consecutive offsets, the first at ``offset``, and the text that they complete.

    ``epoch`` is the number of the attempt that generated the tokens, or 0 if they were read from
    the ledger. ``unledgered`` is true if they were delivered while the ledger was unavailable, so
    that they may still be lost with it. ``logprobs`` are those of the tokens, if requested.
    """

    offset: int
    token_ids: tuple[int, ...]
    text: str
    epoch: int
    unledgered: bool
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


class Reception:
    """Receiver of a request's pieces from any number of calls, each offset of a choice once."""

    def __init__(
        self,
        request_id: str,
        from_offsets: Sequence[int] = (),
        received: Sequence[Sequence[int]] = (),
    ) -> None:
        """Create a reception that starts at ``from_offsets`` (by choice, default 0).

        With ``received``, it starts after these tokens of each choice instead.
        """
        self.request_id = request_id
        self.finish_reasons: dict[int, FinishReason] = {}
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self.usage: pb.Usage | None = None
        self.timing: pb.Timing | None = None
        #: whether the cluster has accepted the request, so that it must not be submitted again
        self.is_accepted = False
        #: by choice, the first offset that has not been received
        self._next = defaultdict(int, enumerate(map(len, received) if received else from_offsets))
        #: by choice, the digest of all tokens before that offset; None if the first tokens of a
        #: choice are unknown
        self._digests = None if any(from_offsets) else _digests(received)

    @property
    def is_complete(self) -> bool:
        return self.usage is not None

    @property
    def has_begun(self) -> bool:
        """Return whether a token or the end of a choice has been received."""
        return any(self._next.values()) or bool(self.finish_reasons)

    def offsets(self) -> list[int]:
        """Return the offset of the first missing token of each choice."""
        return [self._next[choice] for choice in range(max(self._next, default=-1) + 1)]

    def attach_request(self) -> pb.AttachRequest:
        """Return the message that attaches after the received tokens.

        With the digests, the router checks that its tokens are the same as the received ones, even
        if it has to regenerate lost tokens first.
        """
        offsets, digests = self.offsets(), self._digests
        return pb.AttachRequest(
            request_id=self.request_id,
            from_offsets=offsets,
            digests=[digests[choice].value for choice in range(len(offsets))] if digests else (),
        )

    def accept(self, piece: pb.GenerateResponse) -> Chunk | None:
        """Return the new part of ``piece``, or None if there is none.

        Raises DataLoss if offsets are missing before the piece, and Unreachable if the piece must
        be requested again.
        """
        self.is_accepted = True
        # After another Attach, the router repeats the end of each choice.
        chunk = None if piece.choice in self.finish_reasons else self._fresh(piece)
        if piece.HasField("usage"):
            self.usage, self.timing = piece.usage, piece.timing
        return chunk

    def _fresh(self, piece: pb.GenerateResponse) -> Chunk | None:
        following, end = self._next[piece.choice], piece.offset + len(piece.token_ids)
        if piece.offset > following:
            raise DataLoss(f"offsets {following} to {piece.offset - 1} of the stream are missing")
        if end <= following and not piece.finish_reason and piece.token_ids:
            return None
        if piece.offset < following and piece.token_ids:
            # The client cannot split the text at a token, but the router can, in another call.
            raise Unreachable("a piece overlaps what came before")
        return self._deliver(piece, max(following, end))

    def _deliver(self, piece: pb.GenerateResponse, end: int) -> Chunk | None:
        self._next[piece.choice] = end
        if self._digests is not None:
            self._digests[piece.choice].add(piece.token_ids)
        if piece.prompt_logprobs:
            self.prompt_logprobs = _parsed(piece.prompt_logprobs)
        if piece.finish_reason:
            self.finish_reasons[piece.choice] = FinishReason(piece.finish_reason)
        if not piece.token_ids and not piece.text:
            return None
        return Chunk(
            piece.offset,
            tuple(piece.token_ids),
            piece.text,
            piece.epoch,
            piece.unledgered,
            piece.choice,
            _parsed(piece.logprobs),
        )


def _digests(received: Sequence[Sequence[int]]) -> defaultdict[int, TokenDigest]:
    digests = defaultdict[int, TokenDigest](TokenDigest)
    for choice, tokens in enumerate(received):
        digests[choice].add(tokens)
    return digests


def _parsed(logprobs: Sequence[pb.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs.from_proto(it) for it in logprobs)
