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


def test_it_is_forgotten_what_nobody_is_told_of_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.admission.rooms._KEPT", 5)
    rooms = Rooms()
    for second in range(100):
        hear(rooms, second, float(second), queued=0)
    assert max(map(len, (rooms._moments, rooms._numbers, rooms._empty))) <= 10
    assert rooms.moment(97.5, since=99.5, now=99.5) == 97.5
    assert rooms.moment(98.0, since=98.0, now=99.5) == 98.0
