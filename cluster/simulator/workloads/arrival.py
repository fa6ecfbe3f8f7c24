"""One request of a workload."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class Arrival:
    """``at`` is seconds from the workload's begin; ``output_tokens`` is how long its output would
    become by itself, of which it gets ``max_tokens`` at most."""

    at: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    priority: int = 0
    tenant: str = ""
    #: what kind of request it is: chat, code, ...
    application: str = ""
    #: seconds after ``at``
    ttft_target_s: float = inf
    deadline_s: float = inf
    #: names of what its prompt begins with, part by part: two prompts whose first n names agree
    #: share that many parts of ``prefix_part_tokens`` tokens
    prefix: tuple[int, ...] = ()
    prefix_part_tokens: int = 512
    #: how long its output was expected to become when it came; None: nobody said
    foreseen_tokens: float | None = None
    #: that was by a predictor whose order was worth nothing
    is_distrusted: bool = False
