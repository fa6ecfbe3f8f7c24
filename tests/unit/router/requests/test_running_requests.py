"""Index of a gateway's running requests, and the neighbours of the same tenant that it names."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from everlift.request_id import tenant_of
from router.requests.attempts import RunningRequests
from router.requests.request import LiveRequest

EPOCHS = count(1)


@dataclass
class Live:
    request_id: str
    worker_id: str
    epoch: int


def come(running: RunningRequests, request_id: str, worker_id: str = "w") -> LiveRequest:
    live = cast(LiveRequest, Live(request_id, worker_id, next(EPOCHS)))
    running.add(live)
    return live


def test_neighbours_are_limited_to_the_same_tenant() -> None:
    running = RunningRequests()
    for request_id in ("mine/1", "other/1", "mine/2", "other/2"):
        come(running, request_id)
    come(running, "mine/elsewhere", "another")
    assert running.neighbours("mine/new", "w") == ("mine/2", "mine/1")
    assert running.neighbours("other/new", "w") == ("other/2", "other/1")
    assert running.neighbours("third/new", "w") == ()
    assert running.neighbours("new", "w") == ()


def test_neighbours_examine_sixteen_and_name_eight() -> None:
    running = RunningRequests()
    for number in range(20):
        come(running, f"mine/{number}")
    assert running.neighbours("mine/new", "w") == tuple(f"mine/{it}" for it in range(19, 11, -1))
    for number in range(14):
        come(running, f"other/{number}")
    assert running.neighbours("mine/new", "w") == ("mine/19", "mine/18")


def test_neighbours_exclude_departed_requests() -> None:
    running = RunningRequests()
    running.remove(come(running, "mine/1").epoch)
    assert running.neighbours("mine/new", "w") == ()
    assert running.occupants("mine/new", "v") == ()


def test_newcomers_are_named_latest_first_even_if_departed() -> None:
    running = RunningRequests()
    come(running, "mine/before")
    live = come(running, "mine/it")
    assert running.newcomers(live) == ()
    for request_id in ("mine/1", "other/1", "mine/2", "mine/1"):
        running.remove(come(running, request_id).epoch)
    come(running, "mine/elsewhere", "v")
    assert running.newcomers(live) == ("mine/1", "mine/2")


def test_newcomers_examine_sixteen_and_name_eight() -> None:
    running = RunningRequests()
    live = come(running, "mine/it")
    for number in range(100):
        running.remove(come(running, f"mine/{number}").epoch)
    assert running.newcomers(live) == tuple(f"mine/{it}" for it in range(99, 91, -1))
    for number in range(15):
        running.remove(come(running, f"other/{number}").epoch)
    assert running.newcomers(live) == ("mine/99",)
    running.remove(live.epoch)
    assert not running._newest


def test_occupants_are_requests_on_other_workers() -> None:
    running = RunningRequests()
    for request_id, worker_id in (("mine/1", "v"), ("other/1", "v"), ("mine/2", "w")):
        come(running, request_id, worker_id)
    assert running.occupants("mine/new", "w") == ("mine/1",)
    assert running.occupants("mine/new", "x") == ("mine/2", "mine/1")


NAMES = st.sampled_from(["a", "b", "c"]).flatmap(
    lambda tenant: st.integers(0, 99).map(lambda number: f"{tenant}/{number}")
)


@given(st.lists(st.tuples(NAMES, st.sampled_from(["v", "w"]))), NAMES)
def test_running_requests_name_no_other_tenant(
    arrivals: list[tuple[str, str]], request_id: str
) -> None:
    running = RunningRequests()
    it = come(running, request_id)
    for name, worker_id in arrivals:
        come(running, name, worker_id)
    at_w = {name for name, worker_id in arrivals if worker_id == "w"}
    neighbours = running.neighbours(request_id, "w")
    newcomers = running.newcomers(it)
    assert set(neighbours) <= {request_id} | at_w and set(newcomers) <= at_w
    for names in (neighbours, newcomers, running.occupants(request_id, "v")):
        assert len(names) <= 8
        assert all(tenant_of(name) == tenant_of(request_id) for name in names)
