"""Time that decoding sequences would have taken alone, from sums over steps. Pure.

Alone means in steps without any other sequence. In step n, a row (a sequence's part of the step) of
one token at position p would have taken ``base + slope * (p + 1)`` seconds alone. In the next step
the same sequence is one position further. Its time since an earlier step therefore follows from the
growth of three sums over steps since then:

    seconds = base + offset * slope + moment        base, slope: growth of the sums of these
                                                    moment: growth of the sum of slope * n
                                                    offset: p + 1 - n, constant while it decodes
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
    """Sums over steps and, for each noted slot, their values when its decoding began.

    A batch slot is noted while its sequence decodes. Its position is the position of the token that
    it computes in the next step. To drain a slot is to read its time and to restart it at 0.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_steps = 0
        self._base = self._slope = self._moment = 0.0
        #: [slots, 4]: the three sums when the slot was noted or last drained, and its offset
        self._notes = np.zeros((num_slots, 4))
        self.is_noted: Flags = np.zeros(num_slots, np.bool_)
        self._num_noted = self._offsets = 0

    @property
    def is_long(self) -> bool:
        """Return whether so many steps are recorded that the sums must restart."""
        return self._num_steps >= _MAX_STEPS

    @property
    def positions(self) -> int:
        """Return the sum of the positions of all noted slots."""
        return self._offsets + self._num_noted * (self._num_steps - 1)

    def positions_of(self, slots: Ints) -> int:
        """Return the sum of the positions of ``slots``, which must be noted."""
        return int(self._notes[slots, _OFFSET].sum()) + len(slots) * (self._num_steps - 1)

    def begin_decode(self, slot: int, position: int) -> None:
        """Start to note a slot: its sequence decodes the token at ``position`` in the next step."""
        offset = position + 1 - self._num_steps
        self._notes[slot] = self._base, self._slope, self._moment, offset
        self.is_noted[slot] = True
        self._num_noted += 1
        self._offsets += offset

    def seconds(self, slot: int) -> float:
        """Return the time, in seconds, that the steps of a slot would have taken alone.

        It counts from when the slot was noted or last drained, and is 0 if the slot is not noted.
        """
        if not self.is_noted[slot]:
            return 0.0
        base, slope, moment, offset = map(float, self._notes[slot])
        return self._base - base + offset * (self._slope - slope) + self._moment - moment

    def drop(self, slot: int) -> None:
        """Stop noting a slot, if it is noted."""
        if self.is_noted[slot]:
            self.is_noted[slot] = False
            self._num_noted -= 1
            self._offsets -= int(self._notes[slot, _OFFSET])

    def add(self, base: float, slope: float) -> None:
        """Add a step in which every noted slot computes one token.

        A slot at position p would have taken ``base + slope * (p + 1)`` seconds alone.
        """
        self._base += base
        self._slope += slope
        self._moment += slope * self._num_steps
        self._num_steps += 1

    # several slots at once

    def drain(self, slots: Ints) -> NDArray[np.float64]:
        """Return the ``seconds`` of each of ``slots``, float [n], and restart them at 0.

        All slots must be noted.
        """
        base, slope, moment, offset = self._notes[slots].T
        seconds: NDArray[np.float64] = (
            self._base - base + offset * (self._slope - slope) + self._moment - moment
        )
        self._notes[slots, :_OFFSET] = self._base, self._slope, self._moment
        return seconds

    def sit_out(self, slots: Ints) -> None:
        """Undo the last ``add`` for ``slots``, which are noted but were not in that step.

        They must have been drained right before that step was added.
        """
        self._notes[slots, :_OFFSET] = self._base, self._slope, self._moment
        self._notes[slots, _OFFSET] -= 1
        self._offsets -= len(slots)

    def place(self, slots: Ints, positions: Ints) -> None:
        """Set the positions [n] of ``slots`` [n], which accepted drafts have moved further.

        All slots must be noted, and must have been drained since the last ``add``.
        """
        offsets = positions + 1 - self._num_steps
        self._offsets += int(offsets.sum() - self._notes[slots, _OFFSET].sum())
        self._notes[slots, _OFFSET] = offsets

    def begin_anew(self) -> None:
        """Restart the sums at 0. All noted slots must have just been drained."""
        self._notes[:, :_OFFSET] = 0.0
        self._notes[:, _OFFSET] += self._num_steps
        self._offsets += self._num_noted * self._num_steps
        self._num_steps = 0
        self._base = self._slope = self._moment = 0.0
