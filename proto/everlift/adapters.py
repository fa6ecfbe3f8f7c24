"""LoRA adapters of a model, as settings name them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from everlift.hub import is_hub_id, name_for_clients

_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """LoRA adapter: the name by which clients request it, and the source of its files.

    ``location`` is the directory or the hub id of the files, which are in peft's format.
    ``revision`` is a branch, tag or commit of the hub id; an empty one means the main branch.
    """

    name: str
    location: str
    revision: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the source that ``text`` describes: NAME=DIRECTORY, NAME=ID or NAME=ID@REVISION.

        Raises ValueError if ``text`` has another form.
        """
        name, equals, location = text.partition("=")
        if not (equals and location and _NAME.fullmatch(name)):
            raise ValueError(
                "must be NAME=DIRECTORY or NAME=ORG/NAME@REVISION, with a name of at most 128 "
                f"letters, digits and . _ : / -, not {text!r}"
            )
        before, at, revision = location.rpartition("@")
        if at and revision and is_hub_id(before, revision) and not Path(location).is_dir():
            return cls(name, before, revision)
        return cls(name, location)

    @property
    def is_hub_id(self) -> bool:
        return is_hub_id(self.location, self.revision)

    @property
    def root(self) -> str:
        """Hub id, or last component of the directory's path after resolving links."""
        return name_for_clients(self.location, self.revision)

    @property
    def absolute(self) -> AdapterSource:
        """Copy with the directory's absolute path; a source with a hub id is returned unchanged."""
        if self.is_hub_id:
            return self
        path = Path(self.location).expanduser().absolute()
        return AdapterSource(self.name, str(path))

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.name}={self.location}{revision}"


def parse_adapters(texts: Iterable[str]) -> tuple[AdapterSource, ...]:
    """Return the sources of adapters. Raises ValueError for an invalid text or a repeated name."""
    sources = tuple(map(AdapterSource.parse, texts))
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"names {name!r} twice")
    return sources
