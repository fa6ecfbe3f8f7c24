"""By when something is wanted of a request, and whether it can come by then. Pure."""

from __future__ import annotations

from math import inf
from typing import NamedTuple


class Late(NamedTuple):
    """Something comes later than it is wanted. ``is_by_output``: its first token would come in
    time, and its end would not. By ``shorter_s`` the queue has to be shorter, if that helps."""

    is_by_output: bool
    shorter_s: float


class Wanted(NamedTuple):
    """Seconds after its arrival by which its first token and its end are wanted; infinite: at no
    time."""

    first_token_s: float = inf
    end_s: float = inf

    def late(self, wait_s: float, prefill_s: float, output_s: float) -> Late | None:
        """None where it can come in time. At the least it waits for ``wait_s``, and its output goes
        on for ``output_s`` after its first token. Who need not wait is not late for its prompt's
        sake, which its worker may have computed for another one."""
        first_s = wait_s + prefill_s if wait_s else 0.0
        first_late_s = first_s - min(self.first_token_s, self.end_s)
        late_s = max(first_late_s, first_s + output_s - self.end_s)
        return Late(first_late_s <= 0, min(late_s, wait_s)) if late_s > 0 else None
