"""The prefix index against a plain model of every worker's chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from router.admission.prefix_index import PrefixIndex
from tests.support.example_counts import examples

#: Chains of prompts that share prefixes. A chunk's number encodes its prompt and its position.
CHAINS = [
    [*range(100, 100 + shared), *range(1000 * n, 1000 * n + 6)]
    for n, shared in enumerate([0, 3, 3, 5, 8], 1)
]
CHUNKS = sorted({chunk for chain in CHAINS for chunk in chain})
WORKERS = ("a", "b", "c")


def cached(index: PrefixIndex, chain: Sequence[int]) -> dict[str, int]:
    """Return the number of leading chunks that each worker has."""
    return {it: depth for depth, mask in index.depths(chain) for it in index.workers(mask)}


class Model:
    """Model of the index without regard to cost.

    ``stored`` and ``host`` are the chunks in the device and host memory of each worker. A chunk is
    ``unconfirmed`` from the dispatch of a prompt that expects it to a worker that lacks it, until
    it is stored or no prompt expects it.
    """

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.stored: dict[str, set[int]] = {}
        self.host: dict[str, set[int]] = {}
        self.expected: dict[str, dict[int, Sequence[int]]] = {}
        self.unconfirmed: dict[str, set[int]] = {}
        #: workers that had a chunk without its prefix at a dispatch, so that the index may lack
        #: unconfirmed chunks, or have more of them
        self.uncertain: set[str] = set()

    def join(self, worker: str, device: Sequence[int], host: Sequence[int]) -> None:
        self.index.join(worker, device, host)
        self.stored[worker], self.host[worker] = set(device), set(host)
        self.expected[worker], self.unconfirmed[worker] = {}, set()
        self.uncertain.discard(worker)

    def remove(self, worker: str) -> None:
        self.index.remove(worker)
        for chunks in (self.stored, self.host, self.expected, self.unconfirmed):
            chunks.pop(worker, None)

    def update(self, worker: str, stored: Sequence[int], evicted: Sequence[int]) -> None:
        self.index.update(worker, stored, evicted)
        if worker in self.stored:
            self.stored[worker] = self.stored[worker].difference(evicted).union(stored)
            self.unconfirmed[worker].difference_update(stored)

    def update_host(self, worker: str, stored: Sequence[int], evicted: Sequence[int]) -> None:
        self.index.update_host(worker, stored, evicted)
        if worker in self.host:
            self.host[worker] = self.host[worker].difference(evicted).union(stored)

    def expect(self, worker: str, epoch: int, chunks: Sequence[int]) -> None:
        if worker in self.stored and epoch not in self.expected[worker]:
            self.expected[worker][epoch] = chunks
            held = self.held(self.index._device, worker) | self.held(self.index._host, worker)
            self.unconfirmed[worker] |= {*chunks} - held
            if not _is_closed(chunks, held):
                self.uncertain.add(worker)
        self.index.expect(worker, epoch, chunks)

    def settle(self, worker: str, epoch: int) -> None:
        self.index.settle(worker, epoch)
        if worker in self.expected:
            self.expected[worker].pop(epoch, None)
            self.unconfirmed[worker] &= self.all_expected(worker)

    def all_expected(self, worker: str) -> set[int]:
        """Return the chunks of all prompts that a worker has not computed yet."""
        return {chunk for chunks in self.expected[worker].values() for chunk in chunks}

    def held(self, masks: Mapping[int, int], worker: str) -> set[int]:
        """Return the chunks that the index has for a worker in ``masks``, one of its memories."""
        return {it for it, mask in masks.items() if worker in self.index.workers(mask)}

    def check(self) -> None:
        known = self.held_by_anyone(self.index._device) | self.held_by_anyone(self.index._host)
        assert known <= self.stored.keys()
        for worker, stored in self.stored.items():
            if not self.expected[worker]:
                self.uncertain.discard(worker)
            device, host = (
                self.held(masks, worker) for masks in (self.index._device, self.index._host)
            )
            assert host == self.host[worker]
            if worker in self.uncertain:
                assert stored <= device <= stored | self.all_expected(worker)
            else:
                assert device == stored | self.unconfirmed[worker]
            for chain in CHAINS:
                assert self.index.host_chunks(worker, chain) == len((host - device) & {*chain})
                if _is_closed(chain, device | host):
                    depth = len((device | host) & {*chain})
                    assert cached(self.index, chain).get(worker, 0) == depth

    def held_by_anyone(self, masks: Mapping[int, int]) -> set[str]:
        """Return the workers that have a chunk in ``masks``."""
        return {worker for mask in masks.values() for worker in self.index.workers(mask)}


def _is_closed(chain: Sequence[int], chunks: set[int]) -> bool:
    """Return whether ``chunks`` has no chunk of a chain without all those before it."""
    return chunks.issuperset(chain[: len(chunks.intersection(chain))])


workers = st.sampled_from(WORKERS)
prefixes = st.builds(
    lambda chain, depth: chain[:depth], st.sampled_from(CHAINS), st.integers(1, 14)
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("join"), workers, prefixes, prefixes),
        st.tuples(st.just("remove"), workers),
        st.tuples(st.just("store"), workers, prefixes),
        st.tuples(st.just("evict"), workers, st.sampled_from(CHAINS), st.integers(0, 14)),
        st.tuples(st.just("drop"), workers, st.lists(st.sampled_from(CHUNKS))),
        st.tuples(st.just("store on host"), workers, prefixes),
        st.tuples(st.just("drop from host"), workers, st.lists(st.sampled_from(CHUNKS))),
        st.tuples(st.just("expect"), workers, st.integers(1, 3), prefixes),
        st.tuples(st.just("settle"), workers, st.integers(1, 3)),
    ),
    min_size=20,
    max_size=40,
)


@settings(max_examples=examples(250))
@given(steps)
def test_prefix_index_matches_the_chunks_of_each_worker(taken: list[tuple]) -> None:  # type: ignore[type-arg]
    model = Model()
    for worker in WORKERS:
        model.join(worker, (), ())
    for name, worker, *rest in taken:
        if name == "join":
            model.join(worker, *rest)
        elif name == "remove":
            model.remove(worker)
        elif name == "store":
            model.update(worker, rest[0], ())
        elif name == "evict":
            chain, depth = rest
            gone = set(chain[depth:])
            # The end of every prefix is evicted before its beginning, as in a worker's cache.
            gone |= {
                chunk
                for other in CHAINS
                if gone & set(other)
                for chunk in other[min(other.index(c) for c in gone & set(other)) :]
            }
            model.update(worker, (), sorted(gone))
        elif name == "drop":
            model.update(worker, (), rest[0])
        elif name == "store on host":
            model.update_host(worker, rest[0], ())
        elif name == "drop from host":
            model.update_host(worker, (), rest[0])
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
    assert not index._device and cached(index, [1, 2, 3]) == {}
    index.join("b", [1])
    assert cached(index, [1, 2]) == {"b": 1}


def test_prefix_index_expects_chunks_until_prefilled() -> None:
    index = PrefixIndex()
    index.join("a")
    index.expect("a", 7, [1, 2])
    assert cached(index, [1, 2, 3]) == {"a": 2}
    index.update("a", [1, 4], ())
    index.settle("a", 7)
    assert cached(index, [1, 2, 3]) == {"a": 1} and cached(index, [4]) == {"a": 1}


def test_prefix_index_keeps_chunks_expected_by_siblings() -> None:
    index = PrefixIndex()
    index.join("a")
    index.expect("a", 7, [1, 2, 3])
    index.expect("a", 8, [1, 2, 4])
    index.update("a", (), [2])
    index.settle("a", 7)
    assert cached(index, [1, 2, 3]) == {"a": 2} and cached(index, [1, 2, 4]) == {"a": 3}
    index.update("a", [3], ())
    assert cached(index, [1, 2, 3]) == {"a": 3}


def test_prefix_index_keeps_stored_chunks_behind_a_gap() -> None:
    index = PrefixIndex()
    index.join("a", [1, 3])
    index.expect("a", 7, [1, 2, 3])
    assert cached(index, [1, 2, 3]) == {"a": 3}
    index.settle("a", 7)
    assert cached(index, [1, 2]) == {"a": 1} and cached(index, [3]) == {"a": 1}


def test_prefix_index_counts_chunks_in_host_memory_only() -> None:
    index = PrefixIndex()
    index.join("b", host=[1])
    index.join("a", device=[1, 2], host=[2, 3])
    assert index.host_chunks("a", [1, 2, 3]) == 1
    index.remove("b")
    assert cached(index, [1, 2, 3]) == {"a": 3}
    index.update("a", (), [2])
    assert index.host_chunks("a", [1, 2, 3]) == 2
    index.update_host("a", (), [3, 2])
    assert cached(index, [1, 2, 3]) == {"a": 1} and index.host_chunks("a", [1, 2, 3]) == 0
