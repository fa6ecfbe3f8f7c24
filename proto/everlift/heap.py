"""Python's garbage collector in processes that must not stand still."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: Passes over what is middle-aged before one over all that is old, which takes longer the more
#: requests there are. Python's own number is 10.
_PASSES = 1000


def settle() -> None:
    """Exempt all present objects from garbage collection, after a process has started.

    A pass over all that a router has imported stopped its event loop for 84 to 93 ms.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _PASSES)


@contextmanager
def growing() -> Iterator[None]:
    """Pause the garbage collector around imports of large libraries.

    It would look through their objects again and again: a sixth of the time of importing torch.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        _age()
        if was_on:
            gc.enable()


def _age() -> None:
    """Make what is young old without a look at it, unless there is little of it."""
    if gc.get_count()[0] > gc.get_threshold()[0] and not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()
