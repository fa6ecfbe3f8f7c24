"""The part of a request's stream that its client has. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from everlift.errors import DataLoss
from everlift.hashes import TokenDigest
from everlift.v1 import inference_pb2 as pb


class Delivered:
    """Tokens and ends of a request's choices that one stream has delivered.

    A stream that continues at another router begins behind them.
    """

    def __init__(self) -> None:
        self._offsets = defaultdict[int, int](int)
        self._digests = defaultdict[int, TokenDigest](TokenDigest)
        self._ended = set[int]()
        self._has_head = False

    @property
    def has_output(self) -> bool:
        return any(self._offsets.values()) or bool(self._ended)

    def add_head(self) -> None:
        """Note that the client has the first piece, which has no tokens."""
        self._has_head = True

    def add_tokens(self, choice: int, tokens: Sequence[int]) -> None:
        self._offsets[choice] += len(tokens)
        self._digests[choice].add(tokens)

    def add_end(self, choice: int) -> None:
        self._ended.add(choice)

    def attach_request(self, request_id: str) -> pb.AttachRequest:
        """Return the request for the rest of the stream, of which nothing is delivered twice."""
        choices = range(max(self._offsets, default=-1) + 1)
        return pb.AttachRequest(
            request_id=request_id,
            from_offsets=[self._offsets[choice] for choice in choices],
            digests=[self._digests[choice].value for choice in choices],
        )

    def accept(self, piece: pb.GenerateResponse) -> pb.GenerateResponse | None:
        """Return what is new in the next piece, from now on delivered, or None.

        Raises DataLoss if the piece does not continue what was delivered.
        """
        if _is_head(piece):
            is_new, self._has_head = not self._has_head, True
            return piece if is_new else None
        if piece.choice in self._ended:
            return _usage_alone(piece)
        if piece.offset != self._offsets[piece.choice]:
            raise DataLoss(
                f"choice {piece.choice} continues at offset {piece.offset} instead of "
                f"{self._offsets[piece.choice]}"
            )
        self.add_tokens(piece.choice, piece.token_ids)
        if piece.finish_reason:
            self.add_end(piece.choice)
        return piece


def _is_head(piece: pb.GenerateResponse) -> bool:
    has_more = piece.token_ids or piece.text or piece.finish_reason or piece.HasField("usage")
    return not has_more


def _usage_alone(piece: pb.GenerateResponse) -> pb.GenerateResponse | None:
    """Return what a repeated end adds: the usage, if the choice is the last one to end again."""
    if not piece.HasField("usage"):
        return None
    return pb.GenerateResponse(
        request_id=piece.request_id,
        choice=piece.choice,
        offset=piece.offset,
        usage=piece.usage,
        timing=piece.timing,
    )
