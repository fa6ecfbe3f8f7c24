"""Part of a request's stream that has been delivered to its client. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from everlift.errors import DataLoss
from everlift.hashes import TokenDigest
from everlift.v1 import inference_pb2 as pb


class Delivered:
    """Record of the tokens and ends of a request's choices that one stream has delivered.

    If the stream continues at another router, it starts directly after these tokens.
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
        """Record that the client has the first piece of the stream, which has no tokens."""
        self._has_head = True

    def add_tokens(self, choice: int, tokens: Sequence[int]) -> None:
        self._offsets[choice] += len(tokens)
        self._digests[choice].add(tokens)

    def add_end(self, choice: int) -> None:
        self._ended.add(choice)

    def attach_request(self, request_id: str) -> pb.AttachRequest:
        """Return the message that asks another router for the rest of the stream.

        The message contains, by choice, the number of delivered tokens and their digest. The other
        router skips these tokens and compares the digest with that of its own tokens.
        """
        choices = range(max(self._offsets, default=-1) + 1)
        return pb.AttachRequest(
            request_id=request_id,
            from_offsets=[self._offsets[choice] for choice in choices],
            digests=[self._digests[choice].value for choice in choices],
        )

    def accept(self, piece: pb.GenerateResponse) -> pb.GenerateResponse | None:
        """Return the part of ``piece`` to be delivered, or None if the client has all of it.

        ``piece`` is the next message of the stream. The returned part counts as delivered from then
        on. Raises DataLoss if its tokens do not follow directly after the delivered tokens of its
        choice.
        """
        if _is_head(piece):
            is_new, self._has_head = not self._has_head, True
            return piece if is_new else None
        if piece.choice in self._ended:
            return _usage_only(piece)
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


def _usage_only(piece: pb.GenerateResponse) -> pb.GenerateResponse | None:
    """Return a message with only the usage and timing of ``piece``; None if it has no usage.

    ``piece`` belongs to a choice that the client has received to its end. Usage comes with the
    choice whose end a router sends last. A router that continues the stream sends all ends again,
    possibly in another order. The last choice may then be one that the client already has.
    """
    if not piece.HasField("usage"):
        return None
    return pb.GenerateResponse(
        request_id=piece.request_id,
        choice=piece.choice,
        offset=piece.offset,
        usage=piece.usage,
        timing=piece.timing,
    )
