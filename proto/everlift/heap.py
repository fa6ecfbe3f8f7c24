"""Settings of Python's garbage collector for processes that must not pause."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: Number of collections of the middle generation between two of the oldest generation, whose
#: duration grows with the number of requests. Python's default is 10.
_FULL_COLLECTION_THRESHOLD = 1000


def freeze_heap() -> None:
    """Exempt all existing objects from garbage collection, and make full collections rarer.

    Call this function once, at the end of a process's startup. Otherwise, each full collection also
    traverses the objects of all imported libraries, which pauses the event loop.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _FULL_COLLECTION_THRESHOLD)


@contextmanager
def pause_gc() -> Iterator[None]:
    """Context manager: disable the garbage collector while large libraries are imported.

    Otherwise, repeated collections of their long-lived objects slow the import down. At the end,
    the collector is enabled again if it was enabled before.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        _promote_young()
        if was_on:
            gc.enable()


def _promote_young() -> None:
    """Move all objects to the oldest generation without a collection.

    Nothing is done if there are too few young objects to trigger a collection. Nothing is done
    after ``freeze_heap`` either, because the move would unfreeze the frozen objects.
    """
    if gc.get_count()[0] > gc.get_threshold()[0] and not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()


def collect_frozen() -> None:
    """Collect garbage, also among the objects that ``freeze_heap`` exempted."""
    gc.unfreeze()
    gc.collect()
