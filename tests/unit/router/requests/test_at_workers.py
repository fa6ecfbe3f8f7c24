"""What workers have of a gateway's requests, and whom of a tenant's own it names as neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from everlift.request_id import tenant_of
from router.requests.at_workers import AtWorkers
from router.requests.request import LiveRequest

EPOCHS = count(1)


@dataclass
class Live:
    request_id: str
    worker_id: str
    epoch: int


def come(at_workers: AtWorkers, request_id: str, worker_id: str = "w") -> LiveRequest:
    live = cast(LiveRequest, Live(request_id, worker_id, next(EPOCHS)))
    at_workers.add(live)
    return live


def test_of_two_tenants_at_a_worker_each_is_told_its_own_alone() -> None:
    at_workers = AtWorkers()
    for request_id in ("mine/1", "other/1", "mine/2", "other/2"):
        come(at_workers, request_id)
    come(at_workers, "mine/elsewhere", "another")
    assert at_workers.neighbours("mine/new", "w") == ("mine/2", "mine/1")
    assert at_workers.neighbours("other/new", "w") == ("other/2", "other/1")
    assert at_workers.neighbours("third/new", "w") == ()
    assert at_workers.neighbours("new", "w") == ()


def test_of_many_the_last_sixteen_are_looked_at_and_eight_told() -> None:
    at_workers = AtWorkers()
    for number in range(20):
        come(at_workers, f"mine/{number}")
    assert at_workers.neighbours("mine/new", "w") == tuple(f"mine/{it}" for it in range(19, 11, -1))
    for number in range(14):
        come(at_workers, f"other/{number}")
    assert at_workers.neighbours("mine/new", "w") == ("mine/19", "mine/18")


def test_who_has_left_is_nobodys_neighbour() -> None:
    at_workers = AtWorkers()
    at_workers.remove(come(at_workers, "mine/1").epoch)
    assert at_workers.neighbours("mine/new", "w") == ()
    assert at_workers.occupants("mine/new", "v") == ()


def test_who_came_since_is_told_the_last_one_first_gone_or_not() -> None:
    at_workers = AtWorkers()
    come(at_workers, "mine/before")
    live = come(at_workers, "mine/it")
    assert at_workers.newcomers(live) == ()
    for request_id in ("mine/1", "other/1", "mine/2", "mine/1"):
        at_workers.remove(come(at_workers, request_id).epoch)
    come(at_workers, "mine/elsewhere", "v")
    assert at_workers.newcomers(live) == ("mine/1", "mine/2")


def test_of_many_that_came_since_the_last_sixteen_are_looked_at() -> None:
    at_workers = AtWorkers()
    live = come(at_workers, "mine/it")
    for number in range(100):
        at_workers.remove(come(at_workers, f"mine/{number}").epoch)
    assert at_workers.newcomers(live) == tuple(f"mine/{it}" for it in range(99, 91, -1))
    for number in range(15):
        at_workers.remove(come(at_workers, f"other/{number}").epoch)
    assert at_workers.newcomers(live) == ("mine/99",)
    at_workers.remove(live.epoch)
    assert not at_workers._came


def test_without_room_those_that_other_workers_have_are_told() -> None:
    at_workers = AtWorkers()
    for request_id, worker_id in (("mine/1", "v"), ("other/1", "v"), ("mine/2", "w")):
        come(at_workers, request_id, worker_id)
    assert at_workers.occupants("mine/new", "w") == ("mine/1",)
    assert at_workers.occupants("mine/new", "x") == ("mine/2", "mine/1")


NAMES = st.sampled_from(["a", "b", "c"]).flatmap(
    lambda tenant: st.integers(0, 99).map(lambda number: f"{tenant}/{number}")
)


@given(st.lists(st.tuples(NAMES, st.sampled_from(["v", "w"]))), NAMES)
def test_nobody_is_named_to_another_tenant(
    arrivals: list[tuple[str, str]], request_id: str
) -> None:
    at_workers = AtWorkers()
    it = come(at_workers, request_id)
    for name, worker_id in arrivals:
        come(at_workers, name, worker_id)
    at_w = {name for name, worker_id in arrivals if worker_id == "w"}
    neighbours = at_workers.neighbours(request_id, "w")
    newcomers = at_workers.newcomers(it)
    assert set(neighbours) <= {request_id} | at_w and set(newcomers) <= at_w
    for told in (neighbours, newcomers, at_workers.occupants(request_id, "v")):
        assert len(told) <= 8
        assert all(tenant_of(name) == tenant_of(request_id) for name in told)
