"""Message of a simulated worker to the router. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from router.admission.workers import Load
from worker.engine.outcome import Outcome


class Frame(NamedTuple):
    """State of a worker after a step, at the start of a request, or as a heartbeat.

    ``accepted`` are the epochs that this frame acknowledges; ``load`` includes their requests.
    ``outcomes`` are those of sequences with their first or last token or with another change. Every
    other decoding sequence samples one token in each step and has no outcome.
    """

    worker_id: str
    load: Load
    accepted: tuple[int, ...] = ()
    outcomes: Sequence[Outcome] = ()
