"""Hashes of KV blocks, and digests of the tokens that a client has received. Pure."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterator, Sequence
from itertools import islice

#: Number of tokens in one block of the paged KV cache.
BLOCK_SIZE = 32
#: Number of tokens in one chunk. Prefixes are stored, and compared for dispatch, in units of
#: chunks.
CHUNK_SIZE = 256
BLOCKS_PER_CHUNK = CHUNK_SIZE // BLOCK_SIZE

_BLOCK_BYTES = BLOCK_SIZE * array("I").itemsize


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the SHA-256 that identifies a full block of ``tokens`` with all blocks before it.

    ``parent`` is the previous block's hash. For the first block it is the salt, which distinguishes
    blocks that must not be shared.
    """
    return hashlib.sha256(parent + array("I", tokens).tobytes()).digest()


def block_hashes(tokens: Sequence[int], salt: bytes = b"") -> Iterator[bytes]:
    """Yield the ``block_hash`` of each full block of ``tokens``, in order.

    A partial last block has no hash. Equal tokens with different salts have different hashes.
    """
    # Converting all tokens at once takes a third less time than converting each block.
    parent, data = salt, array("I", tokens).tobytes()
    for start in range(0, len(data) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
        parent = hashlib.sha256(parent + data[start : start + _BLOCK_BYTES]).digest()
        yield parent


def chunk_id(end: bytes) -> int:
    """Return the 64-bit id of the chunk whose last block has the hash ``end``."""
    return int.from_bytes(end[:8], "little")


def chunk_hashes(tokens: Sequence[int], salt: bytes = b"") -> list[bytes]:
    """Return the hash of the last block of each full chunk of ``tokens``, in order.

    A hash depends on the salt and on all tokens up to the end of the chunk. To continue after a
    chunk whose hash is known, pass only the tokens after it, and its hash as the salt.
    """
    ends = islice(block_hashes(tokens, salt), BLOCKS_PER_CHUNK - 1, None, BLOCKS_PER_CHUNK)
    return list(ends)


def session_hash(tenant: str, session_id: str) -> bytes:
    """Return the SHA-256 that identifies a session of a tenant.

    ``tenant`` is empty if tenants are not distinguished.
    """
    return hashlib.sha256(f"{tenant}/{session_id}".encode()).digest()


def session_key(tenant: str, session_id: str) -> int:
    """Return the 64-bit number of a tenant's session; 0 if ``session_id`` is empty."""
    if not session_id:
        return 0
    return int.from_bytes(session_hash(tenant, session_id)[:8], "little")


def little_endian(tokens: Sequence[int]) -> bytes:
    """Return each number as four little-endian bytes.

    Raises OverflowError for a number that is not a uint32.
    """
    if len(tokens) == 1:
        return tokens[0].to_bytes(4, "little")
    data = array("I", tokens)
    if sys.byteorder == "big":
        data.byteswap()
    return data.tobytes()


class TokenDigest:
    """Incremental 64-bit digest of a sequence of tokens."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=8)

    def add(self, tokens: Sequence[int]) -> None:
        """Append ``tokens`` to the sequence. Raises OverflowError if one is not a uint32."""
        self._hash.update(little_endian(tokens))

    @property
    def value(self) -> int:
        """Return the digest of all tokens added so far, which depends on their order.

        Client and router compare their digests of the same tokens.
        """
        return int.from_bytes(self._hash.digest(), "little")


def token_digest(tokens: Sequence[int]) -> int:
    """Return the 64-bit digest of ``tokens`` (``TokenDigest``), which client and router compare."""
    digest = TokenDigest()
    digest.add(tokens)
    return digest.value
