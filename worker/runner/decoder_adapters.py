"""LoRA adapters of a decoder, which are loaded and unloaded at run time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from everlift import logs, model_files
from everlift.adapters import AdapterSource
from everlift.errors import EngineFailed, EverliftError, UnknownModel
from everlift.model_files import ModelUnavailable
from worker.engine.adapter_slots import AdapterLoad, AdapterLoaded, first_digests
from worker.model.adapter_weights import packed_adapter
from worker.model.adapters import Adapter, BadAdapter, read_adapter
from worker.model.checkpoint import BadCheckpoint
from worker.model.decoder import Decoder
from worker.model.lora import PackedParts
from worker.model.spec import ModelSpec
from worker.parallel.group import Group

log = logs.get_logger(__name__)


class _Reading:
    """Thread that reads an adapter; once ``is_done``, it has ``matrices`` or an ``error``."""

    def __init__(self, load: AdapterLoad, read: Callable[[AdapterLoad], list[PackedParts]]) -> None:
        self.load = load
        self.began = time.monotonic()
        self.matrices: list[PackedParts] | None = None
        self.error: EverliftError | None = None
        self._read = read
        self._done = threading.Event()
        threading.Thread(target=self._run, name="adapter", daemon=True).start()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def _run(self) -> None:
        try:
            self.matrices = self._read(self.load)
        except EverliftError as error:
            self.error = error
        except (BadAdapter, BadCheckpoint, ModelUnavailable, OSError, MemoryError) as error:
            self.error = EngineFailed(f"the adapter cannot be loaded: {error}")
        except Exception as error:
            log.exception("adapter not read", source=self.load.source)
            self.error = EngineFailed(f"the adapter cannot be loaded: {type(error).__name__}")
        finally:
            self._done.set()


class DecoderAdapters:
    """AdapterSlots (worker.engine.adapter_slots) of a rank with a share of a decoder.

    ``adapters`` are those of the setting ``adapters``, the first of which fill the slots.
    """

    def __init__(
        self,
        decoder: Decoder,
        spec: ModelSpec,
        model: Path,
        group: Group,
        adapters: Sequence[Adapter],
        num_slots: int,
    ) -> None:
        self._decoder = decoder
        self._spec = spec
        self._model = model
        self._group = group
        #: digests of the adapters of the setting, by name
        self.configured = {adapter.name: adapter.digest for adapter in adapters}
        #: slots of the loaded adapters, by digest
        first = first_digests(self.configured, num_slots)
        self.numbers = {digest: number for number, digest in enumerate(first, 1)}
        self._readings: dict[int, _Reading] = {}

    def reserved_bytes(self, max_rank: int) -> int:
        """Return the bytes to reserve on this rank for adapters that may be loaded later.

        Each slot may get an adapter of LoRA rank ``max_rank`` instead of a smaller one.
        """
        return self._decoder.reserved_adapter_bytes(max_rank)

    @property
    def is_reading(self) -> bool:
        return bool(self._readings)

    def read(self, load: AdapterLoad) -> None:
        self.numbers = {digest: it for digest, it in self.numbers.items() if it != load.slot}
        self._decoder.place_adapter(load.slot, None)
        self._readings.pop(load.slot, None)
        if load.source:
            self._readings[load.slot] = _Reading(load, self._read)

    def read_slots(self) -> list[int]:
        return [slot for slot, reading in self._readings.items() if reading.is_done]

    def fill(self, slot: int) -> AdapterLoaded | None:
        reading = self._readings[slot]
        if not self._group.agree(reading.is_done):
            return None
        del self._readings[slot]
        error = reading.error or self._place(reading)
        if not self._group.agree(error is None) and error is None:
            self._decoder.place_adapter(slot, None)
            error = EngineFailed("the adapter cannot be loaded on another rank of the worker")
        if error is None:
            self.numbers[reading.load.digest] = slot
        return AdapterLoaded(reading.load, reading.began, time.monotonic(), error)

    def _place(self, reading: _Reading) -> EverliftError | None:
        try:
            self._decoder.place_adapter(reading.load.slot, reading.matrices)
        except (MemoryError, RuntimeError) as error:
            self._decoder.place_adapter(reading.load.slot, None)
            return EngineFailed(f"the adapter cannot be loaded: {error}")
        return None

    def _read(self, load: AdapterLoad) -> list[PackedParts]:
        source = AdapterSource.parse(load.source)
        if source.is_hub_id:
            model_files.download_adapter(source)
        adapter = read_adapter(source, self._model)
        if adapter.digest != load.digest:
            raise UnknownModel(
                f"the files of the adapter {source.name!r} in {source.location} have changed since "
                "the adapter was loaded: load it again"
            )
        return packed_adapter(self._decoder, self._spec, adapter)
