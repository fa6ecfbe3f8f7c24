"""Settings of Python's garbage collector for processes that must not pause."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: Number of collections of the middle generation before one of the oldest generation, which takes
#: longer the more requests there are. Python's default is 10.
_FULL_COLLECTION_THRESHOLD = 1000


def freeze_heap() -> None:
    """Exempt all existing objects from garbage collection, and make full collections rarer.

    Call this function when a process has started. Without it, each full collection
    pauses the event loop of a router for 84 to 93 ms.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _FULL_COLLECTION_THRESHOLD)


@contextmanager
def pause_gc() -> Iterator[None]:
    """Context manager: pause the garbage collector while large libraries are imported.

    Otherwise, repeated collections of their objects take a sixth of the time of importing torch.
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
    """Move young objects to the oldest generation without a collection, unless they are few.

    Nothing happens after ``freeze_heap``, because this would unfreeze the objects that it froze.
    """
    if gc.get_count()[0] > gc.get_threshold()[0] and not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()
