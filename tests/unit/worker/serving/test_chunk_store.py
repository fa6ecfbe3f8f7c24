"""Tokens of the prefixes that a worker has cached."""

from __future__ import annotations

from collections.abc import Iterable

from everlift.hashes import CHUNK_SIZE, block_hashes, chunk_hashes
from tests.support.worker.worker_support import engine, limits, sequence
from worker.config import FakeModel
from worker.engine.blocks import ChunkChanges
from worker.engine.engine import Engine
from worker.engine.sequence import Sequence
from worker.serving.chunk_store import ChunkStore

MODEL = FakeModel(max_model_len=8192)
BLOCKS = 80
BOUNDS = limits(BLOCKS, max_num_batched_tokens=512, max_model_len=8192, num_host_blocks=64)
SALT = b"s" * 32


def tokens(chunks: int, first: int = 1, more: int = 0) -> list[int]:
    return [(first + 7 * i) % 1000 for i in range(chunks * CHUNK_SIZE + more)]


def held(store: ChunkStore, prompt: Iterable[int], salt: bytes = SALT) -> list[bytes]:
    return store.hold(sequence(BOUNDS, 1, prompt, salt=salt))


def run(engine: Engine, store: ChunkStore, *sequences: Sequence) -> set[bytes]:
    """Run the sequences to their end, and return the chunks that were in host memory.

    Check after each step that the store has the chunks of both caches.
    """
    for each in sequences:
        engine.add(each)
    on_host: set[bytes] = set()
    while engine.has_work:
        engine.step(now=float(engine.load().step))
        store.update(engine.take_chunk_changes())
        assert store._chunks.keys() == store.on_device | store.on_host
        assert store.on_device == engine._scheduler._batch._pool._chunks
        on_host |= store.on_host
    return on_host


def test_held_prefix_is_found_with_its_block_hashes() -> None:
    store, prompt = ChunkStore(), tokens(3, more=40)
    names = held(store, prompt)
    assert names == chunk_hashes(prompt, SALT)
    for count, name in enumerate(names, 1):
        prefix = store.find(name, count, SALT)
        assert prefix is not None
        assert prefix.tokens == prompt[: count * CHUNK_SIZE]
        assert prefix.block_hashes == list(block_hashes(prefix.tokens, SALT))


def test_unknown_chunk_wrong_count_or_salt_is_not_found() -> None:
    store = ChunkStore()
    *_, second, third = held(store, tokens(3))
    assert store.find(b"?" * 32, 3, SALT) is None
    assert store.find(b"", 3, SALT) is None
    for count in (1, 2, 4, 1 << 30):
        assert store.find(third, count, SALT) is None
    for salt in (b"", b"t" * 32, second):
        assert store.find(third, 3, salt) is None


def test_salts_have_chunks_of_their_own() -> None:
    store, prompt = ChunkStore(), tokens(2)
    mine, other = held(store, prompt), held(store, prompt, b"t" * 32)
    assert not {*mine} & {*other}
    assert store.find(mine[-1], 2, b"t" * 32) is None
    store.release(mine)
    assert store.find(mine[-1], 2, SALT) is None
    assert store.find(other[-1], 2, b"t" * 32) is not None


def test_chunks_are_kept_until_all_holders_release_them() -> None:
    store = ChunkStore()
    short, long = held(store, tokens(2)), held(store, tokens(3))
    assert len(store) == 3
    store.release(long)
    assert len(store) == 2 and store.find(short[-1], 2, SALT)
    store.release(short)
    assert len(store) == 0 and not store._num_holders


def test_cached_chunk_outlives_its_holder_until_evicted() -> None:
    store = ChunkStore()
    (name,) = held(store, tokens(1))
    store.update(ChunkChanges({name: True}))
    store.release([name])
    store.update(ChunkChanges({name: False}, {name: True}))
    assert store.find(name, 1, SALT)
    store.update(ChunkChanges(host={name: False}))
    assert len(store) == 0


def test_missing_parent_leaves_the_prefix_unknown() -> None:
    store = ChunkStore()
    names = held(store, tokens(3))
    store.update(ChunkChanges(dict.fromkeys(names, True)))
    store.release(names)
    store.update(ChunkChanges({names[1]: False}))
    assert store.find(names[0], 1, SALT) and not store.find(names[2], 3, SALT)
    held(store, tokens(3))
    assert store.find(names[2], 3, SALT)


def test_generated_tokens_are_stored_with_their_chunk() -> None:
    this, store, prompt = engine(BOUNDS, MODEL), ChunkStore(), tokens(1, more=100)
    sequence_ = sequence(BOUNDS, 1, prompt, max_tokens=400, salt=SALT)
    run(this, store, sequence_)
    known = sequence_.tokens
    name = chunk_hashes(known, SALT)[1]
    prefix = store.find(name, 2, SALT)
    assert prefix is not None and prefix.tokens == known[: 2 * CHUNK_SIZE]


def test_store_has_what_the_caches_have() -> None:
    """The load has more prompts than fit, preemptions, and blocks in host memory."""
    bounds = limits(40, 4, 512, max_model_len=8192, num_host_blocks=32)
    this, store = engine(bounds, MODEL), ChunkStore()
    sequences = [
        sequence(bounds, epoch, tokens(1, epoch % 5), max_tokens=300) for epoch in range(1, 13)
    ]
    on_host = run(this, store, *sequences)
    assert on_host and this.load().preemptions > 0 and store._chunks


def test_failed_step_leaves_no_tokens_behind() -> None:
    this, store = engine(BOUNDS, MODEL), ChunkStore()
    this._runner._faults = {1: ValueError("no")}  # type: ignore[attr-defined]
    this.add(sequence(BOUNDS, 1, tokens(1, more=3), max_tokens=3))
    this.step()
    store.update(this.take_chunk_changes())
    assert len(store) == 0
