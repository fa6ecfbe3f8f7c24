"""Restoration of logging after commands that ran in the test's own process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    before = list(root.handlers)
    yield
    for handler in [h for h in root.handlers if h not in before]:
        root.removeHandler(handler)
        handler.close()
    for package in ("everlift", "router", "worker", "cluster"):
        logging.getLogger(package).setLevel(logging.NOTSET)
