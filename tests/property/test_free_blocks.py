"""Random sessions on a block pool: no block is lost, and retained blocks are evicted last."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from everlift.hashes import BLOCKS_PER_CHUNK
from tests.support.example_counts import examples
from worker.engine.blocks import BlockPool
from worker.engine.host_store import HostStore

BLOCKS = 12


@dataclass(frozen=True)
class Turn:
    """Sequence that starts ``after_s`` seconds after the last event.

    Its first ``shared`` blocks are those of conversation ``prompt``; ``own`` blocks follow. It is
    freed after ``lasts`` further events, with the number of its session or 0.
    """

    prompt: int
    shared: int
    own: int
    session: int
    lasts: int
    after_s: float
    invalidates: bool


turns = st.lists(
    st.builds(
        Turn,
        prompt=st.integers(0, 3),
        shared=st.integers(0, 4) | st.just(BLOCKS_PER_CHUNK),
        own=st.integers(0, 3),
        session=st.integers(0, 4),
        lasts=st.integers(0, 4),
        after_s=st.sampled_from([0.0, 1.0, 4.0]),
        invalidates=st.sampled_from([False] * 7 + [True]),
    ),
    max_size=40,
)


@dataclass
class Run:
    """Block pool under random turns.

    ``evictions`` are the hashes in the order of their eviction, ``chunks`` those of the last blocks
    of the cached chunks, as the pool reports them.
    """

    retention_s: float
    max_retained: int
    evictions: list[bytes] = field(default_factory=list)
    chunks: set[bytes] = field(default_factory=set)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.pool = BlockPool(BLOCKS, HostStore(0), self.retention_s, self.max_retained)
        #: event after which a sequence is freed, its block table and session
        self.running: list[tuple[int, tuple[int, ...], int]] = []
        #: hashes of all blocks that ended a chunk
        self.ends: set[bytes] = set()

    def play(self, history: list[Turn]) -> None:
        for event, turn in enumerate(history):
            self.now += turn.after_s
            self.pool.set_time(self.now)
            self.start(event, turn)
            if turn.invalidates:
                self.pool.invalidate_content(b"%d/0" % turn.prompt)
            for ended in [it for it in self.running if it[0] <= event]:
                self.running.remove(ended)
                self.pool.free(ended[1], ended[2])
            self.check()

    def start(self, event: int, turn: Turn) -> None:
        shared = [b"%d/%d" % (turn.prompt, index) for index in range(turn.shared)]
        hits = 0
        while hits < len(shared) and shared[hits] in self.pool:
            hits += 1
        hashes = [*shared, *(b"event %d/%d" % (event, index) for index in range(turn.own))]
        needed = len(hashes) - sum(map(self.pool.is_used, shared[:hits]))
        if needed > self.pool.num_free:
            return
        claimed = self.pool.claim(shared[:hits])
        blocks = (*claimed, *(self.allocate() for _ in hashes[hits:]))
        for index in range(hits, len(hashes)):
            self.pool.publish(blocks[index], hashes[index], index)
            if (index + 1) % BLOCKS_PER_CHUNK == 0:
                self.ends.add(hashes[index])
        self.running.append((event + turn.lasts, blocks, turn.session))

    def allocate(self) -> int:
        free = self.pool._free
        num_ordinary, before = len(free) - free.num_retained, {*self.pool._by_hash}
        num_retained = free.num_retained
        (block,) = self.pool.allocate(1)
        assert free.num_retained == num_retained - (not num_ordinary), "too early"
        self.evictions += before - self.pool._by_hash.keys()
        return block

    def check(self) -> None:
        tables = [blocks for _, blocks, _ in self.running]
        self.pool.check_integrity(tables)
        assert self.pool.num_free == BLOCKS - len({block for it in tables for block in it})
        for name, is_cached in self.pool.take_chunk_changes().items():
            (self.chunks.add if is_cached else self.chunks.discard)(name)
        assert self.chunks == self.ends & self.pool._by_hash.keys()
        for session in self.pool._free._sessions.values():
            assert session.used_at + self.retention_s > self.now, "its time is over"


@settings(max_examples=examples(150))
@given(turns, st.sampled_from([2.0, 6.0]), st.integers(0, BLOCKS))
def test_free_blocks_lose_no_block(history: list[Turn], seconds: float, most: int) -> None:
    Run(seconds, most).play(history)


@settings(max_examples=examples(100))
@given(turns, st.sampled_from([0.0, 6.0]))
def test_free_blocks_without_share_ignore_sessions(history: list[Turn], seconds: float) -> None:
    this, plain = Run(seconds, 0), Run(0.0, 0)
    this.play(history)
    plain.play([replace(turn, session=0) for turn in history])
    assert this.evictions == plain.evictions
