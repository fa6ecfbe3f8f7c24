"""Ids of server-sent events, from which any router can resume a client's stream. Pure.

    REQUEST/3.14.8f02c1d4a9b6e730,5.22.01a7d95cc43f8be2.e

An id states how much output the client has after the event. It contains the request's name and, for
each choice, the numbers of tokens and characters and the digest of these tokens (everlift.hashes).
A final ``e`` means that the client also has the end of the choice. The same tokens always give the
same text, so that a comparison of the digests suffices to verify what the client has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from everlift.errors import InvalidRequest
from everlift.hashes import token_digest
from everlift.request_id import check_request_id

_POSITION = re.compile(r"([0-9]{1,9})\.([0-9]{1,10})\.([0-9a-f]{16})(\.e)?")
_EMPTY_DIGEST = token_digest(())


class Position(NamedTuple):
    """Position in the output of a choice: the number of tokens and characters before it.

    ``is_end``: the end of the choice, with its finish reason, is also before the position.
    """

    tokens: int = 0
    characters: int = 0
    #: digest of the tokens before the position
    digest: int = _EMPTY_DIGEST
    is_end: bool = False

    def __str__(self) -> str:
        return f"{self.tokens}.{self.characters}.{self.digest:016x}{'.e' * self.is_end}"


BEGIN = Position()


def written(name: str, positions: Iterable[str]) -> str:
    """Return the id of an event from a request's name and its positions in text form."""
    return f"{name}/{','.join(positions)}"


@dataclass(frozen=True, slots=True)
class EventId:
    name: str
    positions: Sequence[Position]

    def __str__(self) -> str:
        return written(self.name, map(str, self.positions))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse an event id. Raises InvalidRequest if it is malformed."""
        name, _, rest = text.partition("/")
        matches = [_POSITION.fullmatch(part) for part in rest.split(",")]
        positions = [
            Position(int(match[1]), int(match[2]), int(match[3], 16), bool(match[4]))
            for match in matches
            if match
        ]
        if len(positions) < len(matches):
            raise InvalidRequest(
                "last-event-id must be the id of an event of the stream", field="last-event-id"
            )
        return cls(check_request_id(name), positions)
