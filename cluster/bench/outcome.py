"""What became of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class CountedBy(Enum):
    """Who says how many tokens an output has."""

    #: the endpoint, in its stream
    USAGE = "usage"
    #: a tokenizer on this side
    TOKENIZER = "tokenizer"
    #: nobody: pieces of output are taken for tokens
    PIECES = "pieces"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Moments are in seconds since the load began, and come in this order:

        due        its time begins to count
        admitted   there was room for it, where requests at once are limited
        sent       it was on its way: later than ``admitted`` only by what the generator is late
        pieces     each of them when it came
        ended      the end of the answer, or its failure

    ``error`` is a slug or a status; empty where the answer is whole. ``text`` is kept only where
    its tokens are still to be counted.
    """

    due: float
    admitted: float
    sent: float
    ended: float
    pieces: Sequence[float]
    prompt_tokens: int
    output_tokens: int
    counted_by: CountedBy = CountedBy.USAGE
    error: str = ""
    text: str = ""

    @property
    def is_complete(self) -> bool:
        return not self.error

    @property
    def lag_s(self) -> float:
        """By so much the generator was late with it."""
        return self.sent - self.admitted
