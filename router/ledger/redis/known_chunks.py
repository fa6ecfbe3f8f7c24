"""Names of chunks and images of prompts that were recently stored in one ledger shard. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

#: Number of prompts whose last chunk is remembered; each takes about 200 bytes.
_MAX_PROMPTS = 1 << 14


class KnownChunks:
    """Names of the last chunks of the prompts that this process stored in one shard most recently.

    A stored chunk implies that all chunks before it are stored. If the ledger has deleted a chunk
    meanwhile, it answers that the chunk is missing. An image counts as a prompt of one chunk.
    """

    def __init__(self) -> None:
        self._tails: OrderedDict[str, None] = OrderedDict()

    def num_leading(self, names: Sequence[str]) -> int:
        """Return how many leading chunks of a prompt are likely to be stored."""
        for number in range(len(names), 0, -1):
            if names[number - 1] in self._tails:
                return number
        return 0

    def add(self, names: Sequence[str]) -> None:
        """Record that the chunks of a prompt are stored; ``names`` may be empty."""
        if not names:
            return
        self._tails[names[-1]] = None
        self._tails.move_to_end(names[-1])
        if len(self._tails) > _MAX_PROMPTS:
            self._tails.popitem(last=False)
