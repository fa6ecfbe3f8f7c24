"""Slots of a worker for LoRA adapters: assignment, waits and eviction."""

from __future__ import annotations

from random import Random

from everlift.errors import EngineFailed
from worker.engine.adapter_slots import AdapterLoad, AdapterLoaded
from worker.engine.outcome import SequenceKey
from worker.serving.adapter_table import AdapterTable, AdapterVersion


def version(name: str) -> AdapterVersion:
    return AdapterVersion(name, f"digest of {name}", f"{name}=/adapters/{name}")


def key(number: int) -> SequenceKey:
    return SequenceKey(number, 0)


class Bench:
    """Adapter table with a fake engine, whose loads end when the test says so."""

    def __init__(self, num_slots: int, *loaded: str) -> None:
        self.table = AdapterTable(num_slots, map(version, loaded))
        self.orders: list[AdapterLoad] = []
        self.ready: list[int] = []

    def use(self, number: int, name: str) -> bool:
        is_loaded = self.table.use(key(number), version(name))
        self._take()
        return is_loaded

    def release(self, *numbers: int) -> None:
        for number in numbers:
            self.table.release(key(number))
            self._take()

    def finish(self, error: EngineFailed | None = None) -> list[int]:
        order = self.orders.pop(0)
        failed = self.table.finish(AdapterLoaded(order, 1.0, 3.0, error))
        self._take()
        return [it.epoch for it in failed]

    def _take(self) -> None:
        self.orders += [order for order in self.table.orders if order.source]
        self.ready += [it.epoch for it in self.table.ready]
        self.table.orders, self.table.ready = [], []

    @property
    def loaded(self) -> dict[str, int]:
        adapters = self.table.to_proto().adapters
        return {it.name: it.sequences for it in adapters if not it.loading}


def test_use_of_a_loaded_adapter_needs_no_order() -> None:
    bench = Bench(2, "a", "b")
    assert bench.use(1, "a") and bench.use(2, "b") and bench.use(3, "a")
    assert not bench.orders and bench.loaded == {"a": 2, "b": 1}


def test_unloaded_adapter_takes_an_empty_slot() -> None:
    bench = Bench(2, "a")
    assert not bench.use(1, "b")
    assert not bench.use(2, "b")
    assert bench.orders == [AdapterLoad(2, "b=/adapters/b", "digest of b")]
    assert not bench.ready and bench.loaded == {"a": 0}
    assert bench.finish() == []
    assert bench.ready == [1, 2] and bench.loaded == {"a": 0, "b": 2}
    state = bench.table.to_proto()
    assert (state.load_s, state.loads, state.unloads) == (2.0, 1, 0)


def test_unused_adapter_of_the_oldest_use_is_replaced() -> None:
    bench = Bench(3, "a", "b", "c")
    for number, name in enumerate(("b", "a", "c"), 1):
        assert bench.use(number, name)
    bench.release(3, 1, 2)
    assert bench.use(4, "c")
    assert not bench.use(5, "d")
    assert [order.slot for order in bench.orders] == [2]
    bench.finish()
    assert bench.loaded == {"a": 0, "d": 1, "c": 1}
    assert bench.table.to_proto().unloads == 1


def test_adapter_waits_while_all_slots_are_in_use() -> None:
    bench = Bench(1, "a")
    assert bench.use(1, "a")
    assert not bench.use(2, "b") and not bench.orders
    bench.release(1)
    assert [order.source for order in bench.orders] == ["b=/adapters/b"]
    bench.finish()
    assert bench.ready == [2]


def test_waiting_adapter_is_not_starved_by_a_busy_one() -> None:
    """Sequences of a busy adapter overlap for ever; they queue behind the one that waits."""
    bench = Bench(1, "a")
    assert bench.use(1, "a")
    assert not bench.use(2, "b")
    assert not bench.use(3, "a")
    bench.release(1)
    bench.finish()
    assert bench.ready == [2] and not bench.orders
    bench.release(2)
    bench.finish()
    assert bench.ready == [2, 3] and bench.loaded == {"a": 1}


def test_slot_opens_again_if_the_waiting_adapter_leaves() -> None:
    bench = Bench(1, "a")
    assert bench.use(1, "a")
    assert not bench.use(2, "b")
    assert not bench.use(3, "a")
    bench.release(2)
    assert bench.ready == [3] and bench.use(4, "a") and not bench.orders


def test_failed_load_fails_its_sequences_and_frees_the_slot() -> None:
    bench = Bench(1)
    assert not bench.use(1, "a")
    assert not bench.use(2, "b")
    assert bench.finish(EngineFailed("unreadable")) == [1]
    assert bench.finish() == []
    assert bench.ready == [2] and bench.loaded == {"b": 1}


def test_abort_during_a_load_keeps_the_adapter() -> None:
    bench = Bench(1)
    assert not bench.use(1, "a")
    bench.release(1)
    bench.finish()
    assert not bench.ready and bench.use(2, "a")


def test_unload_waits_for_the_last_sequence() -> None:
    bench = Bench(2, "a", "b")
    assert bench.use(1, "a")
    for name in ("a", "b", "c"):
        bench.table.unload(version(name).digest)
    assert bench.table.orders == [AdapterLoad(2)]
    assert bench.loaded == {"a": 1}
    bench.table.orders.clear()
    bench.table.release(key(1))
    assert bench.table.orders == [AdapterLoad(1)] and not bench.loaded


def test_preload_keeps_a_version_that_waits_to_be_unloaded() -> None:
    bench = Bench(1, "a")
    assert bench.use(1, "a")
    bench.table.unload(version("a").digest)
    bench.table.preload(version("a"))
    bench.release(1)
    assert bench.use(2, "a")


def test_preload_takes_no_slot_that_is_in_use() -> None:
    bench = Bench(1, "a")
    assert bench.use(1, "a")
    bench.table.preload(version("b"))
    assert not bench.table.orders
    bench.release(1)
    bench.table.preload(version("b"))
    assert [order.source for order in bench.table.orders] == ["b=/adapters/b"]


def test_sequences_never_lose_their_slot_and_all_get_one() -> None:
    """Random arrivals, ends, unloads and failures over more adapters than slots."""
    for seed in range(60):
        rng = Random(seed)
        bench = Bench(rng.randint(1, 3))
        started: dict[int, str] = {}
        waiting: dict[int, str] = {}
        slots: dict[int, str] = {}
        for number in range(200):
            bench.ready.clear()
            match rng.randrange(5):
                case 0 | 1:
                    name = rng.choice("abcde")
                    waiting[number] = name
                    if bench.use(number, name):
                        started[number] = waiting.pop(number)
                case 2 if started or waiting:
                    gone = rng.choice([*started, *waiting])
                    started.pop(gone, None)
                    waiting.pop(gone, None)
                    bench.release(gone)
                case 3 if bench.orders:
                    order = bench.orders[0]
                    fails = rng.random() < 0.2
                    for each in bench.finish(EngineFailed("no") if fails else None):
                        del waiting[each]
                    if not fails:
                        slots[order.slot] = order.source[0]
                case _:
                    bench.table.unload(version(rng.choice("abcde")).digest)
                    bench._take()
            for each in bench.ready:
                started[each] = waiting.pop(each)
            for order in bench.orders:
                slots.pop(order.slot, None)
            assert {*started.values()} <= {*slots.values()}
        while started or waiting:
            bench.ready.clear()
            if bench.orders:
                bench.finish()
            elif started:
                bench.release(started.popitem()[0])
            else:
                raise AssertionError(f"waits forever: {waiting}")
            for each in bench.ready:
                started[each] = waiting.pop(each)
