"""Catalogue of the LoRA adapters that operators have loaded, as the ledger stores it.

Each adapter is stored as a run-time setting of the cluster. The setting's name consists of a prefix
and the adapter's name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Protocol, Self

from everlift import logs
from everlift.adapters import AdapterSource

log = logs.get_logger(__name__)

#: Prefix of the names of settings that are adapters; no other setting contains a space.
_PREFIX = "adapter "


@dataclass(frozen=True, slots=True)
class AdapterEntry:
    """Adapter of the model ``model``.

    ``source`` is the adapter's name with the directory or hub id of its files, in the form that
    ``AdapterSource.parse`` reads. ``digest`` is the digest of the files.
    """

    model: str
    source: str
    digest: str

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Return the entry that ``to_text`` encoded as ``text``.

        Raises ValueError if ``text`` is invalid.
        """
        try:
            entry = cls(**json.loads(text))
            AdapterSource.parse(entry.source)
        except (AttributeError, TypeError) as error:
            raise ValueError(str(error)) from None
        return entry

    def to_text(self) -> str:
        return json.dumps(asdict(self))


class AdapterListener(Protocol):
    """Receiver of a changed catalogue; its method must not block."""

    def set_catalogue(self, entries: Mapping[str, AdapterEntry]) -> None:
        """Use ``entries``, the adapters by name, from now on."""
        ...


def setting_of(name: str) -> str:
    """Return the name of the run-time setting of an adapter."""
    return f"{_PREFIX}{name}"


def is_adapter(setting: str) -> bool:
    return setting.startswith(_PREFIX)


def catalogue_of(values: Mapping[str, str]) -> dict[str, AdapterEntry]:
    """Return the adapters among the run-time settings ``values``; log and ignore invalid ones."""
    entries = {}
    for setting, text in values.items():
        if is_adapter(setting):
            try:
                entries[setting.removeprefix(_PREFIX)] = AdapterEntry.from_text(text)
            except ValueError as error:
                log.warning("adapter in the ledger ignored", setting=setting, cause=str(error))
    return entries
