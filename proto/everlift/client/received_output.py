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
    """Consecutive tokens of a choice, the first at ``offset``, and the text that they complete.

    ``token_ids`` may be empty in the last chunk of a choice, whose text was held back until the
    end. ``epoch`` is the random id of the attempt that generated the tokens, or 0 if the tokens
    were read from the ledger. ``unledgered`` is true if the tokens were delivered before the ledger
    had stored all of them, so that a failure may still lose them. Routers may deliver tokens early
    while the ledger is unavailable, and at any time with the setting ``router.durability: behind``.
    ``logprobs`` are those of the tokens, if requested.
    """

    offset: int
    token_ids: tuple[int, ...]
    text: str
    epoch: int
    unledgered: bool
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


class ReceivedOutput:
    """Output of one request that the client has received, in one call or in several.

    Tokens that several calls deliver are received only once.
    """

    def __init__(
        self,
        request_id: str,
        from_offsets: Sequence[int] = (),
        received: Sequence[Sequence[int]] = (),
    ) -> None:
        """Create the state of a client that has received a part of the request's output, or none.

        ``from_offsets`` has, for each choice, the offset of the first token to receive; it is 0 for
        choices that the list lacks. Alternatively, ``received`` has, for each choice, the tokens
        that were received before, and the offset is their number.
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
    def has_output(self) -> bool:
        """Return whether a token or the end of a choice has been received."""
        return any(self._next.values()) or bool(self.finish_reasons)

    def offsets(self) -> list[int]:
        """Return the offset of the first missing token of each choice."""
        return [self._next[choice] for choice in range(max(self._next, default=-1) + 1)]

    def attach_request(self, *, explain: bool = False) -> pb.AttachRequest:
        """Return the message that asks a router for the output after the received tokens.

        If the tokens before the offsets are known (``from_offsets`` was not used), the message
        contains digests of them. With these, the router checks that its own tokens are the same,
        even if it has to regenerate lost tokens first. ``explain`` is that of the submission.
        """
        offsets, digests = self.offsets(), self._digests
        return pb.AttachRequest(
            request_id=self.request_id,
            from_offsets=offsets,
            explain=explain,
            digests=[digests[choice].value for choice in range(len(offsets))] if digests else (),
        )

    def accept(self, piece: pb.GenerateResponse) -> Chunk | None:
        """Record ``piece``, a message of the stream, and return its tokens and text as a Chunk.

        Returns None if the message has no tokens and no text, or if nothing in it is new. Raises
        DataLoss if tokens before the message are missing. Raises Unreachable if the message
        contains both received tokens and something new; the caller must then attach again.
        """
        self.is_accepted = True
        # After another Attach, the router repeats the end of each choice.
        chunk = None if piece.choice in self.finish_reasons else self._new_chunk(piece)
        if piece.HasField("usage"):
            self.usage, self.timing = piece.usage, piece.timing
        return chunk

    def _new_chunk(self, piece: pb.GenerateResponse) -> Chunk | None:
        following, end = self._next[piece.choice], piece.offset + len(piece.token_ids)
        if piece.offset > following:
            raise DataLoss(f"offsets {following} to {piece.offset - 1} of the stream are missing")
        if end <= following and not piece.finish_reason and piece.token_ids:
            return None
        if piece.offset < following and piece.token_ids:
            # The client cannot split the text at a token, but the router can, in another call.
            raise Unreachable("a piece of the stream repeats tokens that were already received")
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
    return tuple(map(TokenLogprobs.from_proto, logprobs))
