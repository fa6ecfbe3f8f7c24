"""What workers have of a gateway's requests, and whom of a tenant's own it names as neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from everlift.request_id import tenant_of
from router.gateway.at_workers import AtWorkers
from router.gateway.live import LiveRequest

EPOCHS = count(1)


@dataclass
class Live:
    request_id: str
    worker_id: str
    epoch: int


def come(at_workers: AtWorkers, request_id: str, worker_id: str = "w") -> int:
    epoch = next(EPOCHS)
    at_workers.add(cast(LiveRequest, Live(request_id, worker_id, epoch)))
    return epoch


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
    epoch = come(at_workers, "mine/1")
    at_workers.remove(epoch)
    assert at_workers.neighbours("mine/new", "w") == ()


NAMES = st.sampled_from(["a", "b", "c"]).flatmap(
    lambda tenant: st.integers(0, 99).map(lambda number: f"{tenant}/{number}")
)


@given(st.lists(st.tuples(NAMES, st.sampled_from(["v", "w"]))), NAMES)
def test_nobody_is_named_to_another_tenant(
    arrivals: list[tuple[str, str]], request_id: str
) -> None:
    at_workers = AtWorkers()
    for name, worker_id in arrivals:
        come(at_workers, name, worker_id)
    told = at_workers.neighbours(request_id, "w")
    assert len(told) <= 8
    assert set(told) <= {name for name, worker_id in arrivals if worker_id == "w"}
    assert all(tenant_of(name) == tenant_of(request_id) for name in told)
