"""Chunks of vLLM's prefix cache."""

from __future__ import annotations

import hashlib
from collections import Counter

import hypothesis.strategies as st
from hypothesis import given

from everlift.hashes import BLOCK_SIZE, BLOCKS_PER_CHUNK, CHUNK_SIZE, chunk_hashes
from tests.support.worker.engine_contract import prompt
from worker.vllm_engine.prefix_cache import PrefixCache, RemovedBlocks, StoredBlocks

TOKENS = prompt(2 * CHUNK_SIZE)
#: A prefix that shares its first chunk with TOKENS.
FORK = [*TOKENS[:CHUNK_SIZE], *prompt(CHUNK_SIZE, 3)]


def names(tokens: list[int], salt: bytes = b"") -> list[bytes]:
    """Return names of the blocks in the manner of vLLM, which differ from those of Everlift."""
    found, parent = [], b"vllm" + salt
    for start in range(0, len(tokens), BLOCK_SIZE):
        parent = hashlib.sha256(parent + bytes(tokens[start : start + BLOCK_SIZE])).digest()
        found.append(parent)
    return found


def stored(
    tokens: list[int], first: int = 0, end: int | None = None, salt: bytes = b""
) -> StoredBlocks:
    all_names = names(tokens, salt)
    end = len(all_names) if end is None else end
    parent = all_names[first - 1] if first else None
    own = tokens[first * BLOCK_SIZE : end * BLOCK_SIZE]
    return StoredBlocks(all_names[first:end], parent, own, salt)


def test_chunk_is_cached_with_its_last_block() -> None:
    cache, hashes = PrefixCache(), chunk_hashes(TOKENS)
    cache.apply(stored(TOKENS, 0, 7))
    assert not cache.take_changes().device
    cache.apply(stored(TOKENS, 7, 16))
    changes = cache.take_changes()
    assert changes.device == {hashes[0]: True, hashes[1]: True}
    chunk = changes.stored[hashes[1]]
    assert (chunk.parent, chunk.block_hashes[-1]) == (hashes[0], hashes[1])
    assert len(chunk.block_hashes) == BLOCKS_PER_CHUNK
    assert cache.take_changes().device == {}


def test_salt_changes_the_names_of_chunks() -> None:
    cache = PrefixCache()
    cache.apply(stored(TOKENS, salt=b"tenant"))
    assert [*cache.take_changes().device] == chunk_hashes(TOKENS, b"tenant")


def test_chunk_ends_with_the_removal_of_any_block() -> None:
    cache, hashes = PrefixCache(), chunk_hashes(TOKENS)
    cache.apply(stored(TOKENS))
    cache.take_changes()
    cache.apply(RemovedBlocks([names(TOKENS)[3]]))
    assert cache.take_changes().device == {hashes[0]: False}
    cache.apply(stored(TOKENS, 3, 4))
    assert cache.take_changes().device == {hashes[0]: True}


def test_block_without_known_beginning_is_ignored() -> None:
    cache = PrefixCache()
    cache.apply(stored(TOKENS, 8))
    cache.apply(RemovedBlocks(names(TOKENS)[8:]))
    assert cache.take_changes().device == {}


_BLOCKS = [(tokens, index) for tokens in (TOKENS, FORK) for index in range(16)]


@given(st.lists(st.tuples(st.sampled_from(_BLOCKS), st.booleans()), max_size=200))
def test_chunk_is_cached_while_all_its_blocks_are(
    events: list[tuple[tuple[list[int], int], bool]],
) -> None:
    cache = PrefixCache()
    copies: Counter[bytes] = Counter()
    known: dict[bytes, bool] = {}
    for tokens in (TOKENS, FORK):
        cache.apply(stored(tokens))
        copies.update(names(tokens))
    for (tokens, index), is_stored in events:
        name = names(tokens)[index]
        if is_stored:
            cache.apply(stored(tokens, index, index + 1))
            copies[name] += 1
        elif copies[name]:
            cache.apply(RemovedBlocks([name]))
            copies[name] -= 1
        known |= cache.take_changes().device
        for each in (TOKENS, FORK):
            for number, chunk in enumerate(chunk_hashes(each)):
                blocks = names(each)[number * 8 : number * 8 + 8]
                if known.get(chunk):
                    assert all(copies[block] for block in blocks)


def test_removed_cache_leaves_nothing() -> None:
    cache = PrefixCache()
    for tokens in (TOKENS, FORK):
        cache.apply(stored(tokens))
    for tokens in (TOKENS, FORK):
        cache.apply(RemovedBlocks(names(tokens)[::-1]))
        cache.apply(RemovedBlocks(names(tokens)[::-1]))
    assert not any(cache.take_changes().device.values())
    assert not cache._blocks and not cache._chunks
