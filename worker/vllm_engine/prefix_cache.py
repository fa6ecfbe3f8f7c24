"""Chunks of vLLM's prefix cache, derived from the events of its blocks. Pure.

vLLM identifies a block by a hash of its own. Routers know a chunk by the hash of its last block, as
Everlift computes it (``everlift.hashes``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from everlift.hashes import BLOCK_SIZE, BLOCKS_PER_CHUNK, block_hash
from worker.engine.blocks import ChunkChanges
from worker.engine.chunk import Chunk


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """Consecutive blocks that entered the prefix cache.

    ``names`` are vLLM's hashes. ``parent`` is that of the block before them; None at the beginning
    of a prefix, whose salt is ``salt``.
    """

    names: Sequence[bytes]
    parent: bytes | None
    tokens: Sequence[int]
    salt: bytes = b""


@dataclass(frozen=True, slots=True)
class RemovedBlocks:
    """Blocks that left the prefix cache."""

    names: Sequence[bytes]


@dataclass(slots=True)
class _Block:
    """Block of the prefix cache, or an evicted block of a chunk that is still partly cached.

    ``hash`` is Everlift's hash of the block, and ``before`` that of the previous block, or the
    salt. ``parent`` is vLLM's hash of the previous block; None if there is none. ``position`` is
    the number of blocks before this one in its prefix. ``chunks`` are the names of the tracked
    chunks (``_Followed``) that contain the block.
    """

    hash: bytes
    before: bytes
    parent: bytes | None
    position: int
    tokens: Sequence[int]
    #: number of blocks of the pool that have this content
    copies: int = 0
    chunks: set[bytes] = field(default_factory=set)


@dataclass(slots=True)
class _Followed:
    """Tracked chunk: at least one of its blocks is cached.

    ``blocks`` are vLLM's hashes of its blocks in order, and ``missing`` those of the blocks that
    are not cached. ``is_cached`` tells whether the whole chunk is reported as cached.
    """

    blocks: tuple[bytes, ...]
    missing: set[bytes]
    is_cached: bool = False


class PrefixCache:
    """Prefix cache of vLLM, as its events describe it."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, _Block] = {}
        self._chunks: dict[bytes, _Followed] = {}
        self._changed: dict[bytes, bool] = {}
        self._stored: dict[bytes, Chunk] = {}

    def apply(self, event: StoredBlocks | RemovedBlocks) -> None:
        if isinstance(event, StoredBlocks):
            parent = event.parent
            for index, name in enumerate(event.names):
                tokens = event.tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
                self._store(name, parent, tokens, event.salt)
                parent = name
        else:
            for name in event.names:
                self._remove(name)

    def take_changes(self) -> ChunkChanges:
        """Return the changes since the last call."""
        changed, self._changed = self._changed, {}
        stored, self._stored = self._stored, {}
        return ChunkChanges(changed, {}, stored)

    def _store(self, name: bytes, parent: bytes | None, tokens: Sequence[int], salt: bytes) -> None:
        block = self._blocks.get(name)
        if block is None:
            before, position = salt, 0
            if parent is not None:
                if (previous := self._blocks.get(parent)) is None:
                    # The beginning of this prefix is not known, so no chunk can contain the block.
                    return
                before, position = previous.hash, previous.position + 1
            own = block_hash(before, tokens)
            block = self._blocks[name] = _Block(own, before, parent, position, tokens)
        block.copies += 1
        if block.position % BLOCKS_PER_CHUNK == BLOCKS_PER_CHUNK - 1:
            self._follow(name, block)
        for chunk in block.chunks:
            followed = self._chunks[chunk]
            followed.missing.discard(name)
            if not followed.missing and not followed.is_cached:
                followed.is_cached = self._changed[chunk] = True
                self._stored[chunk] = self._chunk(followed)

    def _follow(self, name: bytes, last: _Block) -> None:
        """Begin to track the chunk that ends with the block ``last``, if all its blocks are known.

        ``name`` is vLLM's hash of ``last``. Does nothing if the chunk is tracked already.
        """
        if last.hash in self._chunks:
            return
        names = [name]
        while len(names) < BLOCKS_PER_CHUNK:
            parent = self._blocks[names[-1]].parent
            if parent is None or parent not in self._blocks:
                return
            names.append(parent)
        names.reverse()
        missing = {each for each in names if not self._blocks[each].copies}
        self._chunks[last.hash] = _Followed(tuple(names), missing)
        for each in names:
            self._blocks[each].chunks.add(last.hash)

    def _chunk(self, followed: _Followed) -> Chunk:
        blocks = [self._blocks[name] for name in followed.blocks]
        tokens = [token for block in blocks for token in block.tokens]
        return Chunk.of(blocks[0].before, tokens, [block.hash for block in blocks])

    def _remove(self, name: bytes) -> None:
        block = self._blocks.get(name)
        if block is None or not block.copies:
            return
        block.copies -= 1
        if block.copies:
            return
        for chunk in tuple(block.chunks):
            followed = self._chunks[chunk]
            if followed.is_cached:
                followed.is_cached = self._changed[chunk] = False
            followed.missing.add(name)
            if len(followed.missing) == BLOCKS_PER_CHUNK:
                del self._chunks[chunk]
                for each in followed.blocks:
                    self._blocks[each].chunks.discard(chunk)
                    self._drop_unused(each)
        self._drop_unused(name)

    def _drop_unused(self, name: bytes) -> None:
        block = self._blocks.get(name)
        if block is not None and not block.copies and not block.chunks:
            del self._blocks[name]
