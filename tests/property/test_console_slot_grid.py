"""A console that applies all changes has the right occupants of slots, whatever workers do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.console.slot_grid import LOST, Cause, Occupancy, Phase, SlotGrid, SlotOccupant

REQUESTS = st.sampled_from(["p", "q", "r", "s"])
OCCUPANTS = st.builds(SlotOccupant, REQUESTS, st.sampled_from([Phase.PREFILL, Phase.DECODE]))
WORKERS = st.one_of(
    st.just(LOST),
    st.builds(
        Occupancy,
        st.dictionaries(st.integers(0, 3), OCCUPANTS, max_size=4),
        preemptions=st.integers(0, 3),
        is_draining=st.booleans(),
    ),
)
LOOKS = st.lists(st.fixed_dictionaries({"a": WORKERS, "b": WORKERS}), max_size=12)


@given(LOOKS)
def test_slot_grid_changes_add_up_to_occupancy(looks: list[dict[str, Occupancy]]) -> None:
    grid = SlotGrid()
    names: dict[int, str] = {}
    known: dict[tuple[str, int], SlotOccupant] = {}
    for number, look in enumerate(looks):
        changes = grid.update(look, 50.0 * number)
        for key, name in changes.requests.items():
            assert names.setdefault(key, name) == name, "a key stands for one request"
        for change in changes.slots:
            place = (change.slot_id.worker_id, change.slot_id.slot)
            if change.key:
                known[place] = SlotOccupant(names[change.key], change.phase)
            else:
                del known[place]
        assert known == {
            (worker_id, slot): occupant
            for worker_id, occupancy in look.items()
            for slot, occupant in occupancy.occupants.items()
        }


@given(LOOKS)
def test_slot_grid_transfer_links_old_and_new_slot(
    looks: list[dict[str, Occupancy]],
) -> None:
    grid = SlotGrid()
    seen: dict[str, set[tuple[str, int]]] = {}
    for number, look in enumerate(looks):
        for worker_id, occupancy in look.items():
            for slot, occupant in occupancy.occupants.items():
                seen.setdefault(occupant.request_id, set()).add((worker_id, slot))
        for it in grid.update(look, 50.0 * number).transfers:
            assert (it.source.worker_id, it.source.slot) in seen[it.request_id]
            assert look[it.target.worker_id].occupants[it.target.slot].request_id == it.request_id
            stays = it.source.worker_id == it.target.worker_id
            assert stays == (it.cause is Cause.PREEMPTED)
            assert it.left_at <= 50 * number
