"""Chunks of prefixes with their tokens, for prompts that a router sends only in part. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple


class Chunk(NamedTuple):
    """Chunk of a prefix: ``everlift.hashes.CHUNK_SIZE`` tokens after those of its parent.

    A chunk is identified by the hash of its last block. ``parent`` is the hash that identifies the
    previous chunk of the prefix, or the salt if there is none. ``tokens`` are unsigned integers of
    four bytes in the byte order of this machine, which take an eighth of the memory of a list.
    """

    parent: bytes
    tokens: bytes
    block_hashes: tuple[bytes, ...]

    @classmethod
    def of(cls, parent: bytes, tokens: Iterable[int], block_hashes: Iterable[bytes]) -> Chunk:
        return cls(parent, array("I", tokens).tobytes(), tuple(block_hashes))


class Prefix(NamedTuple):
    """Leading tokens of a sequence, and the hashes of their blocks."""

    tokens: list[int]
    block_hashes: list[bytes]

    @classmethod
    def of(cls, chunks: Iterable[Chunk]) -> Prefix:
        """Return the prefix that consists of ``chunks``, in the order of their tokens."""
        chunks = tuple(chunks)
        tokens = array("I", b"".join(chunk.tokens for chunk in chunks)).tolist()
        return cls(tokens, [block_hash for chunk in chunks for block_hash in chunk.block_hashes])


#: Empty prefix, for a sequence that was sent with all its tokens.
NO_PREFIX = Prefix([], [])
