"""Whether anything waits for a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_waits() -> Iterator[None]:
    """What waits for the device in here raises RuntimeError, as far as torch sees it: an event that
    is waited for does not count. Without a GPU nothing does."""
    if not torch.cuda.is_available():
        yield
        return
    with warnings.catch_warnings():
        # Torch says once that this is a prototype, and an error is not to come of that.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
