"""The hash chain of KV blocks: what a block holds is named by everything up to its end.

    hash(block i) = SHA-256(hash(block i-1) or salt, tokens of block i as little-endian uint32)

Router and workers use the same constant and the same chain; a worker with another block size is
refused. Two sequences share a block exactly if salt and all tokens up to its end agree.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence

#: Tokens in one block of the paged KV cache.
BLOCK_SIZE = 32


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Hash of one full block. ``parent`` is the previous block's hash, or the salt for the first
    block."""
    return hashlib.sha256(parent + array("I", tokens).tobytes()).digest()


def block_hashes(tokens: Sequence[int], salt: bytes = b"") -> Iterator[bytes]:
    """Hashes of the full blocks of ``tokens``, first block first; an unfinished last block has
    none."""
    parent = salt
    for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
        parent = block_hash(parent, tokens[start : start + BLOCK_SIZE])
        yield parent
