"""The prefix index against a plain model of every worker's chunks."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from router.admission.prefix_index import PrefixIndex

#: Chains of prompts that share prefixes: a chunk is the number of its prompt and its place.
CHAINS = [
    [*range(100, 100 + shared), *range(1000 * n, 1000 * n + 6)]
    for n, shared in enumerate([0, 3, 3, 5, 8], 1)
]
WORKERS = ("a", "b", "c")


def cached(index: PrefixIndex, chain: Sequence[int]) -> dict[str, int]:
    """Return by worker how many leading chunks it has."""
    return {it: depth for depth, mask in index.depths(chain) for it in index.workers(mask)}


class Model:
    """What an index should know, without regard to cost."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.stored: dict[str, set[int]] = {}
        self.expected: dict[str, dict[int, Sequence[int]]] = {}

    def join(self, worker: str, chunks: Sequence[int]) -> None:
        self.index.join(worker, chunks)
        self.stored[worker], self.expected[worker] = set(chunks), {}

    def remove(self, worker: str) -> None:
        self.index.remove(worker)
        self.stored.pop(worker, None)
        self.expected.pop(worker, None)

    def update(self, worker: str, stored: Sequence[int], evicted: Sequence[int]) -> None:
        self.index.update(worker, stored, evicted)
        if worker in self.stored:
            self.stored[worker] = self.stored[worker] - set(evicted) | set(stored)

    def expect(self, worker: str, epoch: int, chunks: Sequence[int]) -> None:
        self.index.expect(worker, epoch, chunks)
        if worker in self.stored:
            self.expected[worker].setdefault(epoch, chunks)

    def settle(self, worker: str, epoch: int) -> None:
        self.index.settle(worker, epoch)
        self.expected.get(worker, {}).pop(epoch, None)

    def of(self, worker: str) -> set[int]:
        return self.stored[worker].union(*self.expected[worker].values())

    def check(self) -> None:
        assert self.index._chunks.keys() == self.stored.keys()
        for worker in self.stored:
            assert self.index._chunks[worker].keys() == self.of(worker)
        for chain in CHAINS:
            depths = {worker: _depth(chain, self.of(worker)) for worker in self.stored}
            assert cached(self.index, chain) == {w: depth for w, depth in depths.items() if depth}


def _depth(chain: Sequence[int], chunks: set[int]) -> int:
    return next((i for i, chunk in enumerate(chain) if chunk not in chunks), len(chain))


workers = st.sampled_from(WORKERS)
prefixes = st.builds(
    lambda chain, depth: chain[:depth], st.sampled_from(CHAINS), st.integers(0, 14)
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("join"), workers, prefixes),
        st.tuples(st.just("remove"), workers),
        st.tuples(st.just("store"), workers, prefixes),
        st.tuples(st.just("evict"), workers, st.sampled_from(CHAINS), st.integers(0, 14)),
        st.tuples(st.just("expect"), workers, st.integers(1, 4), prefixes),
        st.tuples(st.just("settle"), workers, st.integers(1, 4)),
    ),
    max_size=40,
)


@given(steps)
def test_prefix_index_matches_the_chunks_of_each_worker(taken: list[tuple]) -> None:  # type: ignore[type-arg]
    model = Model()
    for name, worker, *rest in taken:
        if name == "join":
            model.join(worker, rest[0])
        elif name == "remove":
            model.remove(worker)
        elif name == "store":
            model.update(worker, rest[0], ())
        elif name == "evict":
            chain, depth = rest
            gone = set(chain[depth:])
            # The end of every prefix goes before its beginning, as in a worker's cache.
            gone |= {
                chunk
                for other in CHAINS
                if gone & set(other)
                for chunk in other[min(other.index(c) for c in gone & set(other)) :]
            }
            model.update(worker, (), sorted(gone))
        elif name == "expect":
            model.expect(worker, *rest)
        else:
            model.settle(worker, *rest)
        model.check()


def test_prefix_index_forgets_a_removed_worker() -> None:
    index = PrefixIndex()
    index.join("a", [1, 2])
    index.expect("a", 7, [1, 2, 3])
    index.remove("a")
    index.update("a", [4], ())
    index.settle("a", 7)
    assert not index._chunks and not index._masks and cached(index, [1, 2, 3]) == {}
    index.join("b", [1])
    assert cached(index, [1, 2]) == {"b": 1}


def test_prefix_index_expects_chunks_until_prefilled() -> None:
    index = PrefixIndex()
    index.join("a")
    index.expect("a", 7, [1, 2])
    assert cached(index, [1, 2, 3]) == {"a": 2}
    index.update("a", [1], ())
    index.settle("a", 7)
    assert cached(index, [1, 2, 3]) == {"a": 1}


def test_prefix_index_counts_chunks_in_host_memory_only() -> None:
    index = PrefixIndex()
    index.join("a", device=[1, 2], host=[2, 3])
    assert cached(index, [1, 2, 3]) == {"a": 3} and index.host_chunks("a", [1, 2, 3]) == 1
    index.update("a", (), [2])
    assert index.host_chunks("a", [1, 2, 3]) == 2
    index.update_host("a", (), [3, 2])
    assert cached(index, [1, 2, 3]) == {"a": 1} and index.host_chunks("a", [1, 2, 3]) == 0
