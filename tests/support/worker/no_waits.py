"""Check that nothing waits for a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_waits() -> Iterator[None]:
    """Raise RuntimeError for waits for the device that torch detects.

    Waits for events are not detected. Without a GPU nothing is raised.
    """
    if not torch.cuda.is_available():
        yield
        return
    with warnings.catch_warnings():
        # Torch warns once that this is a prototype; the warning must not become an error.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
