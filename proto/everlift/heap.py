"""Python's garbage collector in processes that must not stand still."""

from __future__ import annotations

import gc

#: Passes over what is middle-aged before one over all that is old, which takes longer the more
#: requests there are. Python's own number is 10.
_PASSES = 1000


def settle() -> None:
    """Once a process has started: what is there by now stays, and is not looked through again. A
    pass over all that a router has imported stopped its event loop for 84 to 93 ms."""
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _PASSES)
