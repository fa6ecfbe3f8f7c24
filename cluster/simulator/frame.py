"""Message of a simulated worker to the router. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from router.admission.workers import Load
from worker.engine.outcome import Outcome


class Frame(NamedTuple):
    """Message with a worker's state: after a step, on receipt of a request, or as a heartbeat.

    ``accepted`` are the epochs (numbers of attempts) of the requests whose receipt this frame
    acknowledges; ``load`` includes these requests. ``outcomes`` are the results of the step for
    sequences that sampled their first or last token or had another change. Every other decoding
    sequence samples one token in each step and has no outcome. Every token has an outcome if steps
    may leave out decoding sequences (``may_defer``). A request that ends on receipt has an outcome
    in the frame that acknowledges it. ``chunks`` maps each prefix chunk whose state has changed to
    whether it is cached now. A chunk is identified by the name of its last block; the product uses
    the block's hash instead. ``aborted`` are the epochs that were aborted since the last frame.
    """

    worker_id: str
    load: Load
    accepted: tuple[int, ...] = ()
    outcomes: Sequence[Outcome] = ()
    chunks: Mapping[bytes, bool] = MappingProxyType({})
    aborted: tuple[int, ...] = ()
    may_defer: bool = False
