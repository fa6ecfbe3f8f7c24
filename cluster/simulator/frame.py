"""Message of a simulated worker. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from router.admission.workers import Load
from worker.engine.outcome import Outcome


class Frame(NamedTuple):
    """State after a step, or at the start of counting what was ``accepted``.

    ``outcomes`` are of who draws its first or last token, and of who has other news: all others
    draw one in each step.
    """

    worker_id: str
    load: Load
    accepted: tuple[int, ...] = ()
    outcomes: Sequence[Outcome] = ()
