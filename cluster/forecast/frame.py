"""What a simulated worker says. Pure."""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import NamedTuple

from cluster.forecast.stretch import Stretch
from router.admission.worker_view import Load
from worker.outcome import Outcome


class Frame(NamedTuple):
    """After a step, or when it has begun to count what was ``accepted``. With a ``stretch`` each of
    its sequences has one more token; the frame after its last step has the outcomes of all."""

    worker_id: str
    load: Load
    accepted: tuple[int, ...] = ()
    outcomes: Several[Outcome] = ()
    stretch: Stretch | None = None
