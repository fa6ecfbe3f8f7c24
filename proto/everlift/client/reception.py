"""Output received of one request. Pure: without connection or clock."""

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
    """Tokens of consecutive offsets, the first of them at ``offset``, and the text they released.

    ``epoch`` names the attempt that made them, 0 when they were read back from the ledger.
    ``unledgered`` says that they came while the ledger was away: its loss could take them back.
    ``logprobs`` are those of the tokens, if they were asked for.
    """

    offset: int
    token_ids: tuple[int, ...]
    text: str
    epoch: int
    unledgered: bool
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


class Reception:
    """Receiver of a request's pieces from any number of calls: each offset of a choice once."""

    def __init__(
        self,
        request_id: str,
        from_offsets: Sequence[int] = (),
        received: Sequence[Sequence[int]] = (),
    ) -> None:
        """Create a reception that starts at ``from_offsets`` (by choice, default 0).

        With ``received`` it starts behind these tokens of each choice.
        """
        self.request_id = request_id
        self.finish_reasons: dict[int, FinishReason] = {}
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self.usage: pb.Usage | None = None
        self.timing: pb.Timing | None = None
        #: the cluster has it: from now on it is attached to, and not submitted again
        self.is_accepted = False
        #: by choice, the first offset that has not come
        self._next = defaultdict(int, enumerate(map(len, received) if received else from_offsets))
        #: by choice, of all tokens before that; None where the first ones were never seen
        self._digests = None if any(from_offsets) else _digests(received)

    @property
    def is_complete(self) -> bool:
        return self.usage is not None

    @property
    def has_begun(self) -> bool:
        """Return whether a token or a choice's end has arrived."""
        return any(self._next.values()) or bool(self.finish_reasons)

    def offsets(self) -> list[int]:
        """Offset of the first missing token, by choice."""
        return [self._next[choice] for choice in range(max(self._next, default=-1) + 1)]

    def attach_request(self) -> pb.AttachRequest:
        """Return the message that attaches after the received pieces.

        The digests let the router see that what it has is the same, or will be the same when it has
        made again what it lost.
        """
        offsets, digests = self.offsets(), self._digests
        return pb.AttachRequest(
            request_id=self.request_id,
            from_offsets=offsets,
            digests=[digests[choice].value for choice in range(len(offsets))] if digests else (),
        )

    def accept(self, piece: pb.GenerateResponse) -> Chunk | None:
        """Return the new part of ``piece``.

        Raises DataLoss on a gap, and Unreachable if it must be requested again.
        """
        self.is_accepted = True
        # Who attaches again is told again how each choice ended.
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
            # Text cannot be cut at a token: let the router cut it.
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
