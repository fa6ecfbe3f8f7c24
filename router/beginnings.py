"""Ids as people write them: whole, or a beginning that only one has. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from everlift.errors import UnknownWorker

#: So much of an id is shown, and is enough where there are a few.
SHOWN = 8


def find(beginning: str, ids: Iterable[str]) -> str | None:
    """The id that is meant; None where none begins so. Raises UnknownWorker where several do."""
    found = sorted({each for each in ids if beginning and each.startswith(beginning)})
    if beginning in found:
        return beginning
    if len(found) > 1:
        shown = ", ".join(each[: max(SHOWN, len(beginning) + 2)] for each in found)
        raise UnknownWorker(f"{beginning!r} may mean {shown}")
    return found[0] if found else None
