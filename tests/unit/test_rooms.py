"""When rooms came free in the queue, by the leader's words."""

from __future__ import annotations

import pytest

from everlift.v1.session_pb2 import Outlook
from router.admission.rooms import Rooms


def hear(rooms: Rooms, left: int, now: float, queued: int = 9, gateways: int = 1) -> None:
    rooms.hear(Outlook(rooms_per_s=2.0, left=left, gateways=gateways), queued, now)


def test_they_came_between_two_words_or_will_come_as_is_foreseen() -> None:
    rooms = Rooms()
    hear(rooms, 100, now=0.0)
    assert rooms.foreseen(3.0, now=1.0) == 8.0
    hear(rooms, 104, now=1.0)
    hear(rooms, 104, now=2.0)
    hear(rooms, 106, now=3.0)
    moments = [rooms.moment(number, since=0.0, now=3.5) for number in (1.0, 4.0, 5.0, 6.0, 9.0)]
    assert moments == [0.25, 1.0, 2.5, 3.0, 4.5]


def test_a_queue_in_which_nobody_waits_has_room_for_all() -> None:
    rooms = Rooms()
    hear(rooms, 0, now=0.0, queued=0)
    hear(rooms, 2, now=1.0)
    hear(rooms, 4, now=2.0, queued=0)
    assert rooms.moment(50.0, since=1.0, now=2.0) == 2.0
    assert rooms.moment(3.0, since=1.0, now=2.0) == 1.5


def test_each_gateway_counts_on_its_part() -> None:
    rooms = Rooms()
    hear(rooms, 0, now=0.0, gateways=2)
    hear(rooms, 8, now=1.0, gateways=2)
    assert rooms.moment(4.0, since=0.0, now=1.0) == 1.0


def test_a_new_leader_counts_from_0() -> None:
    rooms = Rooms()
    hear(rooms, 900, now=0.0)
    hear(rooms, 904, now=1.0)
    hear(rooms, 4, now=2.0)
    assert rooms.moment(8.0, since=0.0, now=2.0) == 2.0


def test_what_was_long_ago_is_known_to_a_hundredth_of_the_time_since_then() -> None:
    """So many words are kept of a day as of an hour and a few."""
    rooms, lengths = Rooms(), list[int]()
    for tick in range(5 * 86_400):
        now = tick / 5
        hear(rooms, tick, now, queued=tick % 5)
        if now in (3_600.0, 86_000.0):
            lengths.append(len(rooms._moments))
    assert lengths[1] <= lengths[0] + 350 <= 1_500
    assert len(rooms._moments) == len(rooms._numbers) and len(rooms._empty) <= len(rooms._moments)
    for came in (86_399.0, 86_300.0, 85_500.0, 80_000.0, 40_000.0):
        ago = now - came
        assert rooms.moment(5 * came, since=now, now=now) == pytest.approx(came, abs=0.01 * ago)
        assert abs(rooms.moment(1e9, since=came, now=now) - came) <= 0.02 * ago + 1.0
