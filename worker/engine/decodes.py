"""Time that each decoding sequence would have taken alone, computed from sums over steps. Pure.

Alone means in steps without any other sequence. A row (a sequence's part of the step) of one token
at position p would have taken ``base + slope * (p + 1)`` seconds alone in step n. The same sequence
is one position further in the next step. The time of a sequence since an earlier step therefore
follows from how much three sums over steps have grown since that step:

    seconds = bases + offset * slopes + moment      bases: growth of the sum of base
                                                    slopes: growth of the sum of slope
                                                    moment: growth of the sum of slope * n
                                                    offset: p + 1 - n, constant during decoding
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from worker.engine.plan import Flags, Ints

#: Number of steps after which the sums restart: later, ``moment`` would be too large to resolve the
#: time of a single step.
_MAX_STEPS = 4096
_OFFSET = 3


class Decodes:
    """Sums over steps and, for each tracked slot, their values when it was tracked or last reset.

    A batch slot is tracked while its sequence decodes. Its position is the position of the token
    that it computes in the next step. To reset a slot is to read its time and to restart it at 0.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_steps = 0
        self._base = self._slope = self._moment = 0.0
        #: [slots, 4]: the three sums when the slot was tracked or last reset, and its offset
        self._snapshots = np.zeros((num_slots, 4))
        self.is_tracked: Flags = np.zeros(num_slots, np.bool_)
        self._num_tracked = self._offsets = 0

    @property
    def is_long(self) -> bool:
        """Return whether so many steps were added to the sums that these must be restarted."""
        return self._num_steps >= _MAX_STEPS

    @property
    def positions(self) -> int:
        """Return the sum of the positions of all tracked slots."""
        return self._offsets + self._num_tracked * (self._num_steps - 1)

    def positions_of(self, slots: Ints) -> int:
        """Return the sum of the positions of ``slots``, which must be tracked."""
        return int(self._snapshots[slots, _OFFSET].sum()) + len(slots) * (self._num_steps - 1)

    def begin_decode(self, slot: int, position: int) -> None:
        """Track a slot: its sequence decodes the token at ``position`` in the next step."""
        offset = position + 1 - self._num_steps
        self._snapshots[slot] = self._base, self._slope, self._moment, offset
        self.is_tracked[slot] = True
        self._num_tracked += 1
        self._offsets += offset

    def seconds(self, slot: int) -> float:
        """Return the time, in seconds, that the steps of a slot would have taken alone.

        Only steps since the slot was tracked or last reset count. Returns 0 if the slot is not
        tracked.
        """
        if not self.is_tracked[slot]:
            return 0.0
        base, slope, moment, offset = map(float, self._snapshots[slot])
        return self._base - base + offset * (self._slope - slope) + self._moment - moment

    def drop(self, slot: int) -> None:
        """Stop tracking a slot, if it is tracked."""
        if self.is_tracked[slot]:
            self.is_tracked[slot] = False
            self._num_tracked -= 1
            self._offsets -= int(self._snapshots[slot, _OFFSET])

    def add(self, base: float, slope: float) -> None:
        """Add a step in which every tracked slot computes one token.

        A slot at position p would have taken ``base + slope * (p + 1)`` seconds alone.
        """
        self._base += base
        self._slope += slope
        self._moment += slope * self._num_steps
        self._num_steps += 1

    # several slots at once

    def pop_seconds(self, slots: Ints) -> NDArray[np.float64]:
        """Return the ``seconds`` of each of ``slots``, float [n], and restart them at 0.

        All slots must be tracked.
        """
        base, slope, moment, offset = self._snapshots[slots].T
        seconds: NDArray[np.float64] = (
            self._base - base + offset * (self._slope - slope) + self._moment - moment
        )
        self._snapshots[slots, :_OFFSET] = self._base, self._slope, self._moment
        return seconds

    def undo_add(self, slots: Ints) -> None:
        """Undo the effect of the last ``add`` on ``slots``, which have no row in that step.

        All slots must be tracked, and must have been reset right before that ``add``.
        """
        self._snapshots[slots, :_OFFSET] = self._base, self._slope, self._moment
        self._snapshots[slots, _OFFSET] -= 1
        self._offsets -= len(slots)

    def set_positions(self, slots: Ints, positions: Ints) -> None:
        """Replace the positions of ``slots`` [n] by ``positions`` [n], after drafts were accepted.

        All slots must be tracked, and must have been reset with ``pop_seconds`` after the last
        ``add``.
        """
        offsets = positions + 1 - self._num_steps
        self._offsets += int(offsets.sum() - self._snapshots[slots, _OFFSET].sum())
        self._snapshots[slots, _OFFSET] = offsets

    def restart_sums(self) -> None:
        """Restart the sums at 0. All tracked slots must have just been reset."""
        self._snapshots[:, :_OFFSET] = 0.0
        self._snapshots[:, _OFFSET] += self._num_steps
        self._offsets += self._num_tracked * self._num_steps
        self._num_steps = 0
        self._base = self._slope = self._moment = 0.0
