"""Slots of a rank for LoRA adapters, whose reads succeed or fail on the ranks of a worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from everlift.errors import EngineFailed, UnknownModel
from worker.engine.adapter_slots import AdapterLoad, AdapterLoaded
from worker.model.adapters import Adapter, BadAdapter
from worker.runner import decoder_adapters
from worker.runner.decoder_adapters import DecoderAdapters


class Others:
    """Group whose other ranks give the ``answers`` to ``agree``."""

    def __init__(self, *answers: bool) -> None:
        self._answers = iter(answers)

    def agree(self, ok: bool) -> bool:
        return ok and next(self._answers)


class Placed:
    """A decoder that records what each slot has."""

    def __init__(self) -> None:
        self.slots: dict[int, object] = {}

    def place_adapter(self, number: int, packed: object) -> None:
        self.slots[number] = packed


@pytest.fixture(autouse=True)
def files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace the reads of adapters: the digest is the name, and the adapter bad is unreadable."""

    def read(source: Any, model: Path) -> Adapter:
        if source.name == "bad":
            raise BadAdapter("no LoRA weights")
        return Adapter(source.name, Path(source.location), 4, source.name)

    monkeypatch.setattr(decoder_adapters, "read_adapter", read)
    monkeypatch.setattr(decoder_adapters, "packed_adapter", lambda *args: args[2].name)
    yield


def slots(others: Others, *names: str) -> tuple[DecoderAdapters, Placed]:
    decoder: Any = Placed()
    group: Any = others
    adapters = [Adapter(name, Path(), 4, name) for name in names]
    spec: Any = SimpleNamespace()
    return DecoderAdapters(decoder, spec, Path(), group, adapters, 2), decoder


def read(adapters: DecoderAdapters, name: str, slot: int = 1, digest: str = "") -> None:
    adapters.read(AdapterLoad(slot, f"{name}=/x", digest or name))
    adapters._readings[slot]._done.wait(10.0)


def filled(adapters: DecoderAdapters, slot: int = 1) -> AdapterLoaded:
    result = adapters.fill(slot)
    assert result is not None
    return result


def test_read_empties_the_slot_until_it_is_filled() -> None:
    adapters, decoder = slots(Others(True, True), "a", "b", "c")
    assert (adapters.numbers, [*adapters.configured]) == ({"a": 1, "b": 2}, ["a", "b", "c"])
    read(adapters, "new")
    assert adapters.numbers == {"b": 2} and decoder.slots == {1: None}
    assert adapters.is_reading and adapters.read_slots() == [1]
    assert filled(adapters).error is None
    assert adapters.numbers == {"b": 2, "new": 1} and decoder.slots == {1: "new"}
    assert not adapters.is_reading


def test_slot_is_filled_when_all_ranks_have_read() -> None:
    adapters, decoder = slots(Others(False, True, True))
    read(adapters, "new")
    assert adapters.fill(1) is None and adapters.is_reading and decoder.slots == {1: None}
    assert filled(adapters).error is None and decoder.slots == {1: "new"}


def test_failure_of_another_rank_leaves_the_slot_empty() -> None:
    adapters, decoder = slots(Others(True, False))
    read(adapters, "new")
    error = filled(adapters).error
    assert isinstance(error, EngineFailed) and "another rank" in str(error)
    assert not adapters.numbers and decoder.slots == {1: None}


@pytest.mark.parametrize(
    ("name", "digest", "kind", "cause"),
    [
        ("bad", "", EngineFailed, "the adapter cannot be loaded: no LoRA weights"),
        ("a", "another", UnknownModel, "have changed since the adapter was loaded"),
    ],
)
def test_failed_read_is_reported_with_its_cause(
    name: str, digest: str, kind: type[Exception], cause: str
) -> None:
    adapters, decoder = slots(Others(True))
    read(adapters, name, digest=digest)
    error = filled(adapters).error
    assert isinstance(error, kind) and cause in str(error)
    assert not adapters.numbers and decoder.slots == {1: None}


def test_order_without_a_source_only_empties_the_slot() -> None:
    adapters, decoder = slots(Others(), "a")
    adapters.read(AdapterLoad(1))
    assert not adapters.is_reading and not adapters.numbers and decoder.slots == {1: None}
