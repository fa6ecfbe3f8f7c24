"""A digest of a choice's tokens, by which a client that comes back is known to have had the same
ones. Pure."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence


def little_endian(tokens: Sequence[int]) -> bytes:
    """Four bytes each. Raises OverflowError for what is no uint32."""
    if len(tokens) == 1:
        return tokens[0].to_bytes(4, "little")
    data = array("I", tokens)
    if sys.byteorder == "big":
        data.byteswap()
    return data.tobytes()


class TokenDigest:
    """Grows with the tokens; ``value`` is that of all that were added."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=8)

    def add(self, tokens: Sequence[int]) -> None:
        """Raises OverflowError for what is no uint32."""
        self._hash.update(little_endian(tokens))

    @property
    def value(self) -> int:
        """64 bits; the same at either end for the same tokens, however they came."""
        return int.from_bytes(self._hash.digest(), "little")


def token_digest(tokens: Sequence[int]) -> int:
    """Of all of them at once."""
    digest = TokenDigest()
    digest.add(tokens)
    return digest.value
