"""A step that is being planned: what each sequence is to compute of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from worker.engine.plan import Row
from worker.engine.sequence import Sequence


class Share(NamedTuple):
    """The sequence's next ``num_known`` known tokens."""

    sequence: Sequence
    num_known: int

    def row(self) -> Row:
        return self.sequence.row(self.num_known)


def num_tokens(shares: Iterable[Share]) -> int:
    return sum(share.num_known for share in shares)
