"""Lookup of ids that people type, in full or as a unique prefix. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from everlift.errors import UnknownWorker

#: Number of characters of an id that are shown; they suffice to distinguish a few ids.
SHOWN = 8


def find_id(prefix: str, ids: Iterable[str]) -> str | None:
    """Return the id that equals ``prefix``, or else the only one that begins with it.

    Returns None if no id begins with it, or if ``prefix`` is empty. Raises UnknownWorker if several
    ids begin with it, and none equals it.
    """
    found = sorted({known for known in ids if prefix and known.startswith(prefix)})
    if prefix in found:
        return prefix
    if len(found) > 1:
        shown = ", ".join(known[: max(SHOWN, len(prefix) + 2)] for known in found)
        raise UnknownWorker(f"the id {prefix!r} is ambiguous: it may be {shown}")
    return found[0] if found else None
