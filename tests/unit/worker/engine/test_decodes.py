"""Time that decodes would have taken alone, from sums over steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.decodes import Decodes

#: (action, slot, position, base, slope): an action on a slot, and then a step that takes
#: base + slope * position for each decode.
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["none", "note", "drop", "sit out", "place", "anew"]),
        st.integers(0, 2),
        st.integers(0, 100),
        st.integers(1, 5),
        st.integers(0, 3),
    ),
    max_size=30,
)


def test_decodes_advance_one_position_per_step() -> None:
    decodes = Decodes(2)
    decodes.begin_decode(1, 10)
    decodes.add(1.0, 0.5)
    assert decodes.seconds(1) == 1.0 + 0.5 * 11
    assert decodes.seconds(0) == 0.0
    decodes.begin_decode(0, 40)
    assert decodes.positions == 40 + 11
    decodes.add(1.0, 0.25)
    assert decodes.seconds(1) == 6.5 + 1.0 + 0.25 * 12
    assert decodes.seconds(0) == 1.0 + 0.25 * 41


@given(STEPS)
def test_decodes_match_row_by_row_accounting(steps: list[tuple[str, int, int, int, int]]) -> None:
    decodes = Decodes(3)
    positions: dict[int, int] = {}
    seconds = [0.0] * 3
    taken = [0.0] * 3
    for what, slot, position, base, slope in steps:
        everybody = np.array(sorted(positions), np.int64)
        only, absent = np.array([slot]), what == "sit out" and slot in positions
        if what == "note" and slot not in positions:
            decodes.begin_decode(slot, position)
            positions[slot] = position
        if what == "drop" and slot in positions:
            taken[slot] += decodes.seconds(slot)
            decodes.drop(slot)
            del positions[slot]
        if what == "anew":
            for each, passed in zip(everybody, decodes.pop_seconds(everybody), strict=True):
                taken[each] += passed
            decodes.restart_sums()
        if what == "place" and slot in positions:
            taken[slot] += decodes.pop_seconds(only)[0]
            decodes.set_positions(only, np.array([position]))
            positions[slot] = position
        if absent:
            taken[slot] += decodes.pop_seconds(only)[0]
        decodes.add(base, slope)
        if absent:
            decodes.undo_add(only)
        for each in positions:
            if not (absent and each == slot):
                seconds[each] += base + slope * (positions[each] + 1)
                positions[each] += 1
        assert decodes.positions == sum(positions.values())
        assert decodes.positions_of(np.array([*positions], np.int64)) == decodes.positions
        totals = [before + decodes.seconds(each) for each, before in enumerate(taken)]
        assert totals == pytest.approx(seconds)
